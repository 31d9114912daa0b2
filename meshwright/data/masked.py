"""Masked-token samples for encoders: [CLS] A [SEP] B [SEP] from one chunk of a document, padded to the sequence length.

A document is cut into chunks of about equal length that fit a sample; its last token, which ends it, is left out. A
chunk is cut once more into A and B, between two sentences if the token file records sentences. With probability 1/2
the two are swapped, and a pooled encoder learns to predict whether they were. Everything is a pure function of the seed
and the sample's number: it comes from Philox, whose raw output is fixed by its definition.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.data.blend import Blend, NumberedDataset
from meshwright.data.dataset import CACHED_EPOCHS, SplitTooSmall, document_table, drawn_documents, keyed_permutation
from meshwright.data.token_file import TokenFile
from meshwright.data.word_parts import WordParts

# As in BERT: of the chosen tokens 80 % become [MASK], 10 % become a random token, and 10 % stay as they are.
MASKED, OTHER = 0.8, 0.9


def keyed_uniform(count: int, *key: int | str) -> NDArray[np.float64]:
    """Return `count` random numbers in [0, 1) that `key` determines, the same on any machine."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=16).digest()
    raw: NDArray[np.uint64] = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count)
    # A float64 has 53 significant bits, so the low 11 of 64 are dropped.
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


class DocumentChunk(NamedTuple):
    """A chunk of one document's tokens."""

    tokens: NDArray[np.int64]
    sentences: NDArray[np.int64]  # where sentences after the first begin; empty if that is not known
    answer: int = -1  # where the answer to an instruction begins; -1 in plain text


class DocumentPieces:
    """A dataset that cuts documents [documents[0], documents[1]) of a token file into chunks of at most `most` tokens.

    An epoch contains every chunk once, shuffled by (seed, epoch). `stream` is a name that gives datasets with the same
    seed different orders. `drawn` takes the same number of documents from all over the file instead.
    """

    def __init__(
        self, file: TokenFile, most: int, seed: int, documents: tuple[int, int], stream: str = "", drawn: bool = False
    ) -> None:
        self.file, self.seq, self.seed, self.stream = file, most, seed, stream
        self._numbers: NDArray[Any] = np.arange(*documents)
        self._pointers, self._lengths = document_table(file, *documents)
        if drawn and (chosen := drawn_documents(file, *documents)) is not None:
            self._numbers = chosen
            self._pointers, self._lengths = (x[chosen] for x in document_table(file, 0, file.document_count))
        counts = np.maximum(1, -(-(self._lengths.astype(np.int64) - 1) // most))
        self._ends = np.cumsum(counts)
        self.epoch_samples = int(self._ends[-1]) if len(counts) else 0
        if int(self._lengths.sum(dtype=np.int64)) - len(counts) < 2:
            raise SplitTooSmall(
                f"documents {documents[0]} to {documents[1]} of {file.prefix} hold no text: use more data"
            )
        self._order = lru_cache(CACHED_EPOCHS)(self._draw)

    def _draw(self, epoch: int) -> NDArray[np.unsignedinteger[Any]]:
        return keyed_permutation(self.epoch_samples, self.seed, self.stream, "pieces", epoch)

    def own_labels(self, n: int) -> int:
        """Return the number of labels of sample n that belong to its epoch.

        All of them do. The number is an upper bound, since a sample may have more labels than its chunk has tokens.
        """
        return 2 * self.seq

    def sample(self, n: int) -> DocumentChunk:
        epoch, at = divmod(n, self.epoch_samples)
        number = int(self._order(epoch)[at])
        document = int(np.searchsorted(self._ends, number, side="right"))
        first = int(self._ends[document - 1]) if document else 0
        length = int(self._lengths[document]) - 1
        count = int(self._ends[document]) - first
        low, high = ((number - first + side) * length // count for side in (0, 1))
        begin = int(self._pointers[document]) // self.file.dtype.itemsize
        tokens = self.file.tokens[begin + low : begin + high].astype(np.int64)
        sentences = self._sentences(int(self._numbers[document]))
        return DocumentChunk(tokens, sentences[(sentences > low) & (sentences < high)] - low)

    def _sentences(self, document: int) -> NDArray[np.int64]:
        """Return the positions at which the second and later sequences of a document begin.

        A file that was prepared with sentences stores each of them as a sequence.
        """
        first, end = (int(x) for x in self.file.document_indices[document : document + 2])
        return np.cumsum(self.file.sizes[first : end - 1], dtype=np.int64)


@dataclass(frozen=True)
class Masking:
    """The settings of masked-token samples. `specials` are the ids of [CLS], [SEP], [MASK] and [PAD]."""

    predictions: int  # most tokens to predict in a sample
    share: float  # of a sample's tokens to predict
    ngrams: int  # most words that are masked together
    specials: tuple[int, ...]
    vocab: int  # a replacement for a token is one of the ids below this
    words: WordParts | None = None  # which tokens form one word; None: every token is a word
    pairs: bool = True  # samples have two segments, A and B

    @property
    def added_tokens(self) -> int:
        """The number of special tokens in a sample."""
        return 3 if self.pairs else 2


class MaskedStream:
    """The samples of one part of the data. Sample n, and so every batch, is a pure function of the seed and n."""

    def __init__(
        self, source: NumberedDataset, seq: int, masking: Masking, seed: int, name: str, vocab_needed: int | None
    ) -> None:
        self.source, self.seq, self.masking, self.vocab_needed = source, seq, masking, vocab_needed
        self.key = (seed, name, "masked")

    def source_of(self, n: int) -> str:
        """Return the token file that sample n comes from, or an empty string if there is only one file."""
        return self.source.source_of(n) if isinstance(self.source, Blend) else ""

    def sample(self, n: int) -> dict[str, NDArray[np.int64]]:
        """Return tokens, token_types and segments (1: padding) [seq], and the fields of the tokens to predict.

        Those fields are places, labels and loss_mask [predictions]. If samples have two segments, `swapped` is 0 or 1.
        """
        piece: DocumentChunk = self.source.sample(n)
        masking = self.masking
        random = keyed_uniform(2 + 4 * self.seq, *self.key, n)
        cls, sep, mask, pad = masking.specials
        tokens, swapped = piece.tokens, 0
        parts = [tokens]
        if masking.pairs:
            swapped = int(random[0] < 0.5 and len(tokens) > 1)
            parts = np.split(tokens, [_pivot(piece, random[1])])[:: -1 if swapped else 1]

        ids = np.full(self.seq, pad, np.int64)
        types = np.zeros(self.seq, np.int64)
        at = 1
        ids[0] = cls
        body = np.zeros(self.seq, bool)  # True where tokens of the text are
        for number, part in enumerate(parts):
            end = at + len(part)
            ids[at:end], ids[end], body[at:end] = part, sep, True
            types[at : end + 1] = number
            at = end + 1

        draws = random[2:].reshape(4, self.seq)
        chosen = choose(ids, body, masking, draws[0], draws[1])
        labels = ids[chosen]
        other = (draws[2, : len(chosen)] * masking.vocab).astype(np.int64)
        action = draws[3, : len(chosen)]
        ids[chosen] = np.where(action < MASKED, mask, np.where(action < OTHER, other, labels))

        counted = np.arange(masking.predictions) < len(chosen)
        sample = {"tokens": ids, "token_types": types, "segments": (np.arange(self.seq) >= at).astype(np.int64)}
        for name, values in (("places", chosen), ("labels", labels)):
            sample[name] = np.zeros(masking.predictions, np.int64)
            sample[name][: len(chosen)] = values
        sample["loss_mask"] = counted.astype(np.int64)
        return sample | ({"swapped": np.asarray(swapped, np.int64)} if masking.pairs else {})


def _pivot(piece: DocumentChunk, random: float) -> int:
    """Return the beginning of the second segment: at a sentence if sentences are known, else in the middle half."""
    count = len(piece.tokens)
    if len(piece.sentences):
        return int(piece.sentences[int(random * len(piece.sentences))])
    return min(max(1, round(count * (0.25 + 0.5 * random))), max(1, count - 1))


def choose(
    ids: NDArray[np.int64],
    body: NDArray[np.bool_],
    masking: Masking,
    order: NDArray[np.float64],
    lengths: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Return the positions of the tokens to predict, ascending.

    Whole words are chosen in the order of the random numbers `order`, until the share of tokens is reached. With
    n-grams, each word is chosen together with the words after it, in a number drawn from `lengths`. An n-gram that
    would exceed the share is made shorter, and one that overlaps a chosen word is skipped. As in BERT's and Megatron's
    code, the share is of all tokens of a sample, special ones included.
    """
    text_positions = np.flatnonzero(body)
    text_tokens = len(text_positions)
    left = min(masking.predictions, text_tokens, max(1, round(masking.share * (text_tokens + masking.added_tokens))))
    if not left:
        return text_positions[:0]

    begins = np.ones(text_tokens, bool)
    if masking.words is not None:
        same_word = masking.words.continues_word(ids[text_positions[:-1]], ids[text_positions[1:]])
        # Positions that are not neighbours have a special token between them, which ends a word.
        begins[1:] = (np.diff(text_positions) > 1) | ~same_word
    starts = np.append(np.flatnonzero(begins), text_tokens)
    words = len(starts) - 1
    ranked = np.argsort(order[:words], kind="stable")
    # Without n-grams and with one token per word, the loop below would choose the first tokens of the order.
    if words == text_tokens and masking.ngrams == 1:
        return np.sort(text_positions[ranked[:left]])

    # An n-gram of n words has probability proportional to 1 / n.
    odds = np.cumsum(1.0 / np.arange(1, masking.ngrams + 1))
    grams = np.searchsorted(odds / odds[-1], lengths[:words], side="right") + 1
    taken = np.zeros(text_tokens, bool)
    for word in ranked.tolist():
        for count in range(min(int(grams[word]), words - word), 0, -1):
            low = int(starts[word])
            high = int(starts[word + count])
            if high - low <= left:
                if not taken[low:high].any():
                    taken[low:high] = True
                    left -= high - low
                break
        if not left:
            break
    # If every word is longer than the number of tokens to predict, the beginning of one is chosen.
    if not taken.any():
        low = int(starts[ranked[0]])
        taken[low : low + left] = True
    return text_positions[taken]
