"""Documents packed into samples of seq + 1 tokens, in an order that depends on the seed alone.

An epoch is every document once, in an order drawn from (seed, epoch). Epochs laid end to end make one endless stream
of tokens; piece g of it is the tokens [g * seq, g * seq + seq], so neighbours share one token, which is the last label
of one and the first input of the next, and every token of an epoch is an input exactly once. The pieces that begin
within an epoch are the samples of that epoch, taken in an order drawn from (seed, epoch) too. Sample n is thus a pure
function of (seed, n): nothing depends on how many samples a run will ask for.
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

EPOCHS_KEPT = 3  # a batch may straddle two epochs, and the later one may need the beginning of the next
CHECKED_AT_ONCE = 1 << 20  # documents of an index that are checked at once
MANY_DOCUMENTS = 24  # documents per sample from which on one gather beats a copy per document


def keyed_permutation(size: int, *key: int | str) -> NDArray[np.unsignedinteger[Any]]:
    """Draws a permutation of range(size) from `key` alone, on any machine, with any version of numpy: [size] uint32, or
    uint64 from 2**32 on. Each index gets random high bits from Philox (a counter-based generator whose raw output is
    fixed by its definition) above its own low bits, and these are sorted: all values differ, so every sorting algorithm
    gives the same result, and sorting plain integers is several times faster than shuffling."""
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


class TooSmall(UserError):
    """Raised when the documents of a split hold less than one sample."""


@dataclass(frozen=True)
class Epoch:
    """The order of one epoch: piece k begins `offset[k]` tokens into document `order[position[k]]`."""

    order: NDArray[np.unsignedinteger[Any]]  # [documents]
    position: NDArray[np.unsignedinteger[Any]]  # [pieces]
    offset: NDArray[np.int64]  # [pieces]
    shuffle: NDArray[np.unsignedinteger[Any]]  # [pieces]


class GPTDataset:
    """Packs documents [documents[0], documents[1]) of a token file into samples; by default all documents. `stream`
    keeps datasets with the same seed apart. An epoch in use holds 4 bytes per document and 16 per sample.

    With `drawn`, the numbers of `documents` are places in one order of the file's documents that depends on nothing but
    their count: parts of a split then hold documents from all over the file."""

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
            raise TooSmall(
                f"documents {low} to {high} of {file.prefix} hold {self.tokens_per_epoch} tokens, one sample takes "
                f"{seq + 1}: use more data, a shorter sequence, or another split"
            )
        self.epoch = lru_cache(EPOCHS_KEPT)(self._draw)  # an epoch's order is drawn when first needed

    def first_sample(self, epoch: int) -> int:
        """Returns the number of the first sample that begins in an epoch."""
        return -(-epoch * self.tokens_per_epoch // self.seq)

    @property
    def epoch_samples(self) -> int:
        """The number of samples that begin in the first epoch."""
        return self.first_sample(1)

    def own_labels(self, n: int) -> int:
        """Returns how many labels of sample n belong to its epoch: an epoch's last sample goes on into the next one."""
        number, k = self._locate(n)
        begin = (self.first_sample(number) + k) * self.seq
        return min(self.seq, (number + 1) * self.tokens_per_epoch - 1 - begin)

    def _locate(self, n: int) -> tuple[int, int]:
        """Returns the epoch in which sample n begins, and its place there before the samples were shuffled."""
        number = n * self.seq // self.tokens_per_epoch
        return number, int(self.epoch(number).shuffle[n - self.first_sample(number)])

    def sample(self, n: int) -> NDArray[np.int64]:
        """Returns the tokens of sample n: [seq + 1]."""
        number, k = self._locate(n)
        epoch = self.epoch(number)
        low, skip = int(epoch.position[k]), int(epoch.offset[k])
        if k + 1 < len(epoch.position):
            documents = epoch.order[low : int(epoch.position[k + 1]) + 1]
            return self._read(documents, skip, int(epoch.offset[k + 1]) + 1)
        following = self.epoch(number + 1)
        begun = following.order[: int(following.position[0]) + 1]
        documents = np.concatenate([epoch.order[low:], begun])
        return self._read(documents, skip, int(following.offset[0]) + 1)

    def _draw(self, number: int) -> Epoch:
        count = len(self._lengths) if self._chosen is None else len(self._chosen)
        order = keyed_permutation(count, self.seed, self.stream, "documents", number)
        order = order if self._chosen is None else self._chosen[order]
        ends = np.cumsum(self._lengths[order], dtype=np.int64)
        first, after = self.first_sample(number), self.first_sample(number + 1)
        starts = np.arange(first, after, dtype=np.int64) * self.seq - number * self.tokens_per_epoch
        position = np.searchsorted(ends, starts, side="right")
        offset = starts - (ends[position] - self._lengths[order[position]])
        shuffle = keyed_permutation(after - first, self.seed, self.stream, "samples", number)
        return Epoch(order, position.astype(order.dtype), offset, shuffle)

    def _read(self, documents: NDArray[np.unsignedinteger[Any]], skip: int, last: int) -> NDArray[np.int64]:
        """Joins documents, without the first `skip` tokens of the first and with only `last` tokens of the last."""
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
            begin = np.cumsum(lengths) - lengths
            at = np.repeat(starts - begin, lengths) + np.arange(self.seq + 1)
            sample = tokens[at].astype(np.int64)
        if len(sample) != self.seq + 1:
            raise UserError(f"{self.file.idx_path} is damaged (a document reaches past the end): prepare it again")
        return sample


def drawn_documents(file: TokenFile, low: int, high: int) -> NDArray[np.unsignedinteger[Any]] | None:
    """Returns the numbers of as many documents drawn from all over a file, ascending, and other ones for other ranges;
    None where that is all of them."""
    if high - low == file.document_count:
        return None
    return np.sort(keyed_permutation(file.document_count, "split")[low:high])


def document_table(file: TokenFile, low: int, high: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Returns the byte at which each document begins and its number of tokens: views of the index, where every document
    is one sequence. It checks that documents follow one another in the file: a page of the index that a copy lost would
    otherwise give one document's tokens to another."""
    size, bounds = file.dtype.itemsize, file.document_indices[low : high + 1]
    begin, end = int(bounds[0]), int(bounds[-1])
    if end - begin == high - low and np.array_equal(bounds, np.arange(begin, end + 1)):
        pointers, lengths = file.pointers[begin:end], file.sizes[begin:end]
    elif (np.diff(bounds) < 0).any() or begin < 0 or end > len(file):
        raise UserError(f"{file.idx_path} is damaged (its documents and sequences disagree): prepare it again")
    else:
        edges = np.append(file.pointers, file.token_count * size)[bounds]
        pointers, lengths = edges[:-1], np.diff(edges) // size
    good = len(pointers) == 0 or (pointers[0] >= 0 and pointers[0] % size == 0)
    for first in range(0, len(pointers), CHECKED_AT_ONCE):
        at = pointers[first : first + CHECKED_AT_ONCE + 1]
        length = lengths[first : first + CHECKED_AT_ONCE]
        ends = at[: len(length)] + length.astype(np.int64) * size
        good = good and (length >= 0).all() and (at[1:] == ends[: len(at) - 1]).all()
    if not good:
        raise UserError(f"{file.idx_path} is damaged (its documents do not follow one another): prepare it again")
    return pointers, lengths
