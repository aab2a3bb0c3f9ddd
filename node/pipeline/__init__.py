"""One model over several nodes: plans, the ring, links, and the vLLM engines of the stages."""
