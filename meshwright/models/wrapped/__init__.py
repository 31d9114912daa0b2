"""Modules of other programs, cut by a plan: transformers' models that have no description here, and one's own."""
