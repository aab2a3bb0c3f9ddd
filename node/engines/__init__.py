"""Engines generate tokens under a stamped policy version. They know no network."""
