"""Peers, streams, heads and chunks. Knows nothing of models or torch."""
