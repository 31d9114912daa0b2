"""Row tables: permutations that assign the rows (tokens) of a tensor to the ranks of a group. No torch.

A row table concatenates the ranks' rows. `order` lists the global number of each row in that concatenation, and
`counts` the number of rows of each rank, which may differ. Context parallelism and sorting rows by expert use such
tables.
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
    """An assignment of rows to ranks: `order` is cut into consecutive runs, and rank r holds `counts[r]` rows."""

    order: Integers
    counts: Integers

    def __post_init__(self) -> None:
        assert int(self.counts.sum()) == len(self.order), "the counts must cover every row"

    @property
    def ranks(self) -> int:
        return len(self.counts)

    @cached_property
    def inverse(self) -> Integers:
        """The position in `order` of each row of the global tensor."""
        positions = np.empty_like(self.order)
        positions[self.order] = np.arange(len(self.order))
        return positions

    @cached_property
    def starts(self) -> Integers:
        """The position in `order` at which each rank's rows begin, followed by the total number of rows."""
        return np.concatenate([[0], np.cumsum(self.counts)])

    @cached_property
    def owners(self) -> Integers:
        """The rank that holds each row of the global tensor."""
        return np.repeat(np.arange(self.ranks), self.counts)[self.inverse]

    def rows_of(self, rank: int) -> Integers:
        """Return the global numbers of a rank's rows, in its local order."""
        return self.order[self.starts[rank] : self.starts[rank + 1]]

    def totals(self, work: ArrayLike) -> Integers:
        """Sum `work` (one integer per global row) over each rank's rows."""
        sums = np.concatenate([[0], np.cumsum(np.asarray(work, np.int64)[self.order])])
        return np.diff(sums[self.starts])


def balance(loads: ArrayLike) -> float:
    """Return the largest load divided by the mean load. 1.0 is perfect; a group is as slow as its largest load."""
    values = np.asarray(loads, np.float64)
    return float(values.max() / values.mean()) if values.sum() else 1.0


def causal_work(rows: int, lengths: Sequence[int] | None = None) -> Integers:
    """Count the keys that each row sees under causal attention, itself included.

    With `lengths`, the rows are consecutive documents of these lengths, which do not see each other.
    """
    index = np.arange(rows, dtype=np.int64)
    if lengths is None:
        return index + 1
    assert sum(lengths) == rows, "the documents must cover every row"
    return index + 1 - np.repeat(np.cumsum(lengths) - lengths, lengths)


def by_key(keys: ArrayLike, ranks: int, keys_per_rank: int = 1) -> RowTable:
    """Sort rows by key, stably. Rank r holds the `keys_per_rank` keys from r * keys_per_rank on.

    If the key of a row is its expert, this is the order in which experts compute. If the key is the row's rank, the
    result is the table of any given assignment of rows to ranks.
    """
    wide = np.asarray(keys, np.int64)
    assert not len(wide) or 0 <= wide.min() <= wide.max() < ranks * keys_per_rank, "a key that no rank holds"
    # numpy sorts 16-bit integers by radix, several times faster than wider ones.
    narrow = wide.astype(np.int16) if ranks * keys_per_rank < 1 << 15 else wide
    counts = np.bincount(wide // keys_per_rank, minlength=ranks)
    return RowTable(np.argsort(narrow, kind="stable"), counts.astype(np.int64))


def contiguous(rows: int, ranks: int) -> RowTable:
    """Give each rank a run of consecutive rows. If `ranks` does not divide `rows`, some ranks have one row more."""
    return by_key(np.arange(rows, dtype=np.int64) * ranks // max(rows, 1), ranks)


def stripe(rows: int, ranks: int) -> RowTable:
    """Give row i to rank i mod `ranks`."""
    return by_key(np.arange(rows) % ranks, ranks)


def zigzag(rows: int, ranks: int) -> RowTable:
    """Cut the rows into 2 x `ranks` consecutive chunks and give rank r the r-th chunk from either end.

    If the chunks are equal, every rank has exactly rows (rows + 1) / (2 ranks) pairs of causal attention.
    """
    return by_documents([rows], ranks)


def by_documents(lengths: Sequence[int], ranks: int) -> RowTable:
    """Cut each document by its own zigzag, for attention that does not cross documents.

    Nothing is padded. If 2 x `ranks` does not divide a document's length, some chunks have one row more. The choice of
    these chunks is shifted by the number of rows before the document, so that many short documents spread evenly over
    all ranks.
    """
    sizes = np.asarray(lengths, np.int64)
    chunks = 2 * ranks
    before = np.cumsum(sizes) - sizes
    size = np.repeat(sizes, sizes)
    shift = np.repeat(before % chunks, sizes)
    place = np.arange(int(sizes.sum()), dtype=np.int64) - np.repeat(before, sizes)
    # Chunk i of a document begins at row floor((i * size + shift) / chunks), which this line inverts.
    chunk = -(-((place + 1) * chunks - shift) // np.maximum(size, 1)) - 1
    # Counted from either end, the chunk's number is the rank.
    return by_key(np.minimum(chunk, chunks - 1 - chunk), ranks)


def even_out(table: RowTable) -> RowTable:
    """Return a table in which all ranks hold equally many rows.

    It moves rows from ranks that hold more than an even share to ranks that hold fewer.
    """
    owners = table.owners.copy()
    even = len(table.order) // table.ranks
    assert len(table.order) == even * table.ranks, "the rows can't be divided evenly"
    spare = np.concatenate([table.rows_of(rank)[even:] for rank in range(table.ranks)])
    lacking = np.repeat(np.arange(table.ranks), np.maximum(even - table.counts, 0))
    owners[spare] = lacking
    return by_key(owners, table.ranks)


# By `context.order`: a function from the rows of a sequence, the ranks that share it and the lengths of its documents.
ORDERS: dict[str, Callable[[int, int, Sequence[int]], RowTable]] = {
    "zigzag": lambda rows, ranks, lengths: zigzag(rows, ranks),
    "striped": lambda rows, ranks, lengths: stripe(rows, ranks),
    "contiguous": lambda rows, ranks, lengths: contiguous(rows, ranks),
    "documents": lambda rows, ranks, lengths: even_out(by_documents(lengths, ranks)),
}


def causal_pairs(order: str, rows: int, ranks: int) -> Integers:
    """Count each rank's pairs of a query and a key that the query sees, in a causal text of `rows` rows."""
    return ORDERS[order](rows, ranks, [rows]).totals(causal_work(rows))
