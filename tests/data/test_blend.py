"""Tests of blends of datasets.

After any number of samples, each dataset's count is within one sample of its share. Any sample is located directly, and
shares are exact for simple weights.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from meshwright.data.blend import MAX_PERIOD, Blend, blend_pattern, whole_weights


class Numbers:
    """Dataset number d. Its sample k is [d, k], and an epoch has 5 + 3 d samples."""

    seq = 1

    def __init__(self, d: int) -> None:
        self.d = d

    @property
    def epoch_samples(self) -> int:
        return 5 + 3 * self.d

    def own_labels(self, n: int) -> int:
        return 10 * self.d + n

    def sample(self, n: int) -> NDArray[np.int64]:
        return np.array([self.d, n])


def blend(weights: list[float], seed: int = 0) -> Blend:
    return Blend([Numbers(d) for d in range(len(weights))], weights, seed)  # type: ignore[misc]


def worst_error(pattern: NDArray[np.int32], weights: list[int]) -> float:
    """Return the largest distance of a dataset's count from its share, over all datasets and prefixes."""
    counts = np.cumsum(pattern[:, None] == np.arange(len(weights)), axis=0)
    shares = np.arange(1, len(pattern) + 1)[:, None] * np.array(weights) / sum(weights)
    return float(np.abs(counts - shares).max())


@settings(max_examples=150)
@given(weights=st.lists(st.integers(0, 60), min_size=1, max_size=30).filter(any), seed=st.integers(0, 9))
def test_every_prefix_keeps_its_shares(weights: list[int], seed: int) -> None:
    pattern = blend_pattern(weights, seed)
    assert np.bincount(pattern, minlength=len(weights)).tolist() == weights
    assert worst_error(pattern, weights) < 1


def test_shares_of_many_small_and_some_large() -> None:
    weights = [4000, 2500, 1] + [7] * 90 + [1] * 100
    assert worst_error(blend_pattern(weights), weights) < 1


@settings(max_examples=60)
@given(
    weights=st.lists(st.floats(0.01, 10, allow_nan=False), min_size=1, max_size=6).map(
        lambda values: [round(value, 2) for value in values]
    ),
    far=st.integers(0, 10**15),
)
def test_any_sample_is_found_at_once(weights: list[float], far: int) -> None:
    one = blend(weights)
    taken = [0] * len(weights)
    for n in range(min(2 * one.period + 3, 500)):
        d, k = one.locate(n)
        assert k == taken[d]
        taken[d] += 1
    d, k = one.locate(far)
    share = Fraction(str(weights[d])) / sum(Fraction(str(weight)) for weight in weights)
    # The share of these weights is exact, so the error does not grow with the sample's number.
    assert abs(k - far * share) < 1.5
    assert one.sample(far).tolist() == [d, k]
    assert blend(weights).locate(far) == (d, k)


def test_simple_weights() -> None:
    assert whole_weights([0.3, 0.7]) == [3, 7]
    assert whole_weights([2, 4]) == [1, 2]
    assert whole_weights([1e-3, 1.0]) == [1, 1000]
    assert blend([5]).locate(12) == (0, 12)


@settings(max_examples=60)
@given(weights=st.lists(st.floats(0, 1e6, exclude_min=True), min_size=1, max_size=12))
def test_odd_weights_are_rounded_and_never_to_nothing(weights: list[float]) -> None:
    whole = whole_weights(weights)
    assert sum(whole) <= MAX_PERIOD
    assert min(whole) > 0
    total = sum(map(Fraction, weights))
    small = sum(Fraction(weight) * MAX_PERIOD < total for weight in weights)
    for count, weight in zip(whole, weights, strict=True):
        assert abs(count / sum(whole) - weight / sum(weights)) <= (1 + small) / MAX_PERIOD


def test_the_largest_period() -> None:
    weights = [0.123456789, 0.6180339887, 0.2585092]
    one = blend(weights)
    assert 50_000 < one.period <= MAX_PERIOD
    assert worst_error(one._dataset, one.weights) < 1


def test_the_seed_settles_ties() -> None:
    patterns = {tuple(blend_pattern([1] * 6, seed).tolist()) for seed in range(10)}
    assert len(patterns) > 3


@pytest.mark.parametrize("weights", [[1], [1, 1], [5, 8, 11], [100, 1], [1, 100]])
def test_the_first_epoch_ends_where_a_dataset_begins_again(weights: list[float]) -> None:
    made = blend(weights)
    places = [made.locate(n) for n in range(2000)]
    assert made.epoch_samples == next(n for n, (d, k) in enumerate(places) if k == 5 + 3 * d)
    assert all(made.own_labels(n) == 10 * d + k for n, (d, k) in enumerate(places[:20]))
