"""Training code. Independent of the network."""
