"""The OpenAI-compatible server of a policy: see server.py."""
