"""Engines: token ids in, token ids and the sampler's own logprobs out, under a stamped policy version."""
