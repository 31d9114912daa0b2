"""Samples with masked tokens, for encoders: [CLS] A [SEP] B [SEP] from one piece of a document, padded to the sequence.

A document is cut into pieces of about equal length that fit a sample (its last token, which ends it, is left out). A
piece is cut once more into A and B, between two sentences where the token file knows them, and with even odds the two
are swapped: whether they were is what a pooled encoder learns. Everything is a pure function of the seed and the
sample's number, and drawn from Philox, whose raw output is fixed by its definition.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.data.blend import Blend, Numbered
from meshwright.data.dataset import EPOCHS_KEPT, TooSmall, document_table, drawn_documents, keyed_permutation
from meshwright.data.token_file import TokenFile
from meshwright.data.word_parts import WordParts

MASKED, OTHER = 0.8, 0.9  # below the first a chosen token is masked, below the second it becomes another one


def keyed_uniform(count: int, *key: int | str) -> NDArray[np.float64]:
    """Draws `count` numbers in [0, 1) from `key` alone, the same on any machine."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=16).digest()
    raw: NDArray[np.uint64] = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count)
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Piece(NamedTuple):
    """Tokens of one document, and where sentences begin among them, if that is known; of an instruction, where its
    answer begins."""

    tokens: NDArray[np.int64]
    sentences: NDArray[np.int64]
    answer: int = -1


class DocumentPieces:
    """Cuts documents [documents[0], documents[1]) of a token file into pieces of at most `most` tokens; an epoch is
    every piece once, in an order drawn from (seed, epoch). `stream` keeps datasets with the same seed apart; `drawn`
    takes as many documents from all over the file."""

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
            raise TooSmall(f"documents {documents[0]} to {documents[1]} of {file.prefix} hold no text: use more data")
        self._order = lru_cache(EPOCHS_KEPT)(self._draw)

    def _draw(self, epoch: int) -> NDArray[np.unsignedinteger[Any]]:
        return keyed_permutation(self.epoch_samples, self.seed, self.stream, "pieces", epoch)

    def own_labels(self, n: int) -> int:
        """Returns how many labels of sample n belong to its epoch: all of them, and samples may have more than a piece
        has tokens."""
        return 2 * self.seq

    def sample(self, n: int) -> Piece:
        epoch, at = divmod(n, self.epoch_samples)
        number = int(self._order(epoch)[at])
        document = int(np.searchsorted(self._ends, number, side="right"))
        first = int(self._ends[document - 1]) if document else 0
        length, count = int(self._lengths[document]) - 1, int(self._ends[document]) - first
        low, high = ((number - first + side) * length // count for side in (0, 1))
        begin = int(self._pointers[document]) // self.file.dtype.itemsize
        tokens = self.file.tokens[begin + low : begin + high].astype(np.int64)
        sentences = self._sentences(int(self._numbers[document]))
        return Piece(tokens, sentences[(sentences > low) & (sentences < high)] - low)

    def _sentences(self, document: int) -> NDArray[np.int64]:
        """Returns where the second and later sequences of a document begin: files that keep sentences hold each as a
        sequence."""
        first, end = (int(x) for x in self.file.document_indices[document : document + 2])
        return np.cumsum(self.file.sizes[first : end - 1], dtype=np.int64)


@dataclass(frozen=True)
class Masking:
    """How samples are made. `specials` are the ids of [CLS], [SEP], [MASK] and [PAD]; `vocab` ids may stand in for a
    token; `words` says which tokens are parts of one word, None: each is one of its own."""

    predictions: int
    share: float
    ngrams: int
    specials: tuple[int, ...]
    vocab: int
    words: WordParts | None = None
    pairs: bool = True

    @property
    def added(self) -> int:
        """The special tokens of a sample."""
        return 3 if self.pairs else 2


class MaskedStream:
    """The samples of one part of the data. Sample n, and so every batch, is a pure function of the seed and n."""

    def __init__(
        self, source: Numbered, seq: int, masking: Masking, seed: int, name: str, vocab_needed: int | None
    ) -> None:
        self.source, self.seq, self.masking, self.vocab_needed = source, seq, masking, vocab_needed
        self.key = (seed, name, "masked")

    def source_of(self, n: int) -> str:
        """Returns which of several token files sample n comes from; an empty word if there is one."""
        return self.source.source_of(n) if isinstance(self.source, Blend) else ""

    def sample(self, n: int) -> dict[str, NDArray[np.int64]]:
        """Returns tokens, token_types and segments (1: padding) [seq]; places, labels and loss_mask [predictions] of
        the masked tokens; and swapped, 0 or 1."""
        piece: Piece = self.source.sample(n)
        m, random = self.masking, keyed_uniform(2 + 4 * self.seq, *self.key, n)
        cls, sep, mask, pad = m.specials
        tokens, swapped = piece.tokens, 0
        parts = [tokens]
        if m.pairs:
            swapped = int(random[0] < 0.5 and len(tokens) > 1)
            parts = np.split(tokens, [_pivot(piece, random[1])])[:: -1 if swapped else 1]
        ids = np.full(self.seq, pad, np.int64)
        types = np.zeros(self.seq, np.int64)
        at = 1
        ids[0] = cls
        body = np.zeros(self.seq, bool)
        for number, part in enumerate(parts):
            end = at + len(part)
            ids[at:end], ids[end], body[at:end] = part, sep, True
            types[at : end + 1] = number
            at = end + 1
        draws = random[2:].reshape(4, self.seq)
        chosen = choose(ids, body, m, draws[0], draws[1])
        labels = ids[chosen]
        other = (draws[2, : len(chosen)] * m.vocab).astype(np.int64)
        how = draws[3, : len(chosen)]
        ids[chosen] = np.where(how < MASKED, mask, np.where(how < OTHER, other, labels))
        counted = np.arange(m.predictions) < len(chosen)
        found = {"tokens": ids, "token_types": types, "segments": (np.arange(self.seq) >= at).astype(np.int64)}
        for name, values in (("places", chosen), ("labels", labels)):
            found[name] = np.zeros(m.predictions, np.int64)
            found[name][: len(chosen)] = values
        found["loss_mask"] = counted.astype(np.int64)
        return found | ({"swapped": np.asarray(swapped, np.int64)} if m.pairs else {})


def _pivot(piece: Piece, random: float) -> int:
    """Returns where the second segment begins: at a sentence where those are known, else in the middle half."""
    count = len(piece.tokens)
    if len(piece.sentences):
        return int(piece.sentences[int(random * len(piece.sentences))])
    return min(max(1, round(count * (0.25 + 0.5 * random))), max(1, count - 1))


def choose(
    ids: NDArray[np.int64],
    body: NDArray[np.bool_],
    m: Masking,
    order: NDArray[np.float64],
    lengths: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Returns the places that are masked, ascending: words in the order of the random numbers `order`, each with some
    that follow it if there are n-grams, until the share is reached. What would go beyond it is made shorter, and what
    meets a masked word is left out. As in BERT's and Megatron's code, the share is of all of a sample's tokens, special
    ones included."""
    here = np.flatnonzero(body)
    left = min(m.predictions, len(here), max(1, round(m.share * (len(here) + m.added))))
    if not left:
        return here[:0]
    begins = np.ones(len(here), bool)
    if m.words is not None:
        begins[1:] = (np.diff(here) > 1) | ~m.words.joined(ids[here[:-1]], ids[here[1:]])
    starts = np.append(np.flatnonzero(begins), len(here))
    words = len(starts) - 1
    ranked = np.argsort(order[:words], kind="stable")
    if words == len(here) and m.ngrams == 1:
        return np.sort(here[ranked[:left]])
    odds = np.cumsum(1.0 / np.arange(1, m.ngrams + 1))
    grams = np.searchsorted(odds / odds[-1], lengths[:words], side="right") + 1
    taken = np.zeros(len(here), bool)
    for word in ranked.tolist():
        for count in range(min(int(grams[word]), words - word), 0, -1):
            low, high = int(starts[word]), int(starts[word + count])
            if high - low <= left:
                if not taken[low:high].any():
                    taken[low:high] = True
                    left -= high - low
                break
        if not left:
            break
    if not taken.any():  # every word is longer than all that may be masked
        low = int(starts[ranked[0]])
        taken[low : low + left] = True
    return here[taken]
