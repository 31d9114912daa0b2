"""Made samples of preferred and judged answers."""

from __future__ import annotations

import numpy as np

SEQ = 24


class Answers:
    """Packed samples of two pairs of answers, or of four judged ones, of other lengths each, and some padding."""

    def __init__(self, judged: bool, vocab: int = 53) -> None:
        self.judged, self.vocab = judged, vocab

    def sample(self, n: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng([5, n])
        found = {key: np.zeros(SEQ, np.int64) for key in ("tokens", "labels", "loss_mask", "segments", "positions")}
        begin = 0
        for number in range(2 if n % 3 == 2 else 4):  # not as many in every sample
            length = 3 + (n + number) % 3
            ids, here = random.integers(0, self.vocab, length + 1), slice(begin, begin + length)
            found["tokens"][here], found["labels"][here] = ids[:-1], ids[1:]
            mark = 2 if self.judged and (n + number) % 2 else 1
            found["loss_mask"][here] = np.where(np.arange(length) >= 1, mark, 0)
            found["segments"][here], found["positions"][here] = number, np.arange(length)
            begin += length
        found["segments"][begin:], found["positions"][begin:] = number + 1, np.arange(SEQ - begin)
        return found
