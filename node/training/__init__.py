"""Learning. Knows nothing of the network."""
