"""Samples with masked tokens depend only on the seed and their number, and an epoch has every token once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.masked import DocumentPieces, MaskedStream, Masking, choose, keyed_uniform
from meshwright.data.stream import FirstEpoch, build_datasets
from meshwright.data.word_parts import WordParts, special_ids, word_parts
from tests.support.token_files import write_documents, write_sequences

CLS, SEP, MASK, PAD = SPECIALS = (1000, 1001, 1002, 1003)
SEQ = 32
END = 999


def masking(**more: object) -> Masking:
    values: dict[str, object] = {
        "predictions": 5, "share": 0.15, "ngrams": 1, "specials": SPECIALS, "vocab": 900, **more
    }  # fmt: skip
    return Masking(**values)  # type: ignore[arg-type]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """A token file with documents of many lengths. Their tokens count up, so each tells its place in the document."""
    lengths = [1, 2, 3, 20, 29, 30, 31, 58, 59, 100, 299]
    documents = [[*range(10, 10 + n), END] for n in lengths]
    write_documents(tmp_path / "a", documents)
    return str(tmp_path / "a")


def streams(prefix: str, m: Masking, split: tuple[float, ...] = (1.0, 0.0, 0.0), seed: int = 5) -> MaskedStream:
    stream = build_datasets([prefix], None, split, SEQ, seed, masking=m)[0]
    assert isinstance(stream, MaskedStream)
    return stream


def restored(sample: dict[str, np.ndarray]) -> list[int]:
    """Return the tokens of a sample as they were before masking and swapping."""
    ids = sample["tokens"].copy()
    counted = sample["loss_mask"] > 0
    ids[sample["places"][counted]] = sample["labels"][counted]
    first, second = (ids[(sample["token_types"] == t) & (sample["segments"] == 0)].tolist() for t in (0, 1))
    assert first[0] == CLS and first[-1] == second[-1] == SEP
    a, b = first[1:-1], second[:-1]
    return b + a if sample["swapped"] else a + b


def test_an_epoch_is_every_token_once_and_swaps_are_told(prefix: str) -> None:
    stream = streams(prefix, masking())
    texts = [restored(stream.sample(n)) for n in range(stream.source.epoch_samples)]
    assert all(text == list(range(text[0], text[0] + len(text))) for text in texts)
    lengths = [1, 2, 3, 20, 29, 30, 31, 58, 59, 100, 299]
    assert sorted(token for text in texts for token in text) == sorted(t for n in lengths for t in range(10, 10 + n))
    assert all(len(text) <= SEQ - 3 for text in texts) and stream.source.epoch_samples == 29
    swaps = [int(stream.sample(n)["swapped"]) for n in range(400)]
    assert 150 < sum(swaps) < 250


def test_a_sample_is_a_function_of_seed_and_number(prefix: str) -> None:
    one, other = streams(prefix, masking()), streams(prefix, masking())
    other.sample(77)
    for n in (0, 3, 28, 29, 61):
        for name, value in one.sample(n).items():
            assert np.array_equal(value, other.sample(n)[name]), name
    assert not np.array_equal(one.sample(4)["tokens"], streams(prefix, masking(), seed=6).sample(4)["tokens"])
    epochs = [sorted(tuple(restored(one.sample(e * 29 + n))) for n in range(29)) for e in (0, 1)]
    # Epochs have the same texts, in different orders and with different masks.
    assert epochs[0] == epochs[1]
    drawn = keyed_uniform(3, 5, "train", "masked", 0).tolist()
    assert drawn == keyed_uniform(4, 5, "train", "masked", 0).tolist()[:3] and all(0 <= x < 1 for x in drawn)


def test_eight_in_ten_are_masked_and_one_is_changed(prefix: str) -> None:
    stream = streams(prefix, masking())
    kinds = np.zeros(3)
    for n in range(1500):
        sample = stream.sample(n)
        count = int(sample["loss_mask"].sum())
        length = int((sample["segments"] == 0).sum()) - 3
        assert count == min(5, length, max(1, round(0.15 * (length + 3))))
        places, labels = sample["places"][:count], sample["labels"][:count]
        assert (np.diff(places) > 0).all() and not sample["places"][count:].any()
        seen = sample["tokens"][places]
        kinds += [(seen == MASK).sum(), ((seen != MASK) & (seen != labels)).sum(), (seen == labels).sum()]
        assert (labels < 900).all()
    assert np.abs(kinds / kinds.sum() - [0.8, 0.1, 0.1]).max() < 0.02


def test_segments_meet_between_sentences_where_they_are_known(tmp_path: Path) -> None:
    write_sequences(tmp_path / "a", [[[1, 2, 3], [4], [5, 6, 7, 8], [END]], [[1, 2], [3, END]]], np.uint16)
    stream = streams(str(tmp_path / "a"), masking())
    for n in range(20):
        sample = stream.sample(n)
        whole = restored(sample)
        second = int((sample["token_types"] == 1).sum()) - 1
        cut = second if sample["swapped"] else len(whole) - second
        assert cut in ((3, 4) if len(whole) == 8 else (2,)), (n, whole, cut)


def test_without_pairs_there_is_one_segment(prefix: str) -> None:
    sample = streams(prefix, masking(pairs=False)).sample(0)
    assert "swapped" not in sample and not sample["token_types"].any()
    assert (sample["tokens"] == SEP).sum() == 1


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(1, 12), st.integers(1, 3), st.integers(0, 1 << 30)
)
def test_words_are_masked_whole(lengths: list[int], predictions: int, ngrams: int, seed: int) -> None:
    """Words are masked whole, unless every word is longer than the number of tokens that may be masked."""
    # Token 1 begins a word, and token 2 continues it.
    words = WordParts(np.array([False, False, True]), np.ones(3, bool))
    ids = np.array([token for n in lengths for token in [1, *[2] * (n - 1)]])
    body = np.ones(len(ids), bool)
    m = masking(predictions=predictions, share=0.5, ngrams=ngrams, words=words)
    random = keyed_uniform(2 * len(ids), seed).reshape(2, -1)
    chosen = set(choose(ids, body, m, *random).tolist())
    most = min(predictions, len(ids), max(1, round(0.5 * (len(ids) + m.added_tokens))))
    assert 1 <= len(chosen) <= most
    at, partly = 0, 0
    for n in lengths:
        partly += 0 < len(chosen & set(range(at, at + n))) < n
        at += n
    assert partly == 0 or (partly == 1 and min(lengths) > most)


def test_longer_runs_of_words_have_the_odds_of_their_length() -> None:
    m = masking(predictions=3, share=0.01, ngrams=3, words=WordParts(np.zeros(3, bool), np.ones(3, bool)))
    ids, body = np.ones(100, np.int64), np.ones(100, bool)
    run_counts = []
    for seed in range(600):
        m3 = masking(predictions=3, share=0.03, ngrams=3, words=m.words)
        chosen = choose(ids, body, m3, *keyed_uniform(200, seed).reshape(2, -1))
        run_counts.append(int((np.diff(chosen) > 1).sum()) + 1)
    assert len(choose(ids, body, m, *keyed_uniform(200, 1).reshape(2, -1))) == 1
    runs = np.bincount(run_counts, minlength=4)[1:] / 600
    # A run of three is drawn first in 2 of 11 samples, a single word in 6 of 11.
    assert runs[0] > 0.15 and runs[2] > 0.2


def test_vocabularies_show_their_words() -> None:
    pieces = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "."]
    words = word_parts(pieces)
    assert words.continues_word(np.array([4, 5, 4]), np.array([5, 6, 4])).tolist() == [True, False, False]
    assert special_ids(pieces) == (1, 2, 3, 0) and special_ids(pieces[1:]) == ()
    bytes_level = word_parts(["Ġthe", "re", "(", "Ċ", "Ġ", "x"])
    pairs = [(0, 1), (1, 0), (2, 5), (1, 2), (3, 5), (4, 5)]
    before, after = (np.array(side) for side in zip(*pairs, strict=True))
    assert bytes_level.continues_word(before, after).tolist() == [True, False, False, False, False, False]


def test_one_epoch_ends_and_blends_are_drawn(prefix: str, tmp_path: Path) -> None:
    stream = streams(prefix, masking())
    assert FirstEpoch(stream, 100).samples == 29 and FirstEpoch(stream, 7).sample(3)["loss_mask"].any()
    write_documents(tmp_path / "b", [[*range(10, 60), END]] * 8)
    mixed = build_datasets([prefix, str(tmp_path / "b")], None, (1.0, 0.0, 0.0), SEQ, 5, masking=masking())[0]
    assert mixed is not None and all(len(restored(mixed.sample(n))) <= 29 for n in range(50))
    assert isinstance(stream.source, DocumentPieces)
