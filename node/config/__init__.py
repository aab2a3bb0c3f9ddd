"""Configuration: pydantic models of every command, and how they are read."""
