"""Masked and span samples equal those of megatron-core's dataset code, sample by sample.

Both get the same random numbers: megatron-core's generator is replaced by one that returns ours. The package runs on a
CPU after `pip install --no-deps megatron-core`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, MutableSequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meshwright.data.masked import DocumentPieces, MaskedStream, Masking, keyed_uniform
from meshwright.data.span_lengths import span_lengths, tokens_for
from meshwright.data.spans import SpanOptions, SpanStream, noise_mask
from meshwright.data.stream import build_datasets
from meshwright.data.word_parts import word_parts
from tests.support.token_files import write_documents, write_sequences

bert = pytest.importorskip("megatron.core.datasets.bert_dataset", reason="pip install --no-deps megatron-core")
t5 = pytest.importorskip("megatron.core.datasets.t5_dataset")

SAMPLES, SEED = 1000, 11
PIECES = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", *(f"{'##' if n % 3 == 0 else ''}w{n}" for n in range(4, 300))]
PAD, CLS, SEP, MASK = range(4)
# The end token of documents in our files. It is not part of a sample.
END = 300
SEQ = 64


class Draws:
    """A stand-in for numpy's RandomState in `__getitem__` of a masked sample.

    `uniform` are the numbers that our stream draws for the sample. megatron-core masks tokens in the order in which it
    chooses them, and we mask them in the order of the text. `places` therefore maps the n-th chosen token to its rank
    in the order of the text, which selects its random numbers. Without `places`, the n-th chosen token is replaced by
    token n, which reveals the order of choice.
    """

    def __init__(self, uniform: np.ndarray, places: list[int] | None) -> None:
        self.ends, self.places = uniform[:2], places
        self.order, self.lengths, self.other, self.how = uniform[2:].reshape(4, -1)
        self.word = self.token = self.shuffled = -1
        self.ranked: list[int] = []

    def randint(self, low: int, high: int) -> int:
        # The first call draws where the second segment begins.
        if not self.ranked:
            return low + int(self.ends[1] * (high - low))
        return self.token if self.places is None else int(self.other[self.places[self.token]] * high)

    def random(self) -> float:
        if not self.ranked:
            return float(self.ends[0])
        if self.shuffled == 0:
            # The first number of a token decides whether it is masked.
            self.shuffled, self.token = 1, self.token + 1
        else:
            # The second number of a token that is not masked decides whether it is changed or stays.
            self.shuffled = 0
            return float(self.places is None or self.how[self.places[self.token]] < 0.9)
        value = 0.85 if self.places is None else float(self.how[self.places[self.token]])
        if value < 0.8:
            self.shuffled = 0
        return value

    def shuffle(self, candidates: MutableSequence[Any]) -> None:
        if not self.ranked:
            self.ranked, self.shuffled = np.argsort(self.order[: len(candidates)], kind="stable").tolist(), 0
            candidates[:] = [candidates[n] for n in self.ranked]

    def choice(self, values: np.ndarray, p: np.ndarray) -> int:
        self.word += 1
        return int(values[np.searchsorted(np.cumsum(p), self.lengths[self.ranked[self.word]], side="right")])


def megatron(kind: type, documents: list[list[list[int]]], target: int, **config: Any) -> Any:
    """Return a megatron-core dataset in which each document, a list of sentences, is one sample.

    The builder, which would shuffle the documents, is bypassed.
    """
    dataset = object.__new__(kind)
    flat = [sentence for document in documents for sentence in document]
    ends = np.cumsum([len(document) for document in documents])
    dataset.dataset = flat
    dataset.sample_index = [(end - len(d), end, target) for d, end in zip(documents, ends.tolist(), strict=True)]
    tokenizer = SimpleNamespace(
        cls=CLS, sep=SEP, mask=MASK, pad=PAD, inv_vocab=dict(enumerate(PIECES)), **config.pop("tokenizer", {})
    )
    defaults = {"masking_use_longer_ngrams": False, "masking_do_permutation": False, "random_seed": SEED}
    dataset.config = SimpleNamespace(tokenizer=tokenizer, **{**defaults, **config})
    dataset._pad_token_id, dataset.token_lookup = PAD, list(tokenizer.inv_vocab)
    return dataset


def given(monkeypatch: pytest.MonkeyPatch, dataset: Any, n: int, make: Callable[[], Any]) -> dict[str, Any]:
    """Return sample n of a megatron-core dataset, with the random generator replaced by `make()`."""
    with monkeypatch.context() as patch:
        patch.setattr(np.random, "RandomState", lambda seed: make())
        sample: dict[str, Any] = dataset[n]
    return sample


def documents_of_sentences() -> list[list[list[int]]]:
    """Draw documents of 2 to 8 sentences that fit into a sample. A sentence begins with the start of a word."""
    draw = random.Random(3)
    words = [n for n, piece in enumerate(PIECES) if n > MASK and not piece.startswith("##")]
    documents: list[list[list[int]]] = []
    while len(documents) < SAMPLES:
        document = [
            [draw.choice(words), *(draw.randrange(4, len(PIECES)) for _ in range(draw.randrange(14)))]
            for _ in range(draw.randrange(2, 9))
        ]
        if sum(map(len, document)) <= SEQ - 3:
            documents.append(document)
    return documents


@pytest.mark.parametrize("whole, ngrams, share", [(True, 3, 0.15), (False, 1, 0.15), (True, 1, 0.4)])
def test_masked_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool, ngrams: int, share: float
) -> None:
    documents = documents_of_sentences()
    write_sequences(tmp_path / "a", [[*d[:-1], [*d[-1], END]] for d in documents], np.uint16)
    words = word_parts(PIECES) if whole else None
    masking = Masking(int(share * (SEQ - 3)), share, ngrams, (CLS, SEP, MASK, PAD), len(PIECES), words)
    stream = build_datasets([str(tmp_path / "a")], None, (1.0, 0.0, 0.0), SEQ, SEED, masking=masking)[0]
    assert isinstance(stream, MaskedStream) and isinstance(stream.source, DocumentPieces)
    theirs = megatron(
        bert.BERTMaskedWordPieceDataset, documents, SEQ - 3, sequence_length=SEQ, classification_head=True,
        masking_probability=share, masking_max_ngram=ngrams, masking_do_full_word=whole,
        masking_use_geometric_distribution=False,
    )  # fmt: skip
    order = stream.source._order(0).tolist()
    assert sorted(order) == list(range(SAMPLES))
    for n, document in enumerate(order):
        uniform = keyed_uniform(2 + 4 * SEQ, *stream.key, n)
        first = given(monkeypatch, theirs, document, partial(Draws, uniform, None))
        chosen = np.argsort(first["text"][first["loss_mask"] > 0]).tolist()
        sample = given(monkeypatch, theirs, document, partial(Draws, uniform, chosen))
        ours = stream.sample(n)
        count = int(ours["loss_mask"].sum())
        where = ours["places"][:count]
        assert where.tolist() == np.flatnonzero(sample["loss_mask"]).tolist(), n
        assert ours["labels"][:count].tolist() == sample["labels"][where].tolist()
        assert ours["tokens"].tolist() == sample["text"].tolist()
        assert ours["token_types"].tolist() == sample["types"].tolist()
        # megatron-core treats a token that was replaced by [PAD] at random as padding.
        seen = (ours["segments"] == 0) & (ours["tokens"] != PAD)
        assert seen.astype(int).tolist() == sample["padding_mask"].tolist()
        assert int(ours["swapped"]) == sample["is_random"] and not sample["truncated"]


class Spans:
    """A stand-in for the generator in `__getitem__` of a span sample.

    It chooses our spans, in their order and with their lengths, so that the test compares the samples made of them.
    """

    def __init__(self, taken: np.ndarray) -> None:
        edges = np.flatnonzero(np.diff(np.concatenate(([0], taken.astype(int), [0]))))
        self.starts, self.lengths = edges[::2].tolist(), (edges[1::2] - edges[::2]).tolist()

    def shuffle(self, candidates: MutableSequence[Any]) -> None:
        if self.starts:
            candidates[:] = [candidates[n] for n in self.starts]
            self.starts = []

    def geometric(self, p: float) -> int:
        return int(self.lengths.pop(0))


@pytest.mark.parametrize("seq, share, mean", [(64, 0.15, 3.0), (64, 0.3, 5.0)])
def test_span_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seq: int, share: float, mean: float) -> None:
    tokens, bos, eos, sentinel = tokens_for(seq, share, mean), 1, 2, 1000
    decoder = span_lengths(tokens, share, mean)[1] + 3
    draw = random.Random(5)
    write_documents(tmp_path / "a", [[draw.randrange(4, len(PIECES)) for _ in range(SAMPLES * tokens + 1)]])
    options = SpanOptions(seq, decoder, share, mean, sentinel, bos, eos)
    stream = build_datasets([str(tmp_path / "a")], None, (1.0, 0.0, 0.0), seq, SEED, spans=options)[0]
    assert isinstance(stream, SpanStream) and stream.source.epoch_samples >= SAMPLES
    masks = [noise_mask(tokens, share, mean, keyed_uniform(2 * tokens, *stream.key, n)) for n in range(SAMPLES)]
    theirs = megatron(
        t5.T5MaskedWordPieceDataset, [[stream.texts.sample(n)[:tokens].tolist()] for n in range(SAMPLES)], 2 * tokens,
        tokenizer={"bos": bos, "eos": eos, "additional_special_tokens_ids": list(range(sentinel, sentinel - 99, -1))},
        sequence_length=2 * tokens, sequence_length_encoder=seq, sequence_length_decoder=decoder,
        masking_probability=share, masking_max_ngram=max(max(Spans(mask).lengths) for mask in masks),
        masking_do_full_word=False, masking_use_geometric_distribution=True,
    )  # fmt: skip
    for n, taken in enumerate(masks):
        sample = given(monkeypatch, theirs, n, partial(Spans, taken))
        ours, count = stream.sample(n), int(sample["loss_mask"].sum())
        assert ours["loss_mask"].tolist() == sample["loss_mask"].tolist()
        # Our input ends with the end token, as in T5's own code.
        assert ours["tokens"].tolist() == [*sample["text_enc"][: seq - 1].tolist(), eos]
        assert ours["decoder_tokens"][:count].tolist() == sample["text_dec"][:count].tolist()
        assert ours["labels"][:count].tolist() == sample["labels"][:count].tolist()
