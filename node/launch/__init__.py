"""The `rl` command: which process gets which GPUs, and all of them as children."""
