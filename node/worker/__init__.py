"""The inference worker: leases, rollouts, uploads, weight sync, pipeline stages."""
