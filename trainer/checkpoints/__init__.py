"""Checkpoints: what lies in a folder (:mod:`scan`), and whether it is whole (:mod:`judge`)."""
