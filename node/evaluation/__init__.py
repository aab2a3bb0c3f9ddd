"""Evaluation: tasks of a held-out split played k times by a model, and what that says of it."""
