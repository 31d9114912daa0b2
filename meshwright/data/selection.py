"""Select the documents of the input: the field with the text, limits of length, duplicates and sentences."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshwright.errors import UserError

DIGEST_BYTES = 16


@dataclass(frozen=True)
class Selection:
    """The documents to take from the input, and the form in which they are stored."""

    field: str = "text"  # of a JSON object, or the column of a parquet file
    min_chars: int = 0
    max_chars: int = 0  # 0: no limit
    dedup: bool = False  # keep only the first of several equal documents
    sentences: bool = False  # store each sentence as a sequence of its document

    def __post_init__(self) -> None:
        for name, value in (("--min-chars", self.min_chars), ("--max-chars", self.max_chars)):
            if value < 0:
                raise UserError(f"{name} {value} does not work: give a number of characters, 0 for no limit")
        if 0 < self.max_chars < self.min_chars:
            raise UserError(
                f"--max-chars {self.max_chars} is below --min-chars {self.min_chars}, so no document would be left: "
                "lower the one or raise the other"
            )

    @property
    def whole(self) -> bool:
        """True if a document must be read as a whole. Otherwise a long one may be cut and encoded in parts."""
        return bool(self.min_chars or self.max_chars or self.dedup or self.sentences)

    def fits(self, text: str) -> bool:
        return self.min_chars <= len(text) and (not self.max_chars or len(text) <= self.max_chars)


EVERYTHING = Selection()


def digest_of(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True)
class EncodedTask:
    """The result of a task."""

    tokens: bytes  # the ids of its documents back to back, as the token file stores them
    lengths: list[int]  # tokens of each sequence
    counts: list[int]  # sequences of each document
    digests: list[bytes]  # a digest of each document's text; empty unless duplicates are removed
    last_open: bool  # the last document continues in the next task
    size: int  # bytes that the task took in its files
    empty: int = 0  # documents that were left out because they have no text
    filtered: int = 0  # documents that were left out because of their length
    replaced: int = 0  # documents with bytes that are not UTF-8


@dataclass
class Duplicates:
    """A filter that drops documents seen before. It keeps a digest of each one, about 100 bytes of memory."""

    count: int = 0
    _seen: set[bytes] = field(default_factory=set)

    def without(self, found: EncodedTask, itemsize: int) -> tuple[bytes, list[int], list[int]]:
        """Return the tokens, lengths and counts of a task's documents that have not been seen before."""
        parts: list[bytes] = []
        lengths: list[int] = []
        counts: list[int] = []
        at = begin = 0
        for digest, count in zip(found.digests, found.counts, strict=True):
            sizes: Sequence[int] = found.lengths[at : at + count]
            end = begin + sum(sizes) * itemsize
            if digest in self._seen:
                self.count += 1
            else:
                self._seen.add(digest)
                parts.append(found.tokens[begin:end])
                lengths += sizes
                counts.append(count)
            at, begin = at + count, end
        return b"".join(parts), lengths, counts
