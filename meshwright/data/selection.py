"""What is taken of the input, and how: the field with the text, limits of length, duplicates, sentences."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshwright.errors import UserError

DIGEST_BYTES = 16


@dataclass(frozen=True)
class Selection:
    """`max_chars` 0: no limit. With `dedup` the first of several equal documents is kept; with `sentences` each
    sentence is a sequence of its document."""

    field: str = "text"
    min_chars: int = 0
    max_chars: int = 0
    dedup: bool = False
    sentences: bool = False

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
        """Whether a document must be read as a whole; otherwise a long one may be cut and encoded in parts."""
        return bool(self.min_chars or self.max_chars or self.dedup or self.sentences)

    def fits(self, text: str) -> bool:
        return self.min_chars <= len(text) and (not self.max_chars or len(text) <= self.max_chars)


EVERYTHING = Selection()


def digest_of(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True)
class Encoded:
    """The result of a task: the ids of its documents back to back, as the token file stores them, the lengths of the
    sequences and how many of those each document has. `digests` of the documents are there where duplicates are
    looked for. `size` is what the task took of its files."""

    tokens: bytes
    lengths: list[int]
    counts: list[int]
    digests: list[bytes]
    last_open: bool
    size: int
    empty: int = 0
    filtered: int = 0
    replaced: int = 0


@dataclass
class Duplicates:
    """Drops documents that have been seen. It holds a digest of every one, about 100 bytes of memory each."""

    count: int = 0
    _seen: set[bytes] = field(default_factory=set)

    def without(self, found: Encoded, itemsize: int) -> tuple[bytes, list[int], list[int]]:
        """Returns the tokens, lengths and counts of the documents of a task that are new."""
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
