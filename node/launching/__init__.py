"""A whole run on this machine: which process computes where, and all of them as children."""
