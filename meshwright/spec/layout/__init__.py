"""The coordinates and groups of ranks, and the placement of parameters on them. Nothing here imports torch."""

from __future__ import annotations

from meshwright.spec.layout.layout import Layout, Parts, exchange_parts, node_parts

__all__ = ["Layout", "Parts", "exchange_parts", "node_parts"]
