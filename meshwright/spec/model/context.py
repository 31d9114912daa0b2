"""The communication and memory of attention to tokens of other ranks (context parallelism), for any kind of heads. No
torch."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.spec.model.part import Collective, Coordinate, MicroBatch, SavedTensor


def context_calls(at: Coordinate, batch: MicroBatch, heads: int, kv: int, head_dim: int) -> Iterator[Collective]:
    """Yield the calls of attention to tokens of other ranks. K stands for the bytes of a rank's keys and values.

    - ring: forward c - 1 sends of K; backward c sends: K, then c - 2 times K and its gradient, then a gradient.
    - gather: forward 1 all_gather of c K; backward the same again and 1 reduce_scatter of c K.
    - ulysses: forward 1 all_to_all of queries, keys and values and 1 of the result, backward the same. If there are
      fewer key-value heads than ranks, they are copied first.
    - hybrid: ulysses over the inner ranks, and a ring over the outer ones.
    """
    (inner, outer, gathers), rows = at.context, batch.tokens(at) * head_dim * batch.element
    n, c = at.size(inner), at.size(outer)
    # Every inner rank needs at least one key-value head, so fewer heads than ranks are copied.
    kv_copies = max(kv, n)
    if n > 1:
        for phase in ("forward", "backward"):
            yield Collective(phase, inner, "all_to_all", rows * (heads + 2 * kv_copies))
            yield Collective(phase, inner, "all_to_all", rows * heads)
    both = 2 * rows * kv_copies
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


def context_saved(at: Coordinate, batch: MicroBatch, heads: int, kv: int, head_dim: int) -> Iterator[SavedTensor]:
    """Yield the tensors that attention to tokens of other ranks saves, except its queries, keys, values and result.

    These are log-sums and, in a ring, the last block that arrived. Ranks that exchange heads save the heads that
    arrived instead of the ones they sent, including copies of heads that several ranks need, and the result as the core
    returns it.
    """
    tokens, e = batch.tokens(at), batch.element
    head_bytes = tokens * head_dim * e
    n = at.size(at.context.inner)
    if n > 1:
        yield SavedTensor("result by heads", head_bytes * heads)
    yield SavedTensor("log-sums", tokens * heads * batch.wide)
    kv_copies = max(kv, n)
    if at.context.passes:
        yield SavedTensor("last block", 2 * head_bytes * kv_copies)
    else:
        yield SavedTensor("copied heads", 2 * head_bytes * (kv_copies - kv))


def context_workspace(
    at: Coordinate, batch: MicroBatch, heads: int, kv: int, head_dim: int, window: bool = False
) -> float:
    """Return the workspace of merging blocks in backward, in bytes.

    It holds the accumulated gradient of the queries in accumulation precision and the gradient of one block. Gathered
    keys and values add a reordered copy and their gradients in accumulation precision.
    """
    n, c = at.size(at.context.inner), at.size(at.context.outer)
    # One kernel attends to whole sequences and merges nothing.
    if c == 1 and not (batch.documents or window):
        return 0.0
    head_elements = batch.tokens(at) * head_dim
    keys = 2.0 * head_elements * max(kv, n)
    queries = head_elements * heads * (batch.wide + batch.element)
    if at.context.gathers:
        return queries + c * keys * (2 * batch.element + batch.wide)
    return queries + keys * (2 * batch.element + batch.wide)
