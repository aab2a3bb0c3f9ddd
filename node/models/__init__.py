"""Hugging Face models: their files, which of them are trained exactly, making, loading and writing them."""
