"""Rules about the shape of a grid of tensor-parallel ranks (`layout.tp_grid`) and the sizes that it divides."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

from meshwright.errors import UserError
from meshwright.spec.layout.grid import LENGTHS, Grid

if TYPE_CHECKING:
    from meshwright.config.sections import Config


def grid_numbers(option: str, text: str) -> tuple[int, ...]:
    """Return the sizes of a grid that a command-line option writes as 2x2."""
    words = text.split("x") if text else []
    if not all(word.isdecimal() for word in words):
        raise UserError(f"{option} {text} must be numbers joined by x, e.g. 2x2 or 2x2x2")
    return tuple(int(word) for word in words)


def check_grid(tp: int, sizes: tuple[int, ...], kind: str, keeps: bool) -> None:
    """Refuse keys that don't make a grid together. `sizes`, `kind` and `keeps` are the values of layout.tp_grid,
    tp_kind and tp_keep_gathered."""
    shown = list(sizes)
    if not sizes:
        key = f"tp_kind={kind}" if kind else f"tp_keep_gathered={str(keeps).lower()}"
        raise UserError(f"layout.{key} belongs to a grid: give layout.tp_grid too, as in layout.tp_grid=[2,2]")
    if any(size < 1 for size in sizes):
        raise UserError(f"layout.tp_grid={shown} has a size below 1: give the ranks along each of its axes")
    if len(sizes) not in (2, 3):
        raise UserError(f"layout.tp_grid={shown} has {len(sizes)} numbers: give [row, col] or [row, col, depth]")
    if not kind and len(sizes) == 3:
        raise UserError(f"layout.tp_grid={shown} may be 2.5D or 3D: set layout.tp_kind=2.5d or layout.tp_kind=3d")
    if LENGTHS[kind or "2d"] != len(sizes):
        numbers = "[row, col]" if kind == "2d" else "[row, col, depth]"
        raise UserError(f"layout.tp_kind={kind} takes layout.tp_grid={numbers}, not {shown}: change one of them")
    if prod(sizes) != tp:
        product = " x ".join(map(str, sizes))
        raise UserError(
            f"layout.tp_grid={shown} has {product} = {prod(sizes)} ranks, and layout.tp={tp}: set layout.tp="
            f"{prod(sizes)}, or a grid of {tp}"
        )


def grid_fits(config: Config, world: int) -> Iterator[str]:
    """Check that a grid divides the model's sizes and the micro-batch."""
    grid = config.layout.grid
    if grid is None:
        return
    yield from grid_divides(config, world)
    if config.train.micro_batch % grid.rows(grid.inner):
        yield from _shares(config, grid, f"layout.tp_grid={list(config.layout.tp_grid)}")


def grid_divides(c: Config, world: int) -> Iterator[str]:
    """Check that a grid divides the model's sizes evenly."""
    grid = c.layout.grid
    if grid is None:
        return
    o, model = c.layout, c.model
    # The first weight of a gated MLP is two weights in one: the gate's and the other factor's.
    widths = 2 if model.mlp.endswith("glu") else 1
    inner = grid.size(grid.inner.features)
    shown = f"layout.tp_grid={list(o.tp_grid)}"
    for key, size in (("heads", model.heads), ("kv_heads", model.kv_heads), ("ffn", model.ffn)):
        if size % inner:
            yield f"{shown} cuts model.{key}={size} into {inner} equal parts: choose a grid that divides it"
    if model.hidden % grid.col:
        yield f"{shown} cuts model.hidden={model.hidden} into {grid.col} equal parts: choose a grid that divides it"
    weights = {
        "queries, keys and values": ((model.heads + 2 * model.kv_heads) * model.head_dim, grid.first),
        "attention's output": (model.hidden, grid.second), "the MLP's first weight": (model.ffn * widths, grid.first),
    }  # fmt: skip
    for what, (size, roles) in weights.items():
        parts = grid.size(roles.y.features) * grid.size(roles.weight)
        if size % parts:
            yield f"{shown} cuts the {size} rows of {what} into {parts} equal parts: choose a grid that divides them"


def _shares(config: Config, grid: Grid, shown: str) -> Iterator[str]:
    """Check that ranks can share sequences, which they must if the parts of a grid outnumber the micro-batch's whole
    sequences."""
    size = grid.size(grid.sharing_axis)
    rows = grid.rows(grid.inner)
    model = config.model
    up = -(-config.train.micro_batch // rows) * rows
    # With `size` ranks sharing each sequence, a micro-batch must be a multiple of this many sequences.
    each = rows // size
    enough = f"train.micro_batch={config.train.micro_batch} is not a multiple of the {rows} parts of {shown}"
    if size == 1:
        yield f"{enough}: set train.micro_batch={up}"
        return
    if config.train.micro_batch % each:
        yield f"{enough}: set train.micro_batch={up}, or a multiple of {each} to share each sequence by {size} ranks"
    if model.seq % (2 * size):
        yield (
            f"{enough}, so {size} ranks share each, and model.seq={model.seq} is not a multiple of {2 * size}: "
            "change it, "
            f"or set train.micro_batch={up}"
        )
    if config.train.micro_batch // each * model.seq % grid.row:
        yield f"{enough}: set train.micro_batch={up}"
    if model.attention_dropout:
        yield (
            f"{enough}, and shared sequences can't be combined with dropout inside attention: set "
            f"train.micro_batch={up}, or model.attention_dropout=0"
        )
    if "cp" not in model.kind_facts.supports:
        yield f"{enough}, and sequences of model.kind={model.kind} can't be shared: set train.micro_batch={up}"
