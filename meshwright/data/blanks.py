"""Samples with blanks to fill in: a source in which special tokens stand for spans of the text, and then these spans.

The source is seen as a whole; a span is read from its beginning, after the source and the spans before it. [MASK]
stands for each of several short spans, which follow in an order of their own; [gMASK] stands for the end of the text,
or for the answer to an instruction (`instructions.py`).
A span is [sop] and its tokens, and what is learned is its tokens and [eop]. A token has two positions: its place in the
source, which all tokens of a [MASK]'s span share with it and those of a [gMASK]'s count on from it, and its place in
its span, 0 in the source. Everything is a pure function of the seed and the sample's number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshwright.data.blend import Blend, Numbered
from meshwright.data.masked import Piece, keyed_uniform

Integers = NDArray[np.int64]
SOURCE, SPANS, PADDING = 0, 1, 2  # the segments of a sample


@dataclass(frozen=True)
class BlankOptions:
    """How samples are made. `specials` are the ids of [MASK], [gMASK], [sop], [eop] and [pad]."""

    seq: int
    short: float
    share: float
    mean: float
    least: float
    specials: tuple[int, ...]
    inner: bool = False  # whether samples have the second position, as `token_types`
    instructions: tuple[str, ...] = ()  # files of conversations whose answers are filled in
    instruction_share: float = 0.0  # of the samples that are such answers

    @cached_property
    def most_spans(self) -> int:
        """The most short spans of a sample: as many as have the mean length, and one."""
        return math.ceil(self.share * self.seq / self.mean) + 1

    @property
    def added(self) -> int:
        """The special tokens of a sample with the most spans: for each its mask, and [sop]."""
        return 2 * self.most_spans


class BlankStream:
    """The samples of one part of the data. Sample n, and so every batch, is a pure function of the seed and n."""

    def __init__(self, source: Numbered, options: BlankOptions, seed: int, name: str, vocab_needed: int | None) -> None:
        self.source, self.options, self.vocab_needed = source, options, vocab_needed
        self.key = (seed, name, "blanks")

    def source_of(self, n: int) -> str:
        """Returns which of several token files sample n comes from; an empty word if there is one."""
        return self.source.source_of(n) if isinstance(self.source, Blend) else ""

    def sample(self, n: int) -> dict[str, Integers]:
        """Returns tokens, labels, loss_mask, positions and segments (0: source, 1: spans, 2: padding), all [seq], and
        token_types, the second position, if the model has a table of them."""
        o, piece = self.options, self.source.sample(n)
        assert isinstance(piece, Piece)
        random = keyed_uniform(3 + 3 * o.most_spans, *self.key, n)
        mask, gmask, sop, eop, pad = o.specials
        count = len(piece.tokens)
        whole = random[0] >= o.short or count < 2 or piece.answer >= 0
        last = (piece.answer, count) if piece.answer >= 0 else _end(count, o.least, random[1])
        spans = [last] if whole else _short_spans(count, o, random[3:])
        ids: list[int] = []
        places, at = [], 0  # of the masks in the source
        for begin, end in spans:
            ids += [*piece.tokens[at:begin].tolist(), gmask if whole else mask]
            places.append(len(ids) - 1)
            at = end
        ids += piece.tokens[at:].tolist()
        source = len(ids)
        positions, labels = list(range(source)), [pad] * source
        inner = [0] * source
        order = np.argsort(random[3 + 2 * o.most_spans :][: len(spans)], kind="stable")
        for number in order.tolist():
            tokens = piece.tokens[slice(*spans[number])].tolist()
            ids += [sop, *tokens]
            labels += [*tokens, eop]
            positions += [places[number] + (1 + i if whole else 0) for i in range(len(tokens) + 1)]
            inner += range(1, len(tokens) + 2)
        return self._padded(ids, labels, positions, inner, source, pad)

    def _padded(
        self, ids: list[int], labels: list[int], positions: list[int], inner: list[int], source: int, pad: int
    ) -> dict[str, Integers]:
        seq, used, at = self.options.seq, len(ids), np.arange(self.options.seq)
        assert used <= seq

        def filled(values: list[int], rest: int) -> Integers:
            return np.array([*values, *[rest] * (seq - used)], np.int64)

        found = {
            "tokens": filled(ids, pad), "labels": filled(labels, pad),
            "loss_mask": ((at >= source) & (at < used)).astype(np.int64), "positions": filled(positions, 0),
            "segments": np.where(at < source, SOURCE, np.where(at < used, SPANS, PADDING)).astype(np.int64),
        }  # fmt: skip
        return found | ({"token_types": filled(inner, 0)} if self.options.inner else {})


def _end(count: int, least: float, random: float) -> tuple[int, int]:
    """Returns the end of a text that is to be filled in: a share of it between `least` and all."""
    length = max(1, round(count * (least + (1.0 - least) * random)))
    return count - length, count


def _short_spans(count: int, o: BlankOptions, random: NDArray[np.float64]) -> list[tuple[int, int]]:
    """Returns spans whose lengths follow Poisson's law, at least 1, until they hold the share of `count` tokens (the
    last one is cut), anywhere but next to each other where the text has room."""
    wanted = max(1, round(o.share * count))
    lengths: list[int] = []
    for draw in random[: o.most_spans]:
        left = wanted - sum(lengths)
        if left <= 0:
            break
        last = len(lengths) == o.most_spans - 1
        lengths.append(left if last else min(left, max(1, _poisson(o.mean, draw))))
    free = count - wanted
    cuts = np.sort(random[o.most_spans : o.most_spans + len(lengths)])
    apart = free >= len(lengths)  # one token stays between two spans
    gaps = np.floor(cuts * (free - (len(lengths) - 1) + 1 if apart else free + 1)).astype(np.int64)
    gaps += np.arange(len(lengths)) if apart else 0
    before = np.cumsum([0, *lengths])
    starts = [int(gap + done) for gap, done in zip(gaps, before[:-1], strict=True)]
    return [(start, start + length) for start, length in zip(starts, lengths, strict=True)]


def _poisson(mean: float, random: float) -> int:
    """Returns the number whose share of Poisson's law below it is `random`."""
    total = term = math.exp(-mean)
    found = 0
    while random >= total and found < 10 * mean + 20:
        found += 1
        term *= mean / found
        total += term
    return found
