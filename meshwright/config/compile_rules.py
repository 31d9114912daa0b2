"""What blocks can be compiled with, and several of them together."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.config.sections import Config


def compiles_without_dropout(c: Config, world: int) -> Iterator[str]:
    if c.train.compile == "true" and c.drops:
        yield "train.compile=true can't be combined with dropout: set train.compile=auto or model.dropout=0"


def blocks_compile_together(c: Config, world: int) -> Iterator[str]:
    """Between blocks of one graph, nothing can be communicated, counted or noted."""
    together = f"train.compile_together={c.train.compile_together}"
    if c.train.compile_together == 1:
        return
    if not c.compiles:
        yield f"{together} needs compiled blocks, which train.compile=false and dropout leave out: set it to 1"
    refused = {
        "layout.tp=1": c.layout.tp > 1, "layout.cp=1": c.layout.cp > 1, "zero.stage=2": c.zero.stage == 3,
        "model.experts.count=0": c.model.experts.count > 0, "recompute.pieces=1": c.recompute.pieces > 1,
        "faults.locate=false": c.faults.locate,
    }  # fmt: skip
    for needed in (needed for needed, found in refused.items() if found):
        yield f"{together} needs {needed}: set that, or train.compile_together=1"
    if c.model.kind == "hf":
        yield f"{together} can't take blocks of transformers: set train.compile_together=1"
