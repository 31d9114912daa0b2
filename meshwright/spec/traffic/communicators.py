"""Communicators: the connections that a back end makes for a group of ranks when it is first used. No torch.

NCCL makes one communicator for the collectives of a process group, and one for each pair of its ranks that send to each
other. Each holds device memory of its own and a stream of its own.
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.spec.layout import Layout

PP, PP_BACK = "pp", "pp.back"
"""The pipeline's groups: activations go over the first and gradients over the second. A pair of ranks has one queue per
communicator, so in a common one a receive that was posted early would hold up the next send the other way."""

EMBEDDING, WORLD, SEQUENCE = "embedding", "world", "tp-cp"

# The most thread blocks of a kernel, where NCCL chooses up to 32. Its memory grows with them. World and the router's
# sums move kilobytes. Pipeline sends move one tensor at a time, and a posted receive holds its blocks until the tensor
# comes: four carry more than a network card does.
# A layout whose order has cp before tp names the router's group the other way round.
MOST_BLOCKS = {WORLD: 2, SEQUENCE: 2, "cp-tp": 2, EMBEDDING: 4, PP: 4, PP_BACK: 4}

# The compute stream waits for these at once, while others run beside it.
_URGENT = ("tp", "cp", "ep", "etp", "pp")


class Communicator(NamedTuple):
    """One communicator of a rank: the group it belongs to, its ranks, and whether it connects two neighbours."""

    group: str
    ranks: tuple[int, ...]
    is_pair: bool = False

    @property
    def is_small(self) -> bool:
        return self.group in MOST_BLOCKS


def is_urgent(group: str) -> bool:
    """Return True if compute waits for a group's calls, which then get high-priority streams."""
    return all(word.split(".")[0] in _URGENT for word in group.split("-"))


def shared_by_world(layout: Layout) -> str | None:
    """Returns the group of all ranks, besides `world`, whose process group `world` uses too: one communicator serves
    both. None where there is no such group."""
    names = (name for name in layout.step_groups() if name not in (PP, WORLD))
    return next((name for name in names if layout.world > 1 and layout.size(name) == layout.world), None)
