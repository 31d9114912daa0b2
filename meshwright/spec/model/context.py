"""What attention to tokens of other ranks (context parallelism) sends and keeps, whatever the heads are made of. No
torch."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.spec.model.part import Collective, Coordinate, Kept, MicroBatch


def context_calls(at: Coordinate, batch: MicroBatch, heads: int, kv: int, head_dim: int) -> Iterator[Collective]:
    """Yield the calls of attention to tokens of other ranks. With K the bytes of a rank's keys and values:

    ring: forward c - 1 sends of K; backward c sends: K, then c - 2 times K and its gradient, then a gradient.
    gather: forward 1 all_gather of c K; backward the same again and 1 reduce_scatter of c K.
    ulysses: forward 1 all_to_all of queries, keys and values and 1 of the result, backward the same; fewer key-value
    heads than ranks are copied first. hybrid: that over the inner ranks, and a ring over the outer ones.
    """
    (inner, outer, gathers), rows = at.context, batch.tokens(at) * head_dim * batch.element
    n, c = at.size(inner), at.size(outer)
    dealt = max(kv, n)
    if n > 1:
        for phase in ("forward", "backward"):
            yield Collective(phase, inner, "all_to_all", rows * (heads + 2 * dealt))
            yield Collective(phase, inner, "all_to_all", rows * heads)
    both = 2 * rows * dealt
    if c == 1:
        return
    if gathers:
        yield Collective("forward", outer, "all_gather", c * both)
        yield Collective("backward", outer, "all_gather", c * both)
        yield Collective("backward", outer, "reduce_scatter", c * both)
        return
    yield Collective("forward", outer, "send", both, c - 1)
    yield Collective("backward", outer, "send", both, 2)
    yield Collective("backward", outer, "send", 2 * both, c - 2)


def context_kept(at: Coordinate, batch: MicroBatch, heads: int, kv: int, head_dim: int) -> Iterator[Kept]:
    """Yield what attention to tokens of other ranks keeps besides its queries, keys, values and result: log-sums and,
    of a ring, the last block that arrived. Ranks that exchange heads keep those that arrived instead of their own, with
    the copies of heads that several ranks need, and the result as the core returns it."""
    tokens, e = batch.tokens(at), batch.element
    each = tokens * head_dim * e
    n = at.size(at.context.inner)
    if n > 1:
        yield Kept("result by heads", each * heads)
    yield Kept("log-sums", tokens * heads * batch.wide)
    dealt = max(kv, n)
    if at.context.passes:
        yield Kept("last block", 2 * each * dealt)
    else:
        yield Kept("copied heads", 2 * each * (dealt - kv))


def context_working(
    at: Coordinate, batch: MicroBatch, heads: int, kv: int, head_dim: int, window: bool = False
) -> float:
    """Return the bytes that merging blocks takes for a moment, in backward: the gradient of the queries so far, wide,
    and of one block; of gathered keys and values a copy in order and their gradients, wide."""
    n, c = at.size(at.context.inner), at.size(at.context.outer)
    if c == 1 and not (batch.documents or window):
        return 0.0  # whole sequences, by one kernel
    each = batch.tokens(at) * head_dim
    keys = 2.0 * each * max(kv, n)
    found = each * heads * (batch.wide + batch.element)
    if at.context.gathers:
        return found + c * keys * (2 * batch.element + batch.wide)
    return found + keys * (2 * batch.element + batch.wide)
