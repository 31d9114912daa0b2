"""Modules of other programs, sharded by a plan: a user's module, or a transformers model without a description here."""
