"""Tests of a run's samples: labels, masks, positions and segments; splits; and several files in one run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from meshwright.data.blend import Blend
from meshwright.data.dataset import GPTDataset
from meshwright.data.prepare import prepare
from meshwright.data.stream import FirstEpoch, SampleOptions, SampleStream, build_datasets, split_documents
from meshwright.data.token_file import METADATA_FORMAT
from meshwright.data.token_writer import TokenFileWriter
from meshwright.errors import UserError
from tests.support.token_files import write_documents

# A split that gives everything to training.
ALL = (1, 0, 0)


class Fixed:
    """A dataset whose only sample has the given tokens."""

    epoch_samples = 1

    def own_labels(self, n: int) -> int:
        return self.seq

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.seq = np.array(tokens, np.int64), len(tokens) - 1

    def sample(self, n: int) -> NDArray[np.int64]:
        return self.tokens


def one(tokens: list[int], **options: bool) -> dict[str, list[int]]:
    """Return the sample of a stream with these tokens, where token 0 ends a document."""
    sample = SampleStream(Fixed(tokens), SampleOptions(eod=0, **options)).sample(0)  # type: ignore[arg-type]
    assert all(value.dtype == np.int64 for value in sample.values())
    return {name: value.tolist() for name, value in sample.items()}


def test_a_plain_sample() -> None:
    assert one([5, 0, 6, 7]) == {"tokens": [5, 0, 6], "labels": [0, 6, 7], "loss_mask": [1, 1, 1]}


def test_masks_and_resets() -> None:
    """The loss is masked where the input is an end token. The end token belongs to the document that it ends."""
    text = [5, 0, 6, 7, 0, 0, 8, 9]
    assert one(text, mask_eod=True)["loss_mask"] == [1, 0, 1, 1, 0, 0, 1]
    assert "positions" not in one(text, mask_eod=True)
    assert one(text, reset_positions=True)["positions"] == [0, 1, 0, 1, 2, 0, 0]
    assert one(text, reset_attention=True)["segments"] == [0, 0, 1, 1, 1, 2, 3]
    assert set(one(text, reset_positions=True)) == {"tokens", "labels", "loss_mask", "positions"}
    assert set(one(text, reset_attention=True)) == {"tokens", "labels", "loss_mask", "segments"}
    assert one(text, reset_positions=True)["loss_mask"] == [1] * 7


@settings(max_examples=50)
@given(tokens=st.lists(st.integers(0, 2), min_size=2, max_size=40))
def test_resets_against_a_plain_loop(tokens: list[int]) -> None:
    position = segment = 0
    positions, segments = [], []
    for token in tokens[:-1]:
        positions.append(position)
        segments.append(segment)
        position, segment = (0, segment + 1) if token == 0 else (position + 1, segment)
    sample = one(tokens, mask_eod=True, reset_positions=True, reset_attention=True)
    assert (sample["positions"], sample["segments"]) == (positions, segments)
    assert sample["loss_mask"] == [int(token != 0) for token in tokens[:-1]]


def test_a_sample_may_be_changed_by_who_asked_for_it() -> None:
    stream = SampleStream(Fixed([1, 2, 3]), SampleOptions())  # type: ignore[arg-type]
    stream.sample(0)["tokens"][:] = 9
    assert stream.sample(0)["labels"].tolist() == [2, 3] and stream.sample(0)["tokens"].tolist() == [1, 2]


@settings(max_examples=150)
@given(count=st.integers(0, 5000), shares=st.lists(st.integers(0, 1000), min_size=3, max_size=3).filter(any))
def test_split_boundaries(count: int, shares: list[int]) -> None:
    parts = split_documents(count, shares)
    assert parts[0][0] == 0 and parts[-1][1] == count
    assert all(a[1] == b[0] for a, b in zip(parts, parts[1:], strict=False))
    wanted = sum(share > 0 for share in shares)
    for (low, high), share in zip(parts, shares, strict=True):
        assert low <= high
        if not share:
            assert low == high
        elif count >= wanted:
            assert high > low
            assert abs((high - low) - count * share / sum(shares)) < 1 + wanted


def test_split_as_megatron_rounds() -> None:
    assert split_documents(1000, (969, 30, 1)) == [(0, 969), (969, 999), (999, 1000)]
    assert split_documents(20, (969, 30, 1)) == [(0, 18), (18, 19), (19, 20)]
    assert split_documents(1, (9, 1, 0)) == [(0, 1), (1, 1), (1, 1)]
    assert split_documents(5, (0, 1, 0)) == [(0, 0), (0, 5), (5, 5)]


def write(prefix: Path, documents: int, length: int = 10, **metadata: int) -> str:
    """Write documents that repeat their number and end with token 999."""
    with TokenFileWriter(prefix, np.uint16) as writer:
        for number in range(documents):
            tokens = np.array([number] * (length - 1) + [999], np.uint16)
            writer.add_documents(tokens.tobytes(), [length])
        content = json.dumps({"format": METADATA_FORMAT, **metadata}).encode()
        writer.finish({".json": content} if metadata else None)
    return str(prefix)


def test_build_one_file(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", 100, vocab_size=1000, eod=999)
    train, valid, test = build_datasets([prefix], None, (8, 2, 0), 7, 5, SampleOptions(mask_eod=True))
    assert test is None and train is not None and valid is not None
    assert train.vocab_needed == valid.vocab_needed == 1000
    for part, low, high in ((train, 0, 80), (valid, 80, 100)):
        seen = {int(token) for n in range(400) for token in part.sample(n)["tokens"]}
        assert seen == set(range(low, high)) | {999}
        sample = part.sample(3)
        assert np.array_equal(sample["loss_mask"], sample["tokens"] != 999)
    again = build_datasets([prefix], None, (8, 2, 0), 7, 5)[0]
    assert again is not None and np.array_equal(again.sample(17)["tokens"], train.sample(17)["tokens"])


@pytest.mark.parametrize(("files", "length"), [(1, 50), (1, 49), (1, 9), (2, 50), (2, 49)])
def test_one_epoch(files: int, length: int, tmp_path: Path) -> None:
    """One epoch has no label twice and no sample without a label. In a single file it leaves no label out."""
    prefixes = [str(tmp_path / str(number)) for number in range(files)]
    for number, prefix in enumerate(prefixes):
        write_documents(prefix, [range(100 * number, 100 * number + length + 24 * number)])
    stream = build_datasets(prefixes, None, ALL, 8, 5, SampleOptions(eod=30, mask_eod=True))[0]
    assert stream is not None
    epoch = FirstEpoch(stream, 1000)
    samples = [epoch.sample(n) for n in range(epoch.samples)]
    labels = [sample["labels"][sample["loss_mask"] == 1].tolist() for sample in samples]
    seen = [label for part in labels for label in part]
    assert len(set(seen)) == len(seen) and all(labels) and 31 not in seen, "the mask after the end token stays"
    if files == 1:
        assert set(seen) == set(range(1, length)) - {31} and epoch.samples == -(-(length - 1) // 8)
    assert FirstEpoch(stream, 1).samples == 1


def test_build_a_blend(tmp_path: Path) -> None:
    prefixes = [write(tmp_path / "a", 60, vocab_size=300, eod=1), write(tmp_path / "b", 20, vocab_size=500, eod=1)]
    train, valid, _ = build_datasets(prefixes, [1, 3], (0.5, 0.5, 0), 7, 5)
    assert train is not None and isinstance(train.source, Blend) and train.source.weights == [1, 3]
    assert train.vocab_needed == 500
    assert [entry.documents for entry in train.source.datasets if isinstance(entry, GPTDataset)] == [(0, 30), (0, 10)]
    by_tokens = build_datasets(prefixes, None, ALL, 7, 5)[0]
    assert by_tokens is not None and isinstance(by_tokens.source, Blend) and by_tokens.source.weights == [3, 1]


def test_the_same_file_twice_gives_two_orders(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", 60)
    train = build_datasets([prefix, prefix], [1, 1], ALL, 7, 5)[0]
    assert train is not None and isinstance(train.source, Blend) and train.vocab_needed is None
    one, two = train.source.datasets
    assert any(not np.array_equal(one.sample(n), two.sample(n)) for n in range(5))


def test_mistakes(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", 20)
    ends = [write(tmp_path / f"e{eod}", 20, vocab_size=9, eod=eod) for eod in (1, 2)]
    with pytest.raises(UserError, match="valid part is too small.*hold 10 tokens, one sample takes 12"):
        build_datasets([plain], None, (19, 1, 0), 11, 0)
    with pytest.raises(UserError, match="set data.eod"):
        build_datasets([plain], None, ALL, 7, 0, SampleOptions(reset_positions=True))
    with pytest.raises(UserError, match=r"different tokens \[1, 2\]"):
        build_datasets(ends, None, ALL, 7, 0, SampleOptions(mask_eod=True))
    named = build_datasets(ends, None, ALL, 7, 0, SampleOptions(eod=2, mask_eod=True))[0]
    assert named is not None and named.options.eod == 2
    with pytest.raises(UserError, match="no token file"):
        build_datasets([str(tmp_path / "none")], None, ALL, 7, 0)


def test_files_of_two_tokenizers_are_refused(tmp_path: Path) -> None:
    """Their ids mean different texts, and no other check would notice it."""
    (tmp_path / "a.txt").write_text("one two three four " * 40)
    (tmp_path / "b.txt").write_text("uno dos tres cuatro " * 40)
    a, b, c = (str(tmp_path / name) for name in "abc")
    prepare([f"{a}.txt"], a, tokenizer="train:270", workers=1)
    prepare([f"{b}.txt"], b, tokenizer="train:270", workers=1)
    prepare([f"{b}.txt"], c, tokenizer=f"{a}.tokenizer.json", workers=1)
    with pytest.raises(UserError, match="different tokenizers"):
        build_datasets([a, b], None, ALL, 7, 5)
    build_datasets([a, c], None, ALL, 7, 5)
    again = json.dumps(json.loads(Path(f"{a}.tokenizer.json").read_text()) | {"padding": None}, indent=7)
    # The same tokenizer, as another program may write it, is accepted.
    Path(f"{a}.again.json").write_text(again)
    prepare([f"{b}.txt"], c, tokenizer=f"{a}.again.json", workers=1, force=True)
    build_datasets([a, c], None, ALL, 7, 5)


def test_a_damaged_index_is_not_called_small(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", 10, vocab_size=1000, eod=999)
    index = bytearray((tmp_path / "a.idx").read_bytes())
    index[34 + 4 * 10 + 16 : 34 + 4 * 10 + 24] = bytes(8)
    (tmp_path / "a.idx").write_bytes(index)
    with pytest.raises(UserError, match="^[^:]*a.idx is damaged"):
        build_datasets([prefix], None, ALL, 7, 5)


@pytest.mark.parametrize("metadata", [{"eod": 1}, {"vocab_size": None, "eod": 1}, {"vocab_size": 5, "eod": "0"}])
def test_damaged_metadata_is_one_sentence(tmp_path: Path, metadata: dict[str, object]) -> None:
    prefix = write(tmp_path / "a", 10, **metadata)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"a.json.*(vocab_size|eod)"):
        build_datasets([prefix], None, ALL, 7, 5)


def test_a_split_is_drawn_from_all_over_a_file(tmp_path: Path) -> None:
    """A drawn split takes validation documents from all over a file, here from both of its halves.

    The parts have no document in common and do not depend on the seed. Without a drawn split, the last documents of the
    file are the validation and test parts.
    """
    write_documents(tmp_path / "two", [np.full(20, n) for n in range(200)])

    def documents(seed: int, drawn: bool) -> list[set[int]]:
        parts = build_datasets([str(tmp_path / "two")], None, (8, 1, 1), 19, seed, drawn=drawn)
        by_part = []
        for part in parts:
            assert part is not None
            numbers = range(part.source.epoch_samples)
            by_part.append({int(token) for n in numbers for token in part.sample(n)["tokens"]})
        return by_part

    train, valid, test = documents(1, True)
    assert len(train) == 160 and len(valid) == len(test) == 20 and len(train | valid | test) == 200
    assert 4 <= len(valid & set(range(100))) <= 16, "about half of it is from the first input"
    assert documents(2, True) == [train, valid, test]
    assert documents(1, False)[1:] == [set(range(160, 180)), set(range(180, 200))]
