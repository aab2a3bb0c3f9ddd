"""Fingerprints of hidden states: what a worker commits to while it generates, and how that is compared."""
