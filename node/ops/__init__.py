"""Operating a node: logs, metrics, status, control socket. What every node does."""
