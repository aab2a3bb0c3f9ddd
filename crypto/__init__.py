"""Keys, signatures and content hashes. Imports nothing of ours."""
