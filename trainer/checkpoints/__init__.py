"""Checkpoints: what lies in a folder, and whether it is whole."""
