"""A causal model made ready for training: attention, head, adapters, experts, masters."""
