"""Instructions with answers to fill in: the multi-task data of blank-filling models, blended with plain text.

They are read from files of conversations (`data chat`). Each answer is a separate sample: the text before it is the
source, and the answer is the span. If both are too long for a sample, the source loses its beginning, and an answer
that is still too long loses its end. No torch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.dataset import CACHED_EPOCHS, SplitTooSmall, keyed_permutation
from meshwright.data.masked import DocumentChunk
from meshwright.data.packed import Conversations


class Instructions:
    """A dataset of the answers in documents [low, high) of a file of conversations, with at most `most` tokens each.

    An epoch contains every answer once, shuffled by (seed, epoch).
    """

    def __init__(
        self, prefix: str, most: int, seed: int, documents: tuple[int, int], stream: str = "", drawn: bool = False
    ) -> None:
        self.conversations = Conversations(prefix, documents, drawn)
        self.file, self.seq, self.seed, self.stream = self.conversations.file, most, seed, stream
        answers: list[tuple[int, int, int]] = []  # the conversation's number, and the answer's begin and end in it
        for number, size in enumerate(self.conversations.sizes().tolist()):
            # An answer is a run of learned tokens. Zeros at both ends give every run a begin and an end.
            learned = np.concatenate(([0], self.conversations.read(number, size)[1] > 0, [0]))
            edges = np.flatnonzero(np.diff(learned)).reshape(-1, 2)
            # An answer at the very beginning has no source to be predicted from.
            answers += [(number, int(begin), int(end)) for begin, end in edges if begin]
        if not answers:
            raise SplitTooSmall(f"documents {documents[0]} to {documents[1]} of {prefix} hold no answer: use more data")
        self._answers: NDArray[np.int64] = np.array(answers, np.int64)
        self._order = lru_cache(CACHED_EPOCHS)(self._draw)

    @property
    def epoch_samples(self) -> int:
        return len(self._answers)

    def _draw(self, epoch: int) -> NDArray[np.unsignedinteger[Any]]:
        return keyed_permutation(self.epoch_samples, self.seed, self.stream, "answers", epoch)

    def own_labels(self, n: int) -> int:
        return 2 * self.seq

    def sample(self, n: int) -> DocumentChunk:
        """Return the tokens of sample n, and where its answer begins among them."""
        epoch, at = divmod(n, self.epoch_samples)
        number, begin, end = self._answers[int(self._order(epoch)[at])].tolist()
        tokens = self.conversations.read(number, end)[0]
        # At least one token of the source is kept, and as many before the answer as fit.
        answer = min(end - begin, self.seq - 1)
        low = max(0, begin + answer - self.seq)
        return DocumentChunk(tokens[low : begin + answer], np.zeros(0, np.int64), begin - low)
