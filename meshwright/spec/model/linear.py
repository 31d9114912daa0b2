"""The records and collectives of column-parallel and row-parallel linear layers. No torch.

H stands for the bytes of the activations [tokens, hidden] of a micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from meshwright.spec.layout.params import Init, columns_of, whole
from meshwright.spec.model.part import Collective, Coordinate, MicroBatch, Records
from meshwright.spec.model.pieces import in_chunks, runs, summed_chunks

ZEROS, ONES = Init("zeros"), Init("ones")


def replicated_axes(at: Coordinate) -> dict[str, tuple[str, ...]]:
    """Return the axes of a parameter that every tp rank holds.

    Under sequence parallelism each rank applies it to its own tokens, so that its gradient is a partial sum over tp.
    """
    if at.size("tp") == 1:
        return {}
    return {"copies": ("tp",), "partial": ("tp",) if at.splits_tokens else ()}


def column_calls(at: Coordinate, batch: MicroBatch, width: int, local: int) -> Iterator[Collective]:
    """Yield the calls of a column-parallel product, whose output features are cut over tp.

    `local` output features belong to this rank. All ranks read the same input of `width` features, so the input
    gradient is a sum over them.

    - Plain: backward 1 all_reduce of H.
    - Split tokens: forward 1 all_gather of H; backward 1 all_gather (of the input again, since only the local rows are
      saved) and 1 reduce_scatter of H.
    - In chunks (`spec/model/pieces.py`) each of these becomes t - 1 sends of H / t, in at most three calls.
    """
    payload = batch.tokens(at) * width * batch.element
    if not at.splits_tokens:
        yield Collective("backward", "tp", "all_reduce", payload)
        return
    cut = in_chunks(batch.tokens(at), width * local, at.size("tp"), at.piece_flops)
    yield from _row_calls(at, cut, "forward", "all_gather", payload)
    yield from _row_calls(at, cut, "backward", "all_gather", payload, repeated=True)
    yield from _row_calls(at, cut, "backward", "reduce_scatter", payload)


def _row_calls(
    at: Coordinate, cut: bool, phase: str, op: str, payload: int, repeated: bool = False
) -> Iterator[Collective]:
    """Yield the calls by which a linear layer gathers or scatters rows over tp: a single call or, if it is cut into
    chunks, one call per run of ranks (`nn/overlap.py`)."""
    size = at.size("tp")
    if not cut:
        yield Collective(phase, "tp", op, payload, repeated=repeated)
        return
    for ranks, times in Counter(len(run) for run in runs(size)[1:]).items():
        yield Collective(phase, "tp", "send", ranks * (payload // size), times, repeated=repeated)


def row_calls(at: Coordinate, batch: MicroBatch, width: int, local: int) -> Iterator[Collective]:
    """Yield the calls of a row-parallel product, whose input features are cut over tp.

    `local` input features belong to this rank. The output of `width` features is a sum over tp.

    - Plain: forward 1 all_reduce of H.
    - Split tokens: forward 1 reduce_scatter, backward 1 all_gather of H.
    - In chunks: one all_reduce per chunk or, with split tokens, sends as in `column_calls`.
    """
    tokens, weight = batch.tokens(at), width * local
    payload = tokens * width * batch.element
    if not at.splits_tokens:
        chunks = summed_chunks(tokens, weight, at.piece_flops)
        yield Collective("forward", "tp", "all_reduce", payload // chunks, chunks)
        return
    cut = in_chunks(tokens, weight, at.size("tp"), at.piece_flops)
    yield from _row_calls(at, cut, "forward", "reduce_scatter", payload)
    yield from _row_calls(at, cut, "backward", "all_gather", payload)


def row_records(at: Coordinate, name: str, key: str, sizes: tuple[int, int], init: Init, bias: bool) -> Records:
    """Return the records of a projection [rows, columns] whose input is cut over tp. Its bias is added once, after the
    sum, so every rank holds all of it."""
    rows, columns = sizes
    tp, tp_rank = at.size("tp"), at.index("tp")
    records = {f"{key}.weight": columns_of(f"{name}.{key}.weight", rows, columns, tp, tp_rank, init)}
    if bias:
        records[f"{key}.bias"] = whole(f"{name}.{key}.bias", (rows,), ZEROS, decay=False, **replicated_axes(at))
    return records
