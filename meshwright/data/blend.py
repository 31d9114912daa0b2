"""Several datasets as one, in given proportions, with any sample found at once.

The rule: weights become whole numbers w out of W. Of every W samples dataset d gives w[d], the k-th of which may not
come before floor(k W / w[d]) nor after ceil((k + 1) W / w[d]) - 1; among those that may come, the one that must come
soonest is next. Earliest deadline first meets every such window (R. Tijdeman, "The chairman assignment problem",
1980), and meeting them is the same as this: after any n samples each dataset has given its share n w[d] / W to within
one. The pattern then repeats, so that sample n is a look-up, whatever n is.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.data.dataset import keyed_permutation
from meshwright.data.token_file import TokenFile

MAX_PERIOD = 1 << 16


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Returns weights above 0 as whole numbers without a common divisor, whose sum is at most MAX_PERIOD. They are
    exact for weights as people write them (0.3 and 0.7, 5 and 2); others are rounded to the nearest 1 / MAX_PERIOD of
    their sum, though never to zero."""
    assert all(weight > 0 for weight in weights), weights
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= MAX_PERIOD:
        return [int(share * period) for share in shares]
    ideal = [share * MAX_PERIOD for share in shares]
    whole = [max(1, math.floor(count)) for count in ideal]
    while (missing := MAX_PERIOD - sum(whole)) != 0:
        step = 1 if missing > 0 else -1
        owed = [(step * (count - given), given, d) for d, (count, given) in enumerate(zip(ideal, whole, strict=True))]
        _, _, d = max(entry for entry in owed if entry[1] + step > 0)
        whole[d] += step
    return whole_weights(whole)  # without what may be a common divisor now


def blend_pattern(weights: Sequence[int], seed: int = 0) -> NDArray[np.int32]:
    """Returns which dataset gives each sample of one period: [sum(weights)] int32. The seed settles ties."""
    period = sum(weights)
    rank = [int(r) for r in keyed_permutation(len(weights), seed, "blend")]
    released: list[list[tuple[int, int, int]]] = [[] for _ in range(period + 1)]
    for d, weight in enumerate(weights):
        for k in range(weight):
            deadline = -(-(k + 1) * period // weight)
            released[k * period // weight].append((deadline, rank[d], d))
    ready: list[tuple[int, int, int]] = []
    pattern = np.empty(period, np.int32)
    for slot in range(period):
        for job in released[slot]:
            heapq.heappush(ready, job)
        deadline, _, pattern[slot] = heapq.heappop(ready)
        assert deadline > slot, "a window was missed"
    return pattern


class Numbered(Protocol):
    """A dataset of numbered samples."""

    seq: int

    @property
    def epoch_samples(self) -> int: ...
    def own_labels(self, n: int) -> int: ...
    def sample(self, n: int) -> Any: ...


class FromFile(Numbered, Protocol):
    """One that can be blended with others."""

    file: TokenFile


class Blend:
    """Draws samples from several datasets in proportion to their weights, each dataset's in its own order."""

    def __init__(self, datasets: Sequence[FromFile], weights: Sequence[float], seed: int) -> None:
        assert len(datasets) == len(weights) > 0, (len(datasets), len(weights))
        assert len({dataset.seq for dataset in datasets}) == 1, "datasets of one sequence length"
        self.datasets, self.seq = list(datasets), datasets[0].seq
        self.weights = whole_weights(weights)
        self.period = sum(self.weights)
        self._dataset = blend_pattern(self.weights, seed)
        self._rank = np.empty(self.period, np.int32)  # how many of its dataset come before it in the period
        for d, weight in enumerate(self.weights):
            self._rank[self._dataset == d] = np.arange(weight)

    def locate(self, n: int) -> tuple[int, int]:
        """Returns (d, k), where sample n of the blend is sample k of dataset d."""
        periods, slot = divmod(n, self.period)
        d = int(self._dataset[slot])
        return d, periods * self.weights[d] + int(self._rank[slot])

    def source_of(self, n: int) -> str:
        """Returns the token file that sample n comes from."""
        return self.datasets[self.locate(n)[0]].file.prefix

    @property
    def epoch_samples(self) -> int:
        """The number of samples before one of the datasets begins its second epoch."""
        begins = []
        for d, weight in enumerate(self.weights):
            periods, rank = divmod(self.datasets[d].epoch_samples, weight)
            begins.append(periods * self.period + int(np.flatnonzero(self._dataset == d)[rank]))
        return min(begins)

    def own_labels(self, n: int) -> int:
        d, k = self.locate(n)
        return self.datasets[d].own_labels(k)

    def sample(self, n: int) -> Any:
        """Returns what its dataset has as sample n: of a `GPTDataset` the tokens [seq + 1]."""
        d, k = self.locate(n)
        return self.datasets[d].sample(k)
