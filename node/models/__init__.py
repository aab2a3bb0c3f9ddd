"""Hugging Face models: files, supported architectures, creation, loading, export."""
