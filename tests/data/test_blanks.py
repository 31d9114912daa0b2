"""Samples with blanks depend only on the seed and their number, and their text can be restored from them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from meshwright.data.blanks import BlankOptions, BlankStream, _short_spans
from meshwright.data.masked import keyed_uniform
from meshwright.data.stream import FirstEpoch, build_datasets
from meshwright.data.token_file import METADATA_FORMAT
from meshwright.errors import UserError
from tests.support.token_files import write_documents

MASK, GMASK, SOP, EOP, PAD = SPECIALS = (1000, 1001, 1002, 1003, 1004)
SEQ, END = 64, 999
LENGTHS = [1, 2, 3, 20, 40, 58, 59, 100, 299]


def stream_of(prefix: str, short: float, inner: bool = True, seed: int = 5) -> BlankStream:
    options = BlankOptions(SEQ, short, 0.15, 3.0, 0.5, SPECIALS, inner)
    stream = build_datasets([prefix], None, (1.0, 0.0, 0.0), SEQ, seed, blanks=options)[0]
    assert isinstance(stream, BlankStream)
    return stream


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    write_documents(tmp_path / "a", [[*range(10, 10 + n), END] for n in LENGTHS])
    return str(tmp_path / "a")


def restored(sample: dict[str, np.ndarray]) -> list[int]:
    """Return the text of a sample, with each mask of the source replaced by its span. Check the sample's other values.

    A span belongs to the mask at the position of its tokens.
    """
    segments = sample["segments"]
    source, spans = (sample["tokens"][segments == n].tolist() for n in (0, 1))
    assert (segments == np.sort(segments)).all() and sample["loss_mask"].tolist() == (segments == 1).tolist()
    labels, places = sample["labels"][segments == 1].tolist(), sample["positions"][segments == 1].tolist()
    inner = sample["token_types"][segments == 1].tolist()
    assert sample["positions"][segments == 0].tolist() == list(range(len(source)))
    assert not sample["token_types"][segments != 1].any()
    fillings: dict[int, list[int]] = {}
    begins = [at for at, token in enumerate(spans) if token == SOP]
    for begin, end in zip(begins, [*begins[1:], len(spans)], strict=True):
        assert labels[begin:end] == [*spans[begin + 1 : end], EOP]
        assert inner[begin:end] == list(range(1, end - begin + 1))
        if GMASK in source:
            assert places[begin:end] == list(range(len(source), len(source) + end - begin))
            fillings[source.index(GMASK)] = spans[begin + 1 : end]
        else:
            assert len(set(places[begin:end])) == 1 and source[places[begin]] == MASK
            fillings[places[begin]] = spans[begin + 1 : end]
    assert sorted(fillings) == [at for at, token in enumerate(source) if token in (MASK, GMASK)]
    return [id for at, token in enumerate(source) for id in fillings.get(at, [token])]


@pytest.mark.parametrize("short", [0.0, 0.4, 1.0])
def test_an_epoch_is_every_token_once(prefix: str, short: float) -> None:
    stream = stream_of(prefix, short)
    samples = [stream.sample(n) for n in range(stream.source.epoch_samples)]
    texts = [restored(sample) for sample in samples]
    assert all(text == list(range(text[0], text[0] + len(text))) for text in texts)
    assert sorted(t for text in texts for t in text) == sorted(t for n in LENGTHS for t in range(10, 10 + n))
    assert {len(sample["tokens"]) for sample in samples} == {SEQ}


def test_a_sample_is_a_function_of_seed_and_number(prefix: str) -> None:
    one, again, other = stream_of(prefix, 0.5), stream_of(prefix, 0.5), stream_of(prefix, 0.5, seed=6)
    for n in (7, 0, 3):
        first, second = one.sample(n), again.sample(n)
        assert all((first[key] == second[key]).all() for key in first)
    assert any((one.sample(n)["tokens"] != other.sample(n)["tokens"]).any() for n in range(4))
    assert "token_types" not in stream_of(prefix, 0.5, inner=False).sample(0)


def test_an_evaluation_counts_every_label(prefix: str) -> None:
    stream = stream_of(prefix, 0.0)
    epoch = FirstEpoch(stream, 1000)
    assert epoch.samples == stream.source.epoch_samples
    counts = [int(each.sample(n)["loss_mask"].sum()) for each in (epoch, stream) for n in range(epoch.samples)]
    assert counts[: epoch.samples] == counts[epoch.samples :] and max(counts) > 40


def test_the_shares_are_those_of_the_options(prefix: str) -> None:
    stream = stream_of(prefix, 0.3)
    whole = [bool((stream.sample(n)["tokens"] == GMASK).any()) for n in range(600)]
    # Texts of one token always have a single blank, so that the mean is not exactly 0.7.
    assert np.mean(whole) == pytest.approx(0.7, abs=0.09)
    options = BlankOptions(SEQ, 1.0, 0.15, 3.0, 0.5, SPECIALS)
    lengths = []
    for n in range(400):
        spans = _short_spans(55, options, keyed_uniform(3 * options.most_spans, "test", n))
        assert sum(end - begin for begin, end in spans) == round(0.15 * 55) and len(spans) <= options.most_spans
        assert all(before[1] < after[0] for before, after in zip(spans[:-1], spans[1:], strict=True))
        assert spans[0][0] >= 0 and spans[-1][1] <= 55
        # Later spans are more often cut to the tokens that remain, so only the first one has the mean length.
        lengths.append(spans[0][1] - spans[0][0])
    assert np.mean(lengths) == pytest.approx(3.0, abs=0.3)


def write_conversations(prefix: Path, conversations: list[list[tuple[list[int], int]]]) -> str:
    """Write conversations as `data chat` does. A turn is its tokens, and whether the model learns them."""
    write_documents(prefix, [[id for turn, _ in turns for id in turn] for turns in conversations])
    masks = [[learned for turn, learned in turns for _ in turn] for turns in conversations]
    write_documents(f"{prefix}.mask", masks, np.uint8)
    metadata = {"format": METADATA_FORMAT, "version": 1, "chat": "chat", "vocab_size": 1000, "eod": END}
    Path(f"{prefix}.json").write_text(json.dumps(metadata))
    return str(prefix)


def test_answers_are_blended_in_as_ends(prefix: str, tmp_path: Path) -> None:
    """One sample in twenty is an answer of a conversation, whose source is everything before that answer."""
    talks = [[([200 + n] * 5, 0), ([300 + n] * 3, 1), ([400 + n] * 2, 0), ([500 + n] * 4, 1)] for n in range(6)]
    # This one is longer than a sample: the source loses its beginning.
    talks.append([([800] * 70, 0), ([801] * 6, 1)])
    talks.append([([810] * 7, 0), ([811] * 90, 1)])
    conversations = write_conversations(tmp_path / "talk", talks)
    options = BlankOptions(SEQ, 0.3, 0.15, 3.0, 0.5, SPECIALS, True, (conversations,), 0.05)
    stream = build_datasets([prefix], None, (1.0, 0.0, 0.0), SEQ, 5, blanks=options)[0]
    assert isinstance(stream, BlankStream)
    most = SEQ - options.added_tokens
    found: dict[tuple[int, ...], list[int]] = {}
    for n in range(14 * 20):
        sample = stream.sample(n)
        if stream.source_of(n) != conversations:
            continue
        source = sample["tokens"][sample["segments"] == 0].tolist()
        answer = sample["tokens"][sample["segments"] == 1].tolist()
        assert source[-1] == GMASK and answer[0] == SOP and len(restored(sample)) <= most
        found[tuple(answer[1:])] = source[:-1]
    expected = {}
    for n in range(6):
        first, second = [200 + n] * 5, [200 + n] * 5 + [300 + n] * 3 + [400 + n] * 2
        expected |= {(300 + n,) * 3: first, (500 + n,) * 4: second}
    expected |= {(801,) * 6: [800] * (most - 6), (811,) * (most - 1): [810]}
    # Of 280 samples 14 are answers. This is one epoch, with each answer once.
    assert found == expected


def test_files_without_answers_are_refused(prefix: str) -> None:
    options = BlankOptions(SEQ, 0.3, 0.15, 3.0, 0.5, SPECIALS, True, (prefix,), 0.05)
    with pytest.raises(UserError, match="holds plain text and no conversations: make it with"):
        build_datasets([prefix], None, (1.0, 0.0, 0.0), SEQ, 5, blanks=options)
