"""Operating a node: errors, logs, metrics, status, control socket, doctor, explain, summary."""
