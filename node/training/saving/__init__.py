"""Exact checkpoints: what a learner and a run are made of, on disk."""
