"""Where every rank stands, and what every parameter is and where it lives; nothing here imports torch."""

from __future__ import annotations

from meshwright.spec.layout.layout import Layout, Parts, exchange_parts, node_parts

__all__ = ["Layout", "Parts", "exchange_parts", "node_parts"]
