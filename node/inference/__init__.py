"""Engines: token ids in, token ids and the sampler's logprobs out, with policy versions."""
