"""Environments give tasks, drive rollouts and score them."""
