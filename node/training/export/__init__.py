"""The policy from wherever it is trained to the host, and where it changed."""
