"""The kinds of context parallelism: ways in which ranks that share sequences (`layout.cp`) attend to each other's
tokens. No torch."""

from __future__ import annotations

from typing import NamedTuple

# The two parts of cp in hybrid context parallelism: the ranks that exchange heads, and the ring between such groups.
CP_INNER, CP_OUTER = "cp.inner", "cp.outer"


class ContextPlan(NamedTuple):
    """The axes of context parallelism, and how keys and values travel along the outer one.

    An axis with an empty name has one rank.
    """

    inner: str = ""  # the axis whose ranks exchange heads for tokens by all-to-all
    outer: str = ""  # the axis whose ranks share keys and values
    gathers: bool = False  # the outer ranks all-gather keys and values instead of passing them round a ring

    @property
    def passes(self) -> bool:
        """True if keys and values travel around a ring while ranks attend to the ones they already have."""
        return bool(self.outer) and not self.gathers


WHOLE_SEQUENCES = ContextPlan()
# The keys are the values of `context.kind`.
CONTEXT_PLANS = {
    "gather": ContextPlan(outer="cp", gathers=True),
    "ring": ContextPlan(outer="cp"),
    "ulysses": ContextPlan(inner="cp"),
    "hybrid": ContextPlan(CP_INNER, CP_OUTER),
}
