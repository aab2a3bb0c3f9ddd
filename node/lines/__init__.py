"""Lines between the stages of one model: frames over the transport, to and from the process that computes."""
