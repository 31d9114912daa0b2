"""Blend several datasets into one, in given proportions, with constant-time access to any sample.

The weights become whole numbers w with sum W. Of every W samples, dataset d provides w[d]. The k-th of them must not be
in a slot before floor(k W / w[d]) or after ceil((k + 1) W / w[d]) - 1. Each slot goes to the dataset with the earliest
deadline among those that may use it. Earliest deadline first meets all of these windows (R. Tijdeman, "The chairman
assignment problem", 1980). Equivalently, after any n samples each dataset has provided its share n w[d] / W to within
one sample. The pattern repeats after W samples, so sample n is a look-up for every n.
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

MAX_PERIOD = 1 << 16  # largest W


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Return positive weights as whole numbers without a common divisor, whose sum is at most MAX_PERIOD.

    They are exact for weights as people write them (0.3 and 0.7, 5 and 2). Other weights are rounded to the nearest
    1 / MAX_PERIOD of their sum, but never to zero.
    """
    assert all(weight > 0 for weight in weights), weights
    # The decimal form of 0.3 gives 3/10; the exact float has a large power of two as denominator.
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= MAX_PERIOD:
        return [int(share * period) for share in shares]
    ideal = [share * MAX_PERIOD for share in shares]
    whole = [max(1, math.floor(count)) for count in ideal]
    # Add or remove single units until the sum is right, each time at the weight with the largest rounding error.
    while (missing := MAX_PERIOD - sum(whole)) != 0:
        step = 1 if missing > 0 else -1
        owed = [(step * (count - given), given, d) for d, (count, given) in enumerate(zip(ideal, whole, strict=True))]
        _, _, d = max(entry for entry in owed if entry[1] + step > 0)
        whole[d] += step
    return whole_weights(whole)  # the rounded weights may have a common divisor, which this call removes


def blend_pattern(weights: Sequence[int], seed: int = 0) -> NDArray[np.int32]:
    """Return the number of the dataset that provides each sample of one period: [sum(weights)] int32.

    The seed breaks ties between equal deadlines.
    """
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


class NumberedDataset(Protocol):
    """The interface of a dataset of numbered samples."""

    seq: int

    @property
    def epoch_samples(self) -> int: ...
    def own_labels(self, n: int) -> int: ...
    def sample(self, n: int) -> Any: ...


class FromFile(NumberedDataset, Protocol):
    """The interface of a dataset that reads one token file and can be blended with others."""

    file: TokenFile


class Blend:
    """A dataset of samples from several datasets, in proportion to their weights. Each keeps its own order."""

    def __init__(self, datasets: Sequence[FromFile], weights: Sequence[float], seed: int) -> None:
        assert len(datasets) == len(weights) > 0, (len(datasets), len(weights))
        assert len({dataset.seq for dataset in datasets}) == 1, "datasets of one sequence length"
        self.datasets = list(datasets)
        self.seq = datasets[0].seq
        self.weights = whole_weights(weights)
        self.period = sum(self.weights)
        self._dataset = blend_pattern(self.weights, seed)
        self._rank = np.empty(self.period, np.int32)  # for each slot, earlier slots of the same dataset in the period
        for d, weight in enumerate(self.weights):
            self._rank[self._dataset == d] = np.arange(weight)

    def locate(self, n: int) -> tuple[int, int]:
        """Return (d, k): sample n of the blend is sample k of dataset d."""
        periods, slot = divmod(n, self.period)
        d = int(self._dataset[slot])
        return d, periods * self.weights[d] + int(self._rank[slot])

    def source_of(self, n: int) -> str:
        """Return the prefix of the token file that sample n comes from."""
        return self.datasets[self.locate(n)[0]].file.prefix

    @property
    def epoch_samples(self) -> int:
        """The number of samples before one of the datasets begins its second epoch."""
        begins = []
        # A dataset's second epoch begins with its sample number `epoch_samples`. Find the slot of that sample.
        for d, weight in enumerate(self.weights):
            periods, rank = divmod(self.datasets[d].epoch_samples, weight)
            begins.append(periods * self.period + int(np.flatnonzero(self._dataset == d)[rank]))
        return min(begins)

    def own_labels(self, n: int) -> int:
        d, k = self.locate(n)
        return self.datasets[d].own_labels(k)

    def sample(self, n: int) -> Any:
        """Return sample n in the form of its dataset, for example the tokens [seq + 1] of a `GPTDataset`."""
        d, k = self.locate(n)
        return self.datasets[d].sample(k)
