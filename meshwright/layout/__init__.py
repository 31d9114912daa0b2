"""Where every rank stands, and what every parameter is and where it lives; nothing here imports torch."""

from __future__ import annotations

from meshwright.layout.layout import Layout, Parts, node_parts

__all__ = ["Layout", "Parts", "node_parts"]
