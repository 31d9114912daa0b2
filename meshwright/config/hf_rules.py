"""What a model that transformers builds (`model.kind=hf`) can't be combined with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshwright.config.data import PACKED
from meshwright.errors import divisors, either

if TYPE_CHECKING:
    from meshwright.config.sections import Config


def hf_fits(c: Config, world: int) -> Iterator[str]:
    """Everything but tp, pp, dp and ZeRO is known of our own models only."""
    if c.model.kind != "hf":
        return
    if not c.model.hf:
        yield "model.kind=hf builds the model of a folder: name it in model.hf"
    o, tp = c.layout, c.layout.tp
    plain_values: list[tuple[str, Any, Any]] = [
        ("layout.cp", o.cp, 1), ("layout.ep", o.ep, 1), ("layout.sequence_parallel", o.sequence_parallel, False),
        ("layout.tp_grid", o.tp_grid, ()), ("comm.overlap.tensor", c.comm.overlap.tensor and tp > 1, False),
        ("recompute.pieces", c.recompute.pieces, 1), ("recompute.offload", c.recompute.offload, False),
        ("tune.kind", c.tune.kind, "full"), ("train.compile", c.train.compile == "true", False),
    ]  # fmt: skip
    for key, value, plain in plain_values:
        if value != plain:
            word = str(value).lower()
            yield f"{key}={word} can't be used with a model that transformers builds (model.kind=hf): leave it out"
    if c.train.precision == "fp8":
        yield "train.precision=fp8 can't be used with a model that transformers builds (model.kind=hf): use bf16"
    if c.recompute.mode not in ("none", "full"):
        yield f"recompute.mode={c.recompute.mode} can't be used with model.kind=hf: use none or full"
    if c.model.kv_heads % tp:
        fits = either(divisors(c.model.kv_heads))
        yield f"tp={tp} does not divide the {c.model.kv_heads} key-value heads of {c.model.hf}: try layout.tp={fits}"
    if c.objective not in ("causal", "chat"):
        yield f"data.objective={c.objective} needs a model of ours, and model.kind is hf: leave it out"
    if c.objective not in PACKED and c.data.reset_positions != c.data.reset_attention:
        yield (
            "transformers keeps attention within the tokens that positions count from 0: set data.reset_positions and "
            "data.reset_attention alike"
        )
