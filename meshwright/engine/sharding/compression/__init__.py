"""Reducers that compress gradients before they send them."""
