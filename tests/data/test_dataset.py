"""Tests of packing: an epoch has every token once, and samples depend only on the seed and their number."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.data import dataset as module
from meshwright.data.dataset import GPTDataset, keyed_permutation
from meshwright.data.token_file import TokenFile
from meshwright.errors import UserError
from tests.support.token_files import sequences, write_sequences


def token_file(prefix: Path, documents: list[list[int]]) -> TokenFile:
    """Write documents of sequences of the given lengths. Token ids count up through the whole file."""
    at = 0
    filled = []
    for lengths_of_one in documents:
        ends = np.cumsum([at, *lengths_of_one])
        filled.append([np.arange(a, b) for a, b in itertools.pairwise(ends)])
        at = int(ends[-1])
    return write_sequences(prefix, filled, np.int32)


def stream(dataset: GPTDataset, file: TokenFile, epochs: int) -> list[int]:
    """Return the tokens of the first epochs one after the other, from the documents in their drawn order."""
    whole: list[int] = []
    low, _ = dataset.documents
    for epoch in range(epochs):
        for document in dataset.epoch(epoch).order:
            first, after = file.document_indices[low + document], file.document_indices[low + document + 1]
            for tokens in sequences(file)[first:after]:
                whole.extend(tokens)
    return whole


lengths = st.lists(st.lists(st.integers(0, 12), max_size=3), min_size=1, max_size=20)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    documents=lengths,
    seq=st.integers(1, 40),
    seed=st.integers(0, 2**63),
    many=st.sampled_from([0, 3, 1000]),
    data=st.data(),
)
def test_samples_are_pieces_of_the_stream(
    tmp_path: Path, documents: list[list[int]], seq: int, seed: int, many: int, data: st.DataObject
) -> None:
    file = token_file(tmp_path / "a", documents)
    low = data.draw(st.integers(0, len(documents)))
    high = data.draw(st.integers(low, len(documents)))
    total = sum(sum(document) for document in documents[low:high])
    if total < seq + 1:
        with pytest.raises(UserError, match="one sample takes"):
            GPTDataset(file, seq, seed, (low, high))
        return
    dataset = GPTDataset(file, seq, seed, (low, high))
    assert dataset.tokens_per_epoch == total
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MANY_DOCUMENTS", many)
        count = dataset.first_sample(3)
        samples = [dataset.sample(n) for n in range(count)]
    whole = stream(dataset, file, 5)
    windows = [whole[g * seq : g * seq + seq + 1] for g in range(count)]
    for epoch in range(3):
        begin, end = dataset.first_sample(epoch), dataset.first_sample(epoch + 1)
        assert sorted(sample.tolist() for sample in samples[begin:end]) == sorted(windows[begin:end])
        order = dataset.epoch(epoch).order
        assert sorted(order.tolist()) == list(range(high - low))
    assert all(sample.dtype == np.int64 for sample in samples)
    # A new object gives the same samples, in whatever order they are requested.
    fresh = GPTDataset(TokenFile(tmp_path / "a"), seq, seed, (low, high))
    for n in data.draw(st.permutations(range(count)))[:10]:
        assert np.array_equal(fresh.sample(n), samples[n])


def test_an_epoch_sees_every_token_once(tmp_path: Path) -> None:
    """The inputs of an epoch's samples are its tokens, each exactly once, if seq divides their number."""
    file = token_file(tmp_path / "a", [[n % 17 + 1] for n in range(340)])
    seq = 9
    assert file.token_count % seq == 0
    dataset = GPTDataset(file, seq, seed=3)
    for epoch in range(3):
        numbers = range(dataset.first_sample(epoch), dataset.first_sample(epoch + 1))
        seen = np.concatenate([dataset.sample(n)[:-1] for n in numbers])
        assert np.array_equal(np.sort(seen), np.arange(file.token_count))


@pytest.mark.parametrize("seq", [1, 7, 9, 18, 19, 40])
def test_in_an_epoch_each_token_is_its_own_label_once(tmp_path: Path, seq: int) -> None:
    """Each token is a label once in an epoch, except for the first token of the whole stream."""
    file = token_file(tmp_path / "a", [[3], [8], [1, 0, 4], [], [25]])
    dataset = GPTDataset(file, seq, seed=11)
    for epoch in range(3):
        numbers = range(dataset.first_sample(epoch), dataset.first_sample(epoch + 1))
        own = [dataset.sample(n)[1 : dataset.own_labels(n) + 1] for n in numbers]
        seen = np.bincount(np.concatenate(own), minlength=file.token_count)
        # A later epoch's first labels belong to the sample that the epoch before ends with.
        assert seen.max() == 1 and (epoch or seen.sum() == file.token_count - 1)
    assert dataset.epoch_samples == dataset.first_sample(1)


def test_over_many_epochs_no_token_is_lost(tmp_path: Path) -> None:
    """The stream continues over the end of an epoch, so after `seq` epochs each token was seen `seq` times."""
    file = token_file(tmp_path / "a", [[3], [8], [1, 0, 4], [], [7]])
    seq = 7
    dataset = GPTDataset(file, seq, seed=11)
    count = dataset.first_sample(seq)
    assert count * seq == seq * file.token_count
    seen = np.concatenate([dataset.sample(n)[:-1] for n in range(count)])
    assert np.bincount(seen).tolist() == [seq] * file.token_count


def test_seeds_streams_and_epochs_differ(tmp_path: Path) -> None:
    file = token_file(tmp_path / "a", [[10]] * 100)
    base = GPTDataset(file, 16, seed=1)
    others = [GPTDataset(file, 16, seed=2), GPTDataset(file, 16, seed=1, stream="x")]
    orders = [base.epoch(0), base.epoch(1), *(other.epoch(0) for other in others)]
    assert len({tuple(epoch.order.tolist()) for epoch in orders}) == 4
    assert len({tuple(epoch.shuffle.tolist()) for epoch in orders}) == 4
    assert np.array_equal(GPTDataset(file, 16, seed=1).epoch(0).order, orders[0].order)


def test_only_a_few_epochs_are_kept(tmp_path: Path) -> None:
    dataset = GPTDataset(token_file(tmp_path / "a", [[10]] * 5), 7, seed=1)
    first = dataset.sample(0)
    for n in range(0, 200, 5):
        dataset.sample(n)
    assert dataset.epoch.cache_info().currsize == module.CACHED_EPOCHS
    assert np.array_equal(dataset.sample(0), first)
    far = dataset.sample(10**12 + 1)
    assert np.array_equal(GPTDataset(dataset.file, 7, seed=1).sample(10**12 + 1), far)


@pytest.mark.parametrize("at_once", [2, 1000])
@pytest.mark.parametrize(
    ("documents", "at", "value"),
    [
        ([[10]] * 5, 34 + 5 * 4 + 8, 10**6),  # the second sequence begins far beyond the end
        ([[10]] * 5, 34 + 5 * 4 + 16, 0),  # as after a lost page: the third sequence begins where the first does
        ([[10]] * 5, 34 + 5 * 4 + 8, -40),
        ([[10]] * 5, 34 + 8, 2**32 - 3),  # the third sequence has a negative length
        ([[5, 5]] * 5, 34 + 10 * 12 + 16, 1),  # the third document begins before the second
        ([[5, 5]] * 5, 34 + 10 * 12 + 8, 10**6),  # the second document begins beyond the end
    ],
)
def test_a_damaged_index_is_named(
    tmp_path: Path, documents: list[list[int]], at: int, value: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHECKED_AT_ONCE", at_once)
    GPTDataset(token_file(tmp_path / "a", documents), 49, seed=1).sample(0)
    idx = bytearray((tmp_path / "a.idx").read_bytes())
    width = 4 if value > 2**31 else 8
    idx[at : at + width] = value.to_bytes(width, "little", signed=value < 0)
    (tmp_path / "a.idx").write_bytes(idx)
    with pytest.raises(UserError, match="damaged"):
        GPTDataset(TokenFile(tmp_path / "a"), 49, seed=1)


@settings(max_examples=60)
@given(size=st.integers(0, 3000), seed=st.integers(0, 2**64), label=st.text(max_size=5))
def test_permutations(size: int, seed: int, label: str) -> None:
    permutation = keyed_permutation(size, seed, label)
    assert np.array_equal(np.sort(permutation), np.arange(size))
    assert np.array_equal(permutation, keyed_permutation(size, seed, label))


GOLDEN_10 = [6, 3, 1, 2, 5, 0, 4, 8, 7, 9]
GOLDEN_100K = [39635, 41173, 34107, 50032, 38519, 95822]


def test_permutations_are_fixed_for_ever() -> None:
    """Permutations never change between releases, because a run that a later release resumes must see the same data."""
    assert keyed_permutation(10, 1234, "documents", 0).tolist() == GOLDEN_10
    assert keyed_permutation(100_000, 7, "", "samples", 3)[:6].tolist() == GOLDEN_100K


def test_permutations_are_even() -> None:
    """Every element appears at every position about equally often (chi-squared, 81 degrees of freedom)."""
    table = np.zeros((10, 10))
    for key in range(4000):
        table[np.arange(10), keyed_permutation(10, key)] += 1
    assert ((table - 400) ** 2 / 400).sum() < 140
