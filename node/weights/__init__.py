"""Model state as bits: digests, the lossless delta codec, the chain of versions. Knows no torch, no network."""
