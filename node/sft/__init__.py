"""Supervised fine-tuning: rows of demonstrations become training samples."""
