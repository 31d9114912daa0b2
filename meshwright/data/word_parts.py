"""What a vocabulary shows of words: which tokens go on with the word of the token before them, and special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SPECIAL_NAMES = (("[CLS]", "[SEP]", "[MASK]", "[PAD]"), ("<s>", "</s>", "<mask>", "<pad>"))
BLANKS = "Ġ▁ĊĉčĀ"  # how byte-level tokenizers and SentencePiece write blanks, which begin a word


@dataclass(frozen=True)
class WordParts:
    """Two tokens in a row belong to one word if the first leaves it `open` and the second `goes_on`; both [vocab]."""

    goes_on: NDArray[np.bool_]
    open: NDArray[np.bool_]

    def joined(self, before: NDArray[np.int64], after: NDArray[np.int64]) -> NDArray[np.bool_]:
        last = len(self.open) - 1
        found: NDArray[Any] = self.open[np.minimum(before, last)] & self.goes_on[np.minimum(after, last)]
        return found


def word_parts(pieces: Sequence[str]) -> WordParts:
    """Reads a vocabulary's spellings. WordPiece marks tokens that go on with ##; of others, a token goes on if it
    begins with a letter or a digit after one that ends with one."""
    if any(piece.startswith("##") for piece in pieces):
        goes_on = [len(piece) > 2 and piece.startswith("##") for piece in pieces]
        return WordParts(np.array(goes_on), np.ones(len(pieces), bool))

    def within(character: str) -> bool:
        return character.isalnum() and character not in BLANKS

    return WordParts(np.array([within(p[:1]) for p in pieces]), np.array([within(p[-1:]) for p in pieces]))


def special_ids(pieces: Sequence[str]) -> tuple[int, ...]:
    """Returns the ids of [CLS], [SEP], [MASK] and [PAD], or nothing if one is missing."""
    where = {piece: number for number, piece in enumerate(pieces)}
    for names in SPECIAL_NAMES:
        if all(name in where for name in names):
            return tuple(where[name] for name in names)
    return ()
