"""Samples for encoder-decoders: of a piece of text, spans are taken out. The encoder's input is what is left, with a
sentinel in the place of each span; the target is each sentinel with its span. Both end with the end token.

How many tokens and spans are taken out follows from the length alone (`span_lengths.py`), as T5 has it; where they lie
is a pure function of the seed and the sample's number, drawn from Philox, whose raw output is fixed by its definition.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.data.blend import Blend, Numbered
from meshwright.data.masked import keyed_uniform
from meshwright.data.span_lengths import noise_counts, span_lengths, tokens_for


@dataclass(frozen=True)
class SpanOptions:
    """How samples are made: the lengths of both sequences, the share of the tokens that is taken out, the mean length
    of a span, the first sentinel, below which the others follow, and the tokens that begin and end a target."""

    seq: int
    decoder_seq: int
    share: float
    mean: float
    sentinel: int
    start: int
    eod: int

    @property
    def tokens(self) -> int:
        """The tokens of the text that a sample is made of."""
        return tokens_for(self.seq, self.share, self.mean)

    @property
    def spans(self) -> int:
        return noise_counts(self.tokens, self.share, self.mean)[1]

    @property
    def last_sentinel(self) -> int:
        return self.sentinel - self.spans + 1


class SpanStream:
    """The samples of one part of the data. Sample n, and so every batch, is a pure function of the seed and n. `source`
    has texts of `options.tokens` tokens (and one more, which belongs to the next)."""

    def __init__(
        self, source: Numbered, options: SpanOptions, seed: int, name: str, vocab_needed: int | None = None
    ) -> None:
        self.texts, self.options, self.vocab_needed = source, options, vocab_needed
        self.source = WholeTexts(source)
        self.key = (seed, name, "spans")

    def source_of(self, n: int) -> str:
        """Returns which of several token files sample n comes from; an empty word if there is one."""
        return self.texts.source_of(n) if isinstance(self.texts, Blend) else ""

    def sample(self, n: int) -> dict[str, NDArray[np.int64]]:
        """Returns tokens [seq], decoder_tokens, labels and loss_mask [decoder_seq]."""
        o, text = self.options, self.texts.sample(n)[: self.options.tokens]
        taken = noise_mask(len(text), o.share, o.mean, keyed_uniform(2 * len(text), *self.key, n))
        inputs = with_sentinels(text, taken, o.sentinel, o.eod)
        target = with_sentinels(text, ~taken, o.sentinel, o.eod)
        assert len(inputs) == o.seq and (len(inputs), len(target)) == span_lengths(len(text), o.share, o.mean)
        labels = np.full(o.decoder_seq, o.eod, np.int64)
        labels[: len(target)] = target
        counted = np.arange(o.decoder_seq) < len(target)
        return {
            "tokens": inputs, "decoder_tokens": np.append(o.start, labels[:-1]), "labels": labels,
            "loss_mask": counted.astype(np.int64),
        }  # fmt: skip


class WholeTexts:
    """The texts of a source as `OneEpoch` counts them: those that go on into the next epoch are left out."""

    def __init__(self, source: Numbered) -> None:
        self.texts, self.seq, self.epoch_samples = source, source.seq, source.epoch_samples

    def own_labels(self, n: int) -> int:
        own = self.texts.own_labels(n)
        return own if own == self.seq else 0


def noise_mask(count: int, share: float, mean: float, random: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Returns which of `count` tokens are taken out: spans of what stays and of what goes in turn, beginning with what
    stays, each sort cut at random places."""
    noise, spans = noise_counts(count, share, mean)
    stay = _cut(count - noise, spans, random[:count])
    go = _cut(noise, spans, random[count:])
    lengths = np.stack((stay, go), 1).reshape(-1)
    return np.repeat(np.arange(2 * spans) % 2 == 1, lengths)


def _cut(items: int, parts: int, random: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns the lengths of `parts` parts of at least one item each; all ways to cut are as likely."""
    places = np.sort(np.argsort(random[: items - 1], kind="stable")[: parts - 1]) + 1
    return np.diff(np.concatenate(([0], places, [items]))).astype(np.int64)


def with_sentinels(text: NDArray[np.int64], taken: NDArray[np.bool_], sentinel: int, eod: int) -> NDArray[np.int64]:
    """Returns a text with a sentinel in the place of each run of taken tokens, and the end token. The runs of what was
    taken and of what was left alternate, so that the same sentinels stand in the target, each before its span."""
    begins = taken & ~np.concatenate(([False], taken[:-1]))
    numbered = np.where(begins, sentinel + 1 - np.cumsum(begins), text)
    return np.append(numbered[~taken | begins], eod)
