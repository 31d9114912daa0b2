"""What linear layers that are cut over tp hold and communicate, by columns and by rows, for the parts that have them.
No torch. H stands for the bytes of the activations [tokens, hidden] of a micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from meshwright.spec.layout.params import Init, columns_of, whole
from meshwright.spec.model.part import Collective, Coordinate, MicroBatch, Records
from meshwright.spec.model.pieces import in_chunks, runs, summed_chunks

ZEROS, ONES = Init("zeros"), Init("ones")


def replicated(at: Coordinate) -> dict[str, tuple[str, ...]]:
    """Return the axes of a parameter that every tp rank holds, and under sequence parallelism applies to its own
    tokens."""
    if at.size("tp") == 1:
        return {}
    return {"copies": ("tp",), "partial": ("tp",) if at.splits_tokens else ()}


def column_calls(at: Coordinate, batch: MicroBatch, width: int, local: int) -> Iterator[Collective]:
    """Yield the calls of a product whose output features are cut over tp; `local` of them are this rank's. All ranks
    use the same input, `width` features, so the input gradient is a sum over them.

    Plain: backward 1 all_reduce of H. Split tokens: forward 1 all_gather; backward 1 all_gather (of the input again,
    which is not kept) and 1 reduce_scatter of H. In chunks (`spec/model/pieces.py`) each of these is t - 1 sends of
    H / t, made in three calls at most.
    """
    payload = batch.tokens(at) * width * batch.element
    if not at.splits_tokens:
        yield Collective("backward", "tp", "all_reduce", payload)
        return
    cut = in_chunks(batch.tokens(at), width * local, at.size("tp"), at.piece_flops)
    yield from _moved(at, cut, "forward", "all_gather", payload)
    yield from _moved(at, cut, "backward", "all_gather", payload, repeated=True)
    yield from _moved(at, cut, "backward", "reduce_scatter", payload)


def _moved(
    at: Coordinate, cut: bool, phase: str, op: str, payload: int, repeated: bool = False
) -> Iterator[Collective]:
    """Yield a gather or scatter of rows over tp as a linear layer makes it: one call, or in chunks one for each run of
    ranks (`nn/overlap.py`)."""
    size = at.size("tp")
    if not cut:
        yield Collective(phase, "tp", op, payload, repeated=repeated)
        return
    for ranks, times in Counter(len(run) for run in runs(size)[1:]).items():
        yield Collective(phase, "tp", "send", ranks * (payload // size), times, repeated=repeated)


def row_calls(at: Coordinate, batch: MicroBatch, width: int, local: int) -> Iterator[Collective]:
    """Yield the calls of a product whose input features are cut over tp, `local` of them being this rank's, so that
    the output, `width` features, is a sum.

    Plain: forward 1 all_reduce of H. Split tokens: forward 1 reduce_scatter, backward 1 all_gather of H. In chunks:
    as many all_reduces as there are chunks, or each of the two others as sends, as in `column_calls`.
    """
    tokens, weight = batch.tokens(at), width * local
    payload = tokens * width * batch.element
    if not at.splits_tokens:
        chunks = summed_chunks(tokens, weight, at.piece_flops)
        yield Collective("forward", "tp", "all_reduce", payload // chunks, chunks)
        return
    cut = in_chunks(tokens, weight, at.size("tp"), at.piece_flops)
    yield from _moved(at, cut, "forward", "reduce_scatter", payload)
    yield from _moved(at, cut, "backward", "all_gather", payload)


def row_records(at: Coordinate, name: str, key: str, sizes: tuple[int, int], init: Init, bias: bool) -> Records:
    """Return the records of a projection [rows, columns] whose input is cut over tp; its bias is added once, after the
    sum."""
    rows, columns = sizes
    tp, tp_rank = at.size("tp"), at.index("tp")
    records = {f"{key}.weight": columns_of(f"{name}.{key}.weight", rows, columns, tp, tp_rank, init)}
    if bias:
        records[f"{key}.bias"] = whole(f"{name}.{key}.bias", (rows,), ZEROS, decay=False, **replicated(at))
    return records
