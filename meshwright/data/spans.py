"""Span-corruption samples for encoder-decoders, as in T5.

Some spans of each text are removed. The encoder's input is the remaining text, with a sentinel in the place of each
span. The target is each sentinel followed by its span. Both end with the end token.

The number of removed tokens and spans follows from the length alone (`span_lengths.py`). Their positions are a pure
function of the seed and the sample's number: they come from Philox, whose raw output is fixed by its definition.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.data.blend import Blend, NumberedDataset
from meshwright.data.masked import keyed_uniform
from meshwright.data.span_lengths import noise_counts, span_lengths, tokens_for


@dataclass(frozen=True)
class SpanOptions:
    """The settings of span corruption."""

    seq: int  # length of the encoder's sequence
    decoder_seq: int  # length of the decoder's sequence
    share: float  # of the tokens that is removed
    mean: float  # length of a span
    sentinel: int  # id of the first sentinel; the ids of the others descend from it
    start: int  # token that begins the decoder's input
    eod: int  # token that ends the input and the target

    @property
    def tokens(self) -> int:
        """The number of tokens of the text that a sample is made of."""
        return tokens_for(self.seq, self.share, self.mean)

    @property
    def spans(self) -> int:
        return noise_counts(self.tokens, self.share, self.mean)[1]

    @property
    def last_sentinel(self) -> int:
        return self.sentinel - self.spans + 1


class SpanStream:
    """The samples of one part of the data. Sample n, and so every batch, is a pure function of the seed and n.

    `source` provides texts of `options.tokens` tokens and one more, which belongs to the next text and is ignored.
    """

    def __init__(
        self, source: NumberedDataset, options: SpanOptions, seed: int, name: str, vocab_needed: int | None = None
    ) -> None:
        self.texts, self.options, self.vocab_needed = source, options, vocab_needed
        self.source = WholeTexts(source)
        self.key = (seed, name, "spans")

    def source_of(self, n: int) -> str:
        """Return the token file that sample n comes from, or an empty string if there is only one file."""
        return self.texts.source_of(n) if isinstance(self.texts, Blend) else ""

    def sample(self, n: int) -> dict[str, NDArray[np.int64]]:
        """Return tokens [seq], and decoder_tokens, labels and loss_mask [decoder_seq]."""
        options = self.options
        text = self.texts.sample(n)[: options.tokens]
        taken = noise_mask(len(text), options.share, options.mean, keyed_uniform(2 * len(text), *self.key, n))
        inputs = with_sentinels(text, taken, options.sentinel, options.eod)
        target = with_sentinels(text, ~taken, options.sentinel, options.eod)
        lengths = span_lengths(len(text), options.share, options.mean)
        assert len(inputs) == options.seq and (len(inputs), len(target)) == lengths
        labels = np.full(options.decoder_seq, options.eod, np.int64)
        labels[: len(target)] = target
        counted = np.arange(options.decoder_seq) < len(target)
        return {
            "tokens": inputs, "decoder_tokens": np.append(options.start, labels[:-1]), "labels": labels,
            "loss_mask": counted.astype(np.int64),
        }  # fmt: skip


class WholeTexts:
    """A view of a source that makes `FirstEpoch` leave out a text that reaches into the next epoch.

    Such a text can't be used in part, because its target does not follow the text token by token.
    """

    def __init__(self, source: NumberedDataset) -> None:
        self.texts, self.seq, self.epoch_samples = source, source.seq, source.epoch_samples

    def own_labels(self, n: int) -> int:
        own = self.texts.own_labels(n)
        return own if own == self.seq else 0


def noise_mask(count: int, share: float, mean: float, random: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return a mask [count] that is True for tokens to remove.

    Kept and removed spans alternate, starting with a kept one. Both kinds have random lengths.
    """
    noise, spans = noise_counts(count, share, mean)
    kept_lengths = _random_partition(count - noise, spans, random[:count])
    removed_lengths = _random_partition(noise, spans, random[count:])
    lengths = np.stack((kept_lengths, removed_lengths), 1).reshape(-1)
    return np.repeat(np.arange(2 * spans) % 2 == 1, lengths)


def _random_partition(items: int, parts: int, random: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the lengths of `parts` random parts of at least one item each; all ways to cut are equally likely."""
    places = np.sort(np.argsort(random[: items - 1], kind="stable")[: parts - 1]) + 1
    return np.diff(np.concatenate(([0], places, [items]))).astype(np.int64)


def with_sentinels(text: NDArray[np.int64], taken: NDArray[np.bool_], sentinel: int, eod: int) -> NDArray[np.int64]:
    """Return a text with a sentinel in place of each run of `taken` tokens, followed by the end token.

    With the inverted mask this is the target: removed and kept runs alternate, starting with a kept one, so each
    sentinel then precedes the span that it replaced in the input.
    """
    begins = taken & ~np.concatenate(([False], taken[:-1]))
    numbered = np.where(begins, sentinel + 1 - np.cumsum(begins), text)
    return np.append(numbered[~taken | begins], eod)
