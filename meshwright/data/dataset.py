"""Documents packed into samples of seq + 1 tokens, in an order that depends only on the seed.

An epoch contains every document once, shuffled by (seed, epoch). All epochs concatenated make one endless stream of
tokens. Chunk g of that stream is the tokens [g * seq, g * seq + seq], both ends included. Neighbouring chunks therefore
share one token: it is the last label of one and the first input of the next. Every token of an epoch is an input
exactly once. The chunks that begin within an epoch are the samples of that epoch, in an order that is also shuffled by
(seed, epoch). Sample n is thus a pure function of (seed, n): nothing depends on how many samples a run will use.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.token_file import TokenFile
from meshwright.errors import UserError

# Epoch orders in the cache: a batch may straddle two epochs, and the second may need the beginning of the third.
CACHED_EPOCHS = 3
# Documents of the index that are checked per vectorised pass, which limits the memory for temporary arrays.
CHECKED_AT_ONCE = 1 << 20
# With this many documents in a sample, one gather is faster than a copy per document.
MANY_DOCUMENTS = 24


def keyed_permutation(size: int, *key: int | str) -> NDArray[np.unsignedinteger[Any]]:
    """Return the permutation of range(size) that `key` determines: [size] uint32, or uint64 from 2**32 on.

    The result is the same on any machine and with any version of numpy. Each index is placed in the low bits of a
    random number from Philox, a counter-based generator whose raw output is fixed by its definition, and these numbers
    are sorted. All of them differ, so every sorting algorithm gives the same result. Sorting plain integers is several
    times faster than shuffling.
    """
    dtype = np.dtype(np.uint32 if size < 1 << 32 else np.uint64)
    if size < 2:
        return np.zeros(size, dtype)
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=16).digest()
    values = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(size)
    low = np.uint64((1 << (size - 1).bit_length()) - 1)
    values &= ~low
    values |= np.arange(size, dtype=np.uint64)
    values.sort()
    values &= low
    return values.astype(dtype, copy=False)


class SplitTooSmall(UserError):
    """An error for a split whose documents do not fill one sample."""


@dataclass(frozen=True)
class Epoch:
    """The order of one epoch. Chunk k begins `offset[k]` tokens into document `order[position[k]]`.

    The i-th sample of the epoch is chunk `shuffle[i]`.
    """

    order: NDArray[np.unsignedinteger[Any]]  # [documents]
    position: NDArray[np.unsignedinteger[Any]]  # [chunks]
    offset: NDArray[np.int64]  # [chunks]
    shuffle: NDArray[np.unsignedinteger[Any]]  # [chunks]


class GPTDataset:
    """A dataset that packs documents [documents[0], documents[1]) of a token file, by default all, into samples.

    `stream` is a name that gives datasets with the same seed different orders. Each epoch in the cache takes 4 bytes
    per document and 16 per sample.

    With `drawn`, `documents` are positions in a fixed shuffle of the file's documents, which depends only on their
    number. Each part of a split then holds documents from all over the file.
    """

    def __init__(
        self,
        file: TokenFile,
        seq: int,
        seed: int,
        documents: tuple[int, int] | None = None,
        stream: str = "",
        drawn: bool = False,
    ) -> None:
        assert seq >= 1, seq
        low, high = (0, file.document_count) if documents is None else documents
        assert 0 <= low <= high <= file.document_count, (low, high)
        self.file, self.seq, self.seed, self.stream = file, seq, seed, stream
        self._chosen = drawn_documents(file, low, high) if drawn else None
        whole = (low, high) if self._chosen is None else (0, file.document_count)
        self._pointers, self._lengths = document_table(file, *whole)
        self.documents = (low, high)
        lengths = self._lengths if self._chosen is None else self._lengths[self._chosen]
        self.tokens_per_epoch = int(lengths.sum(dtype=np.int64))
        if self.tokens_per_epoch < seq + 1:
            raise SplitTooSmall(
                f"documents {low} to {high} of {file.prefix} hold {self.tokens_per_epoch} tokens, one sample takes "
                f"{seq + 1}: use more data, a shorter sequence, or another split"
            )
        # An epoch's order is computed when it is first needed. The cache belongs to this object, not to the class.
        self.epoch = lru_cache(CACHED_EPOCHS)(self._draw)

    def first_sample(self, epoch: int) -> int:
        """Return the number of the first sample that begins in an epoch."""
        return -(-epoch * self.tokens_per_epoch // self.seq)

    @property
    def epoch_samples(self) -> int:
        """The number of samples that begin in the first epoch."""
        return self.first_sample(1)

    def own_labels(self, n: int) -> int:
        """Return the number of labels of sample n in its epoch. An epoch's last chunk reaches into the next epoch."""
        number, k = self._locate(n)
        begin = (self.first_sample(number) + k) * self.seq
        # Minus one, because the label of an epoch's last token is the first token of the next epoch.
        return min(self.seq, (number + 1) * self.tokens_per_epoch - 1 - begin)

    def _locate(self, n: int) -> tuple[int, int]:
        """Return the epoch in which sample n begins, and the number of its chunk within that epoch."""
        number = n * self.seq // self.tokens_per_epoch
        return number, int(self.epoch(number).shuffle[n - self.first_sample(number)])

    def sample(self, n: int) -> NDArray[np.int64]:
        """Return the tokens of sample n: [seq + 1]."""
        number, k = self._locate(n)
        epoch = self.epoch(number)
        low, skip = int(epoch.position[k]), int(epoch.offset[k])
        if k + 1 < len(epoch.position):
            documents = epoch.order[low : int(epoch.position[k + 1]) + 1]
            return self._read(documents, skip, int(epoch.offset[k + 1]) + 1)
        # The epoch's last chunk ends one token into the first chunk of the next epoch.
        following = self.epoch(number + 1)
        next_documents = following.order[: int(following.position[0]) + 1]
        documents = np.concatenate([epoch.order[low:], next_documents])
        return self._read(documents, skip, int(following.offset[0]) + 1)

    def _draw(self, number: int) -> Epoch:
        """Compute the order of an epoch."""
        count = len(self._lengths) if self._chosen is None else len(self._chosen)
        order = keyed_permutation(count, self.seed, self.stream, "documents", number)
        order = order if self._chosen is None else self._chosen[order]
        ends = np.cumsum(self._lengths[order], dtype=np.int64)
        first = self.first_sample(number)
        after = self.first_sample(number + 1)
        # Where each chunk begins, counted from the beginning of the epoch. side="right" skips empty documents.
        starts = np.arange(first, after, dtype=np.int64) * self.seq - number * self.tokens_per_epoch
        position = np.searchsorted(ends, starts, side="right")
        offset = starts - (ends[position] - self._lengths[order[position]])
        shuffle = keyed_permutation(after - first, self.seed, self.stream, "samples", number)
        return Epoch(order, position.astype(order.dtype), offset, shuffle)

    def _read(self, documents: NDArray[np.unsignedinteger[Any]], skip: int, last: int) -> NDArray[np.int64]:
        """Join documents, without the first `skip` tokens of the first one and up to token `last` of the last one."""
        tokens = self.file.tokens
        starts = self._pointers[documents] // tokens.itemsize
        lengths = self._lengths[documents].astype(np.int64)
        lengths[-1] = last
        starts[0] += skip
        lengths[0] -= skip
        if len(documents) < MANY_DOCUMENTS:
            parts = [tokens[a : a + n] for a, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
            sample = np.concatenate(parts, dtype=np.int64)
        else:
            # The position in the file of every token of the sample, for a single gather.
            begin = np.cumsum(lengths) - lengths
            at = np.repeat(starts - begin, lengths) + np.arange(self.seq + 1)
            sample = tokens[at].astype(np.int64)
        if len(sample) != self.seq + 1:
            raise UserError(f"{self.file.idx_path} is damaged (a document reaches past the end): prepare it again")
        return sample


def drawn_documents(file: TokenFile, low: int, high: int) -> NDArray[np.unsignedinteger[Any]] | None:
    """Return high - low document numbers from all over a file, ascending, or None if the range covers the file.

    Disjoint ranges give disjoint documents.
    """
    if high - low == file.document_count:
        return None
    return np.sort(keyed_permutation(file.document_count, "split")[low:high])


def document_table(file: TokenFile, low: int, high: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return the byte at which each document begins and its number of tokens.

    The arrays are views of the index if every document is one sequence. The documents must follow one another in the
    file without gaps. This is checked, because a page of the index that was lost in copying would otherwise silently
    assign one document's tokens to another.
    """
    size = file.dtype.itemsize
    bounds = file.document_indices[low : high + 1]
    begin, end = int(bounds[0]), int(bounds[-1])
    if end - begin == high - low and np.array_equal(bounds, np.arange(begin, end + 1)):
        pointers, lengths = file.pointers[begin:end], file.sizes[begin:end]
    elif (np.diff(bounds) < 0).any() or begin < 0 or end > len(file):
        raise UserError(f"{file.idx_path} is damaged (its documents and sequences disagree): prepare it again")
    else:
        edges = np.append(file.pointers, file.token_count * size)[bounds]
        pointers = edges[:-1]
        lengths = np.diff(edges) // size
    good = len(pointers) == 0 or (pointers[0] >= 0 and pointers[0] % size == 0)
    for first in range(0, len(pointers), CHECKED_AT_ONCE):
        at = pointers[first : first + CHECKED_AT_ONCE + 1]
        length = lengths[first : first + CHECKED_AT_ONCE]
        ends = at[: len(length)] + length.astype(np.int64) * size
        good = good and (length >= 0).all() and (at[1:] == ends[: len(at) - 1]).all()
    if not good:
        raise UserError(f"{file.idx_path} is damaged (its documents do not follow one another): prepare it again")
    return pointers, lengths
