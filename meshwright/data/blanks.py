"""Blank-filling samples, as in GLM: a source in which special tokens replace spans of the text, and then these spans.

Attention within the source is bidirectional. A span is predicted token by token, from the source and the spans before
it. [MASK] replaces each of several short spans, which follow the source in random order. [gMASK] replaces the end of
the text, or the answer to an instruction (`instructions.py`). The inputs of a span are [sop] and its tokens, and the
labels are its tokens and [eop].

A token has two positions. The first is its place in the source. The tokens of a [MASK]'s span all have the position of
that [MASK]; those of a [gMASK]'s span count up from its position. The second is the place within the span, which is 0
in the source. Everything is a pure function of the seed and the sample's number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.data.blend import Blend, NumberedDataset
from meshwright.data.masked import DocumentChunk, keyed_uniform

Integers = NDArray[np.int64]
SOURCE, SPANS, PADDING = 0, 1, 2  # the segments of a sample


@dataclass(frozen=True)
class BlankOptions:
    """The settings of blank-filling samples. `specials` are the ids of [MASK], [gMASK], [sop], [eop] and [pad]."""

    seq: int
    short: float  # share of the samples with short spans; the others have the end of the text to fill in
    share: float  # of a text's tokens that are in short spans
    mean: float  # length of a short span
    least: float  # share of the text that an end to fill in has at least
    specials: tuple[int, ...]
    inner: bool = False  # samples have the second position, as `token_types`
    instructions: tuple[str, ...] = ()  # files of conversations whose answers are filled in
    instruction_share: float = 0.0  # of the samples that are such answers

    @cached_property
    def most_spans(self) -> int:
        """The maximum number of short spans in a sample: one more than spans of the mean length would need."""
        return math.ceil(self.share * self.seq / self.mean) + 1

    @property
    def added_tokens(self) -> int:
        """The number of special tokens in a sample with the most spans: a [MASK] and a [sop] for each."""
        return 2 * self.most_spans


class BlankStream:
    """The samples of one part of the data. Sample n, and so every batch, is a pure function of the seed and n."""

    def __init__(
        self, source: NumberedDataset, options: BlankOptions, seed: int, name: str, vocab_needed: int | None
    ) -> None:
        self.source, self.options, self.vocab_needed = source, options, vocab_needed
        self.key = (seed, name, "blanks")

    def source_of(self, n: int) -> str:
        """Return the token file that sample n comes from, or an empty string if there is only one file."""
        return self.source.source_of(n) if isinstance(self.source, Blend) else ""

    def sample(self, n: int) -> dict[str, Integers]:
        """Return tokens, labels, loss_mask, positions and segments (0: source, 1: spans, 2: padding), all [seq].

        If the model has an embedding of second positions, `token_types` [seq] holds these.
        """
        options = self.options
        piece = self.source.sample(n)
        assert isinstance(piece, DocumentChunk)
        # The order of the draws is part of the data format: changing it changes every sample.
        random = keyed_uniform(3 + 3 * options.most_spans, *self.key, n)
        mask, gmask, sop, eop, pad = options.specials
        count = len(piece.tokens)
        whole = random[0] >= options.short or count < 2 or piece.answer >= 0
        last = (piece.answer, count) if piece.answer >= 0 else _end(count, options.least, random[1])
        spans = [last] if whole else _short_spans(count, options, random[3:])
        ids: list[int] = []
        mask_positions: list[int] = []
        at = 0
        for begin, end in spans:
            ids += [*piece.tokens[at:begin].tolist(), gmask if whole else mask]
            mask_positions.append(len(ids) - 1)
            at = end
        ids += piece.tokens[at:].tolist()

        source = len(ids)
        positions = list(range(source))
        labels = [pad] * source
        inner = [0] * source
        order = np.argsort(random[3 + 2 * options.most_spans :][: len(spans)], kind="stable")
        for number in order.tolist():
            tokens = piece.tokens[slice(*spans[number])].tolist()
            ids += [sop, *tokens]
            labels += [*tokens, eop]
            positions += [mask_positions[number] + (1 + i if whole else 0) for i in range(len(tokens) + 1)]
            inner += range(1, len(tokens) + 2)
        return self._pad_sample(ids, labels, positions, inner, source, pad)

    def _pad_sample(
        self, ids: list[int], labels: list[int], positions: list[int], inner: list[int], source: int, pad: int
    ) -> dict[str, Integers]:
        """Return the sample's arrays, padded to the sequence length. The first `source` tokens are the source."""
        seq = self.options.seq
        used = len(ids)
        at = np.arange(self.options.seq)
        assert used <= seq

        def padded(values: list[int], padding: int) -> Integers:
            return np.array([*values, *[padding] * (seq - used)], np.int64)

        sample = {
            "tokens": padded(ids, pad), "labels": padded(labels, pad),
            "loss_mask": ((at >= source) & (at < used)).astype(np.int64), "positions": padded(positions, 0),
            "segments": np.where(at < source, SOURCE, np.where(at < used, SPANS, PADDING)).astype(np.int64),
        }  # fmt: skip
        return sample | ({"token_types": padded(inner, 0)} if self.options.inner else {})


def _end(count: int, least: float, random: float) -> tuple[int, int]:
    """Return the span [begin, end) of a text's end that is to be filled in: between `least` and all of the text."""
    length = max(1, round(count * (least + (1.0 - least) * random)))
    return count - length, count


def _short_spans(count: int, options: BlankOptions, random: NDArray[np.float64]) -> list[tuple[int, int]]:
    """Return random spans [begin, end) that together hold `options.share` of `count` tokens, ascending.

    Their lengths follow a Poisson distribution but are at least 1, and the last span gets the rest. Two spans are never
    adjacent if the text has room to separate them.
    """
    wanted = max(1, round(options.share * count))
    lengths: list[int] = []
    for draw in random[: options.most_spans]:
        left = wanted - sum(lengths)
        if left <= 0:
            break
        last = len(lengths) == options.most_spans - 1
        lengths.append(left if last else min(left, max(1, _poisson(options.mean, draw))))

    # gaps[i] is the number of tokens outside all spans that precede span i. To keep spans apart, one token is reserved
    # between neighbours: the gaps are drawn without these tokens, which are then added back.
    free = count - wanted
    cuts = np.sort(random[options.most_spans : options.most_spans + len(lengths)])
    apart = free >= len(lengths)
    gaps = np.floor(cuts * (free - (len(lengths) - 1) + 1 if apart else free + 1)).astype(np.int64)
    gaps += np.arange(len(lengths)) if apart else 0
    before = np.cumsum([0, *lengths])
    starts = [int(gap + done) for gap, done in zip(gaps, before[:-1], strict=True)]
    return [(start, start + length) for start, length in zip(starts, lengths, strict=True)]


def _poisson(mean: float, random: float) -> int:
    """Return the quantile `random`, in [0, 1), of a Poisson distribution with this mean."""
    total = term = math.exp(-mean)
    number = 0
    # The bound ends the loop where rounding keeps the cumulative sum below `random`.
    while random >= total and number < 10 * mean + 20:
        number += 1
        term *= mean / number
        total += term
    return number
