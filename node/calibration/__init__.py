"""Calibration: how far honest workers differ, and whether cheats stand out from that."""
