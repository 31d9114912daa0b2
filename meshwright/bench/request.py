"""The request of `meshwright comm bench`, checked completely before any rank starts. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from meshwright.errors import UserError, nearest
from meshwright.spec.layout.layout import AXES, Layout
from meshwright.spec.traffic.ledger import OPERATIONS

OPS = tuple(OPERATIONS)
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "": 1}


@dataclass(frozen=True)
class MeasurementRequest:
    """The measurements to make: every op with every size on every axis of a layout."""

    layout: Layout
    axes: tuple[str, ...]
    ops: tuple[str, ...]
    sizes: tuple[int, ...]  # Payloads in bytes, ascending.
    seconds: float  # The approximate time budget per measurement.
    name: str = "measured"  # The name of the cluster.
    device: str = "auto"
    backend: str = "auto"

    @property
    def node_size(self) -> int:
        return self.layout.node_size or self.layout.world


def host_bytes() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def parse_ops(text: str) -> tuple[str, ...]:
    ops = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for op in ops:
        if op not in OPS:
            raise UserError(f"--ops has the unknown op '{op}'{nearest(op, OPS)}: choose from {', '.join(OPS)}")
    if not ops:
        raise UserError(f"--ops is empty: choose from {', '.join(OPS)}")
    return ops


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse sizes: `1K:64M` means 1 KiB, 2 KiB, ... 64 MiB; `1K,3M` means just these. A fit needs two or more."""
    try:
        if ":" in text:
            first, last = (_bytes(part) for part in text.split(":"))
            sizes = [first << n for n in range(64) if first << n <= last]
        else:
            sizes = sorted({_bytes(part) for part in text.split(",")})
    except ValueError:
        sizes = []
    if len(sizes) < 2:
        raise UserError(f"--sizes {text} is not two sizes or more: write e.g. 1K:64M (doubling) or 4K,1M,16M")
    return tuple(sizes)


def _bytes(text: str) -> int:
    word = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = word[-1:] if word[-1:] in ("K", "M", "G") else ""
    value = int(word.removesuffix(unit)) * UNITS[unit]
    if value < 1:
        raise ValueError(text)
    return value


def parse_axes(layout: Layout, text: str | None) -> tuple[str, ...]:
    """Return the axes named in `text`, or all axes with more than one rank if it is None."""
    if text is None:
        axes = tuple(axis for axis in ("tp", "cp", "dp", "pp") if layout.size(axis) > 1)
        if not axes:
            raise UserError("a world of one rank has nobody to talk to: start 2 ranks or more")
        return axes
    axes = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    for axis in axes:
        if axis not in AXES:
            raise UserError(f"--axis has the unknown axis '{axis}'{nearest(axis, AXES)}: choose from {', '.join(AXES)}")
        if layout.size(axis) == 1:
            sizes = ", ".join(f"{name}={layout.size(name)}" for name in AXES)
            raise UserError(f"--axis {axis} has one rank, with nobody to talk to: choose a larger one from {sizes}")
    return axes
