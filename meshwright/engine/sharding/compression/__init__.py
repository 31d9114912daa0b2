"""Reducers that send less than the gradients themselves."""
