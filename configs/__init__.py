"""TOML that ships with the package: `primerl-node rl @ configs/demo.toml`."""
