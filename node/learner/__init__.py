"""A learner: a node that trains a run together with its trainer."""
