"""Plain text for people: tables with aligned columns, and numbers with few digits. No torch."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], left: tuple[int, ...] = (0,), indent: str = "  ") -> str:
    """Rows of cells, the first row a head; the columns `left` are aligned left, all others right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        pairs = enumerate(zip(row, widths, strict=True))
        cells = [cell.ljust(width) if i in left else cell.rjust(width) for i, (cell, width) in pairs]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def seconds(value: float) -> str:
    if value >= 100:
        return f"{value:.0f} s"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{1e3 * value:.2f} ms" if value >= 1e-4 else f"{1e6 * value:.1f} us"


def size(value: float) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= factor:
            return f"{value / factor:.2f} {unit}"
    return f"{value:.0f} B"


def count(value: float) -> str:
    """Parameters: `8.03B`, `124M`."""
    return f"{value / 1e9:.4g}B" if value >= 1e9 else f"{value / 1e6:.3g}M"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"
