"""Checks that decide what may be learned from."""
