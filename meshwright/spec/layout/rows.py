"""Row tables: which rank of a group holds which rows (tokens) of a tensor, as a permutation. No torch.

A row table lays the ranks' rows end to end: `order` lists the global number of each row in that arrangement, and
`counts` says how many rows each rank holds; the counts may differ. Context parallelism and sorting
rows by expert are such tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RowTable:
    """Rank r holds `counts[r]` rows: in its local order, the next ones of `order`."""

    order: Integers
    counts: Integers

    def __post_init__(self) -> None:
        assert int(self.counts.sum()) == len(self.order), "the counts must cover every row"

    @property
    def ranks(self) -> int:
        return len(self.counts)

    @cached_property
    def inverse(self) -> Integers:
        """For each row of the global tensor, its position in `order`."""
        positions = np.empty_like(self.order)
        positions[self.order] = np.arange(len(self.order))
        return positions

    @cached_property
    def starts(self) -> Integers:
        """Where each rank's rows begin in `order`, closed by the number of rows."""
        return np.concatenate([[0], np.cumsum(self.counts)])

    @cached_property
    def owners(self) -> Integers:
        """For each row of the global tensor, the rank that holds it."""
        return np.repeat(np.arange(self.ranks), self.counts)[self.inverse]

    def held(self, rank: int) -> Integers:
        """Returns the global numbers of a rank's rows, in its local order."""
        return self.order[self.starts[rank] : self.starts[rank + 1]]

    def totals(self, work: ArrayLike) -> Integers:
        """Sums `work` (one integer per global row) over each rank's rows."""
        sums = np.concatenate([[0], np.cumsum(np.asarray(work, np.int64)[self.order])])
        return np.diff(sums[self.starts])


def balance(loads: ArrayLike) -> float:
    """Returns the largest load over the mean load: 1.0 is perfect, and a group is as slow as its largest."""
    values = np.asarray(loads, np.float64)
    return float(values.max() / values.mean()) if values.sum() else 1.0


def causal_work(rows: int, lengths: Sequence[int] | None = None) -> Integers:
    """Counts the keys that each row sees under causal attention, itself included. With `lengths`, the rows are
    documents one behind the other, which do not see each other."""
    index = np.arange(rows, dtype=np.int64)
    if lengths is None:
        return index + 1
    assert sum(lengths) == rows, "the documents must cover every row"
    return index + 1 - np.repeat(np.cumsum(lengths) - lengths, lengths)


def by_key(keys: ArrayLike, ranks: int, keys_per_rank: int = 1) -> RowTable:
    """Sorts rows by key, in their given order within a key; rank r holds the keys from r * keys_per_rank on. With the
    number of a row's expert as its key this is the order in which experts compute; with the number of its rank as its
    key it makes a table from any assignment of rows to ranks."""
    found = np.asarray(keys, np.int64)
    assert not len(found) or 0 <= found.min() <= found.max() < ranks * keys_per_rank, "a key that no rank holds"
    # numpy sorts 16-bit integers by radix, several times faster than wider ones.
    narrow = found.astype(np.int16) if ranks * keys_per_rank < 1 << 15 else found
    counts = np.bincount(found // keys_per_rank, minlength=ranks)
    return RowTable(np.argsort(narrow, kind="stable"), counts.astype(np.int64))


def contiguous(rows: int, ranks: int) -> RowTable:
    """Gives each rank a run of consecutive rows; where `ranks` does not divide `rows`, some have one row more."""
    return by_key(np.arange(rows, dtype=np.int64) * ranks // max(rows, 1), ranks)


def striped(rows: int, ranks: int) -> RowTable:
    """Gives row i to rank i mod `ranks`."""
    return by_key(np.arange(rows) % ranks, ranks)


def zigzag(rows: int, ranks: int) -> RowTable:
    """Gives rank r, of 2 x `ranks` consecutive parts, the r-th from the front and the r-th from the back. Where the
    parts are equal, every rank has exactly rows (rows + 1) / (2 ranks) pairs of causal attention."""
    return by_documents([rows], ranks)


def by_documents(lengths: Sequence[int], ranks: int) -> RowTable:
    """Cuts each document by a zigzag of its own, for attention that does not cross documents. Nothing is padded: where
    2 x `ranks` does not divide a length, some parts have one row more. Which parts these are is shifted by the rows
    before the document, so that many short documents spread over all ranks."""
    sizes = np.asarray(lengths, np.int64)
    parts = 2 * ranks
    before = np.cumsum(sizes) - sizes
    size, shift = np.repeat(sizes, sizes), np.repeat(before % parts, sizes)
    place = np.arange(int(sizes.sum()), dtype=np.int64) - np.repeat(before, sizes)
    # Part i of a document begins at row floor((i * size + shift) / parts), which this line inverts.
    part = -(-((place + 1) * parts - shift) // np.maximum(size, 1)) - 1
    return by_key(np.minimum(part, parts - 1 - part), ranks)


def evened(table: RowTable) -> RowTable:
    """Moves rows from ranks that hold more than their even share to ranks that hold fewer."""
    owners, even = table.owners.copy(), len(table.order) // table.ranks
    assert len(table.order) == even * table.ranks, "the rows can't be divided evenly"
    spare = np.concatenate([table.held(rank)[even:] for rank in range(table.ranks)])
    lacking = np.repeat(np.arange(table.ranks), np.maximum(even - table.counts, 0))
    owners[spare] = lacking
    return by_key(owners, table.ranks)


# How a sequence's rows are dealt to the ranks that share it, from its rows, the ranks and the lengths of its documents.
ORDERS: dict[str, Callable[[int, int, Sequence[int]], RowTable]] = {
    "zigzag": lambda rows, ranks, lengths: zigzag(rows, ranks),
    "striped": lambda rows, ranks, lengths: striped(rows, ranks),
    "contiguous": lambda rows, ranks, lengths: contiguous(rows, ranks),
    "documents": lambda rows, ranks, lengths: evened(by_documents(lengths, ranks)),
}


def causal_pairs(order: str, rows: int, ranks: int) -> Integers:
    """Counts, by rank, the pairs of a query and a key that it sees in a text of so many rows."""
    return ORDERS[order](rows, ranks, [rows]).totals(causal_work(rows))
