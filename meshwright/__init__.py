"""Meshwright trains transformer language models on any mesh of devices."""

from __future__ import annotations

__version__ = "0.1.0"
