"""Measurements: the links and ranks of a machine, and one device's training step beside its least time."""
