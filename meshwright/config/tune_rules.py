"""The rules about adapters in 4 bits and losses over answers, between keys of several sections."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.config.sections import Config
from meshwright.spec.layout.packed import BLOCK


def packed_weights_fit(c: Config, world: int) -> Iterator[str]:
    """The rows of a product's weight are stored in blocks, and tp cuts the inputs of some."""
    if c.tune.quantise == "none":
        return
    tp, latent = c.layout.tp, c.model.latent
    heads = c.model.heads * (latent.v_dim if latent.kv_rank else c.model.head_dim)
    dense = not c.model.experts.count or c.model.experts.first_dense or c.model.experts.every > 1
    inputs = {"model.hidden": c.model.hidden, "the width of all heads": heads // tp}
    inputs |= {"model.ffn": c.model.ffn // tp} if dense else {}
    inputs |= {"model.latent.kv_rank": latent.kv_rank, "model.latent.q_rank": latent.q_rank}
    for name, size in inputs.items():
        if size % BLOCK:
            cut = name in ("the width of all heads", "model.ffn") and tp > 1
            yield (
                f"tune.quantise={c.tune.quantise} stores rows in blocks of {BLOCK} values, and {name} is {size}"
                f"{' on a tp rank: use a smaller layout.tp, or' if cut else ': set'} tune.quantise=none"
            )


def preferences_fit(c: Config, world: int) -> Iterator[str]:
    if c.objective != "preference":
        return
    if c.model.experts.aux_loss or c.model.experts.z_loss:
        yield "data.objective=preference takes no losses of experts: set model.experts.aux_loss=0 and z_loss=0"
    if c.compares and (not c.tune.adapts or c.tune.modules_to_save):
        yield (
            f"tune.loss={c.tune.loss} compares with the frozen weights, and the run changes them: set tune.kind=lora "
            "without modules_to_save, or use orpo or simpo"
        )
