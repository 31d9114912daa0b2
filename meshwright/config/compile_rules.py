"""What blocks can be compiled with, and several of them together."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.config.sections import Config


def compiles_without_dropout(c: Config, world: int) -> Iterator[str]:
    if c.train.compile == "true" and c.drops:
        yield "train.compile=true can't be combined with dropout: set train.compile=auto or model.dropout=0"


def blocks_compile_together(c: Config, world: int) -> Iterator[str]:
    together = f"train.compile_together={c.train.compile_together}"
    if c.train.compile_together in ("auto", 1):
        return
    if not c.compiles:
        yield f"{together} needs compiled blocks, which train.compile=false and dropout leave out: set it to 1"
    for needed in keeps_blocks_apart(c):
        yield f"{together} needs {needed}: set that, or train.compile_together=1"
    if c.model.kind == "hf":
        yield f"{together} can't take blocks of transformers: set train.compile_together=1"


def keeps_blocks_apart(c: Config) -> list[str]:
    """Returns what would have to be set for several blocks in one graph: between them, nothing can be communicated,
    gathered or added to the loss."""
    wanted = {
        "layout.tp=1": c.layout.tp == 1, "layout.cp=1": c.layout.cp == 1, "zero.stage=2": c.zero.stage < 3,
        "model.experts.count=0": c.model.experts.count == 0, "recompute.pieces=1": c.recompute.pieces == 1,
    }  # fmt: skip
    return [key for key, holds in wanted.items() if not holds]
