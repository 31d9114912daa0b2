"""Tests of samples whose spans were taken out.

They depend only on the seed and their number. Their lengths follow T5's formulas, and the text can be restored from
them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshwright.data.masked import keyed_uniform
from meshwright.data.span_lengths import noise_counts, span_lengths, tokens_for
from meshwright.data.spans import SpanOptions, SpanStream, noise_mask
from meshwright.data.stream import FirstEpoch, build_datasets
from tests.support.token_files import write_documents

END, START, SENTINEL = 999, 998, 2000
SEQ = 32

shares = st.floats(0.05, 0.5)
means = st.floats(1.5, 10.0)


def stream_of(prefix: str, seed: int = 5, decoder_seq: int = 0, **more: float) -> SpanStream:
    share, mean = more.get("share", 0.15), more.get("mean", 3.0)
    target = decoder_seq or span_lengths(tokens_for(SEQ, share, mean), share, mean)[1]
    options = SpanOptions(SEQ, target, share, mean, SENTINEL, START, END)
    stream = build_datasets([prefix], None, (1.0, 0.0, 0.0), SEQ, seed, spans=options)[0]
    assert isinstance(stream, SpanStream)
    return stream


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    write_documents(tmp_path / "a", [[*range(10, 10 + n), END] for n in (1, 2, 30, 59, 100, 299)])
    return str(tmp_path / "a")


def restored(sample: dict[str, np.ndarray]) -> list[int]:
    """Return the text of a sample, restored from its input and its target."""
    target = sample["labels"][sample["loss_mask"] > 0].tolist()
    inputs = sample["tokens"].tolist()
    assert inputs.pop() == END and target.pop() == END
    spans: dict[int, list[int]] = {}
    for token in target:
        if token > SENTINEL - 100:
            spans[token] = []
        else:
            spans[list(spans)[-1]].append(token)
    assert list(spans) == [SENTINEL - n for n in range(len(spans))] and all(spans.values())
    return [id for token in inputs for id in spans.pop(token, [token])]


def test_an_epoch_is_every_token_once(prefix: str) -> None:
    stream = stream_of(prefix)
    texts = [restored(stream.sample(n)) for n in range(stream.source.epoch_samples)]
    assert {len(text) for text in texts} == {stream.options.tokens}
    whole = sorted(token for n in (1, 2, 30, 59, 100, 299) for token in [*range(10, 10 + n), END])
    together = sorted(token for text in texts for token in text)
    # The last sample continues into the next epoch.
    beyond = len(together) - len(whole)
    assert 0 <= beyond < stream.options.tokens
    for token in whole:
        together.remove(token)
    assert len(together) == beyond


def test_the_decoder_reads_what_it_has_written(prefix: str) -> None:
    sample = stream_of(prefix, decoder_seq=20).sample(3)
    assert sample["decoder_tokens"][0] == START and (sample["decoder_tokens"][1:] == sample["labels"][:-1]).all()
    count = int(sample["loss_mask"].sum())
    assert count < 20 and sample["loss_mask"][:count].all() and sample["labels"][count - 1] == END


def test_a_sample_follows_from_seed_and_number(prefix: str) -> None:
    first, again, other = (stream_of(prefix, seed) for seed in (5, 5, 6))
    for n in (7, 0, 12):
        for name, value in first.sample(n).items():
            assert (value == again.sample(n)[name]).all()
    assert any((first.sample(n)["tokens"] != other.sample(n)["tokens"]).any() for n in range(3))
    drawn = [tuple(keyed_uniform(4, 5, "train", "spans", n)) for n in range(3)]
    assert len(set(drawn)) == 3


def test_an_evaluation_leaves_out_what_the_next_epoch_repeats(prefix: str) -> None:
    stream = stream_of(prefix)
    epoch = FirstEpoch(stream, 1000)
    assert epoch.samples == stream.source.epoch_samples - 1
    assert all(epoch.sample(n)["loss_mask"].all() for n in range(epoch.samples))


@given(tokens=st.integers(2, 2000), share=shares, mean=means)
def test_lengths_follow_t5s_formulas(tokens: int, share: float, mean: float) -> None:
    noise, spans = noise_counts(tokens, share, mean)
    assert noise == min(max(round(tokens * share), 1), tokens - 1)
    assert 1 <= spans <= min(noise, tokens - noise)
    assert span_lengths(tokens, share, mean) == (tokens - noise + spans + 1, noise + spans + 1)
    mask = noise_mask(tokens, share, mean, keyed_uniform(2 * tokens, tokens))
    begins = mask & ~np.append(False, mask[:-1])
    assert len(mask) == tokens and mask.sum() == noise and begins.sum() == spans and not mask[0] and mask[-1]


@given(seq=st.integers(8, 3000), share=shares, mean=means)
@example(9, 0.5, 1.5)
def test_the_longest_text_fills_the_input_exactly(seq: int, share: float, mean: float) -> None:
    tokens = tokens_for(seq, share, mean)
    assert span_lengths(tokens, share, mean)[0] == seq < span_lengths(tokens + 1, share, mean)[0]


def test_t5s_own_lengths() -> None:
    assert (tokens_for(512), span_lengths(568)) == (568, (512, 114))


def test_all_ways_to_cut_are_as_likely() -> None:
    """The first, second and third span have the same mean length, and the lengths of a span have the right odds."""
    masks = np.stack([noise_mask(60, 0.15, 3.0, keyed_uniform(120, n)) for n in range(3000)])
    ends = np.diff(np.pad(masks.astype(int), ((0, 0), (1, 1))), axis=1)
    lengths = (np.nonzero(ends == -1)[1] - np.nonzero(ends == 1)[1]).reshape(3000, 3)
    assert (lengths.sum(1) == 9).all() and abs(lengths.mean(0) - 3).max() < 0.12
    assert np.bincount(lengths[:, 0]).tolist()[1:] == pytest.approx([3000 * (8 - n) / 28 for n in range(1, 8)], abs=90)
