"""Benchmarks of a machine's links and ranks, and of one device's training step against its lower bound."""
