"""Stages of one model: what travels between them. Knows no network and no models."""
