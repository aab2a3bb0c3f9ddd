"""Run child processes of a node: start, send requests, watch, kill, explain the end."""
