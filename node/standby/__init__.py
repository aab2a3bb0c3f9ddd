"""A standby: a node that keeps a copy of a run, from which a trainer can go on."""
