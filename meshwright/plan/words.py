"""A layout in plain words, for people who have not met its keys yet. No torch."""

from __future__ import annotations

from meshwright.config.sections import Config
from meshwright.errors import plural

SHARDED = {1: "optimizer states", 2: "optimizer states and gradients", 3: "optimizer states, gradients and weights"}


def plain_words(config: Config, ranks: int) -> str:
    """Says what ranks do, with the key's name behind it: `each batch is divided over 2 copies of the model (dp)`."""
    layout = config.layout
    copies = ranks // (layout.tp * layout.pp * layout.cp)
    found = []
    if layout.tp > 1:
        found.append(f"{layout.tp} ranks share each layer (tp)")
    if layout.cp > 1:
        found.append(f"{layout.cp} ranks share each sequence (cp)")
    if layout.pp > 1:
        found.append(f"the layers are divided into {layout.pp} stages (pp)")
    if copies > 1:
        divided = f", which divide {SHARDED[config.zero.stage]} (ZeRO {config.zero.stage})" if config.zero.stage else ""
        found.append(f"each batch is divided over {copies} copies of the model (dp){divided}")
    if layout.ep > 1:
        found.append(f"the experts are divided over {layout.ep} ranks (ep)")
    if not found:
        found.append("one rank computes everything")
    found.append(f"{plural(config.train.micro_batch, 'sequence')} at a time (micro-batch)")
    if config.recompute.mode != "none":
        found.append(f"backward computes activations again (recompute {config.recompute.mode})")
    return "; ".join(found)
