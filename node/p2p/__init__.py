"""The network: transports, peers, discovery, gossip, heads, chunks, uploads. Knows no torch and no model."""
