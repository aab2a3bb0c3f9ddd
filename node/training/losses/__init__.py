"""Losses by name, and the sums that metrics are made of."""
