"""What attention to tokens of other ranks (context parallelism) sends and keeps, whatever the heads are made of. No
torch."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.spec.model.part import Collective, Coordinate, Kept, MicroBatch


def context_calls(at: Coordinate, batch: MicroBatch, heads: int, kv: int, head_dim: int) -> Iterator[Collective]:
    """Yields the calls of attention to tokens of other ranks. With K the bytes of a rank's keys and values:

    ring: forward c - 1 sends of K; backward c sends: K, then c - 2 times K and its gradient, then a gradient.
    gather: forward 1 all_gather of c K; backward the same again and 1 reduce_scatter of c K.
    ulysses: forward 1 all_to_all of queries, keys and values and 1 of the result, backward the same; fewer key-value
    heads than ranks are copied first. hybrid: that over the inner ranks, and a ring over the outer ones.
    """
    inner = {"ulysses": ("cp", at.size("cp")), "hybrid": ("cp.inner", at.size("cp.inner"))}.get(at.context, ("cp", 1))
    rows, (axis, n) = batch.tokens(at) * head_dim * batch.element, inner
    dealt = max(kv, n)
    if n > 1:
        for phase in ("forward", "backward"):
            yield Collective(phase, axis, "all_to_all", rows * (heads + 2 * dealt))
            yield Collective(phase, axis, "all_to_all", rows * heads)
    outer, c = ("cp.outer", at.size("cp.outer")) if at.context == "hybrid" else ("cp", at.size("cp") // n)
    both = 2 * rows * (dealt if n > 1 else kv)
    if c == 1:
        return
    if at.context == "gather":
        yield Collective("forward", outer, "all_gather", c * both)
        yield Collective("backward", outer, "all_gather", c * both)
        yield Collective("backward", outer, "reduce_scatter", c * both)
        return
    yield Collective("forward", outer, "send", both, c - 1)
    yield Collective("backward", outer, "send", both, 2)
    yield Collective("backward", outer, "send", 2 * both, c - 2)


def _exchanging(at: Coordinate) -> int:
    """The ranks that exchange heads for tokens."""
    return {"ulysses": at.size("cp"), "hybrid": at.size("cp.inner")}.get(at.context, 1)


def context_kept(at: Coordinate, batch: MicroBatch, heads: int, kv: int, head_dim: int) -> Iterator[Kept]:
    """Yields what attention to tokens of other ranks keeps besides its queries, keys, values and result: log-sums and,
    of a ring, the last block that arrived. Ranks that exchange heads keep those that arrived instead of their own, with
    the copies of heads that several ranks need, and the result as the core returns it."""
    tokens, e = batch.tokens(at), batch.element
    each = tokens * head_dim * e
    n = _exchanging(at)
    if n > 1:
        yield Kept("result by heads", each * heads)
    yield Kept("log-sums", tokens * heads * batch.wide)
    dealt = max(kv, n) if n > 1 else kv
    if at.context in ("ring", "hybrid"):
        yield Kept("last block", 2 * each * dealt)
    else:
        yield Kept("copied heads", 2 * each * (dealt - kv))


def context_working(
    at: Coordinate, batch: MicroBatch, heads: int, kv: int, head_dim: int, window: bool = False
) -> float:
    """Returns the bytes that merging blocks takes for a moment, in backward: the gradient of the queries so far, wide,
    and of one block; of gathered keys and values a copy in order and their gradients, wide."""
    n = _exchanging(at)
    if at.size("cp") == n and not (batch.documents or window):
        return 0.0  # whole sequences, by one kernel
    each = batch.tokens(at) * head_dim
    keys = 2.0 * each * max(kv, n if n > 1 else 0)
    found = each * heads * (batch.wide + batch.element)
    if at.context == "gather":
        return found + at.size("cp") * keys * (2 * batch.element + batch.wide)
    return found + keys * (2 * batch.element + batch.wide)
