"""Composition: each command's node is put together here, and nothing else is done."""
