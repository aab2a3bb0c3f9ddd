"""Supervised fine-tuning on rows of demonstrations."""
