"""How ranks that share sequences (`layout.cp`) attend to each other's tokens. No torch."""

from __future__ import annotations

from typing import NamedTuple

CP_INNER, CP_OUTER = "cp.inner", "cp.outer"  # parts of cp: ranks that exchange heads, and the ring between them


class ContextPlan(NamedTuple):
    """The two axes of context parallelism, and what goes along the outer one. An axis without a name has one rank."""

    inner: str = ""  # its ranks exchange heads for tokens
    outer: str = ""  # its ranks share keys and values
    gathers: bool = False  # the outer ranks gather all keys and values at once, instead of passing them round a ring

    @property
    def passes(self) -> bool:
        """True if keys and values travel around a ring while attention to those at hand goes on."""
        return bool(self.outer) and not self.gathers


NOT_SHARED = ContextPlan()
# By `context.kind`.
CONTEXT_PLANS = {
    "gather": ContextPlan(outer="cp", gathers=True),
    "ring": ContextPlan(outer="cp"),
    "ulysses": ContextPlan(inner="cp"),
    "hybrid": ContextPlan(CP_INNER, CP_OUTER),
}
