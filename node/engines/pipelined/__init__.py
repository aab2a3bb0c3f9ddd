"""Engines of which every node computes some layers."""
