"""Instructions and their answers as texts whose end is to be filled in, to be blended with plain text: the multi-task
data of models that fill in blanks. No torch.

They come from files of conversations (`data chat`). Each answer is a sample of its own: all that was said before it is
the source, and the answer the span. Where both are too long for a sample, the source loses its beginning, and an answer
that is still too long its end.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.dataset import EPOCHS_KEPT, TooSmall, keyed_permutation
from meshwright.data.masked import Piece
from meshwright.data.packed import Conversations


class Instructions:
    """The answers of the documents [low, high) of a file of conversations, in samples of at most `most` tokens; an
    epoch is every answer once, in an order drawn from (seed, epoch)."""

    def __init__(
        self, prefix: str, most: int, seed: int, documents: tuple[int, int], stream: str = "", drawn: bool = False
    ) -> None:
        self.conversations = Conversations(prefix, documents, drawn)
        self.file, self.seq, self.seed, self.stream = self.conversations.file, most, seed, stream
        found: list[tuple[int, int, int]] = []  # the number of the conversation, and its answer's begin and end
        for number, size in enumerate(self.conversations.sizes().tolist()):
            learned = np.concatenate(([0], self.conversations.read(number, size)[1] > 0, [0]))
            edges = np.flatnonzero(np.diff(learned)).reshape(-1, 2)
            found += [(number, int(begin), int(end)) for begin, end in edges if begin]
        if not found:
            raise TooSmall(f"documents {documents[0]} to {documents[1]} of {prefix} hold no answer: use more data")
        self._answers: NDArray[np.int64] = np.array(found, np.int64)
        self._order = lru_cache(EPOCHS_KEPT)(self._draw)

    @property
    def epoch_samples(self) -> int:
        return len(self._answers)

    def _draw(self, epoch: int) -> NDArray[np.unsignedinteger[Any]]:
        return keyed_permutation(self.epoch_samples, self.seed, self.stream, "answers", epoch)

    def own_labels(self, n: int) -> int:
        return 2 * self.seq

    def sample(self, n: int) -> Piece:
        """Returns the tokens of sample n, and where its answer begins among them."""
        epoch, at = divmod(n, self.epoch_samples)
        number, begin, end = self._answers[int(self._order(epoch)[at])].tolist()
        tokens = self.conversations.read(number, end)[0]
        answer = min(end - begin, self.seq - 1)
        low = max(0, begin + answer - self.seq)
        return Piece(tokens[low : begin + answer], np.zeros(0, np.int64), begin - low)
