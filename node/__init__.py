"""Everything that runs: stores, weights, network, engines, environments, training, proofs, roles, daemon."""
