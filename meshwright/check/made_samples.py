"""Random samples for every objective, made without files, on which checks train.

Each sample is a pure function of its number. Samples differ in the number of tokens that count in the loss, so that a
wrong divisor shows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.config.sections import Config, ModelConfig
from meshwright.spec.model.description import data_fields


class MadeTokens:
    """Random token samples.

    `holes`: a different part of each sample is masked, so that no two ranks count equally many tokens. `blind`: samples
    with odd numbers are masked completely, so that a data-parallel rank may have no token to count. `segments`: each
    sample holds two documents.
    """

    def __init__(self, vocab: int, seq: int, holes: bool = True, segments: bool = False, blind: bool = False) -> None:
        self.vocab, self.seq, self.holes, self.segments, self.blind = vocab, seq, holes, segments, blind

    def sample(self, n: int) -> dict[str, np.ndarray[Any, Any]]:
        random = np.random.default_rng([7, n])
        ids = random.integers(0, self.vocab, self.seq + 1)
        mask = np.ones(self.seq, dtype=np.int64)
        if self.holes:
            mask[: 1 + n % (self.seq // 2)] = 0
        if self.blind and n % 2:
            mask[:] = 0
        out = {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": mask}
        if self.segments:
            cut = 1 + n % (self.seq - 1)
            at = np.arange(self.seq)
            out["segments"] = (at >= cut).astype(np.int64)
            out["positions"] = np.where(at >= cut, at - cut, at)
        return out


class MadeMasked:
    """Random samples with masked tokens for an encoder. Their padding and their number of masked tokens differ.

    `blind`: no token counts in samples with odd numbers.
    """

    def __init__(self, model: ModelConfig, blind: bool = False) -> None:
        self.model, self.blind = model, blind

    def sample(self, n: int) -> dict[str, np.ndarray[Any, Any]]:
        model = self.model
        random = np.random.default_rng([11, n])
        length = model.seq - 3 * (n % 3)
        at, count = np.arange(model.seq), 1 + n % model.predictions
        places = np.zeros(model.predictions, np.int64)
        places[:count] = np.sort(random.permutation(np.arange(1, length))[:count])
        mask = (np.arange(model.predictions) < count) & (not (self.blind and n % 2))
        fields = {
            "tokens": random.integers(0, model.vocab, model.seq),
            "labels": random.integers(0, model.vocab, model.predictions),
            "segments": (at >= length).astype(np.int64), "places": places, "loss_mask": mask.astype(np.int64),
        }  # fmt: skip
        fields["token_types"] = ((at > length // 2) & (at < length)).astype(np.int64)
        return fields | ({"swapped": np.asarray(random.integers(0, 2))} if model.pooler else {})


class MadeBlanks:
    """Random samples of a source text, the spans that fill its blanks, and padding."""

    def __init__(self, model: ModelConfig, blind: bool = False) -> None:
        self.model, self.blind = model, blind

    def sample(self, n: int) -> dict[str, np.ndarray[Any, Any]]:
        model = self.model
        random = np.random.default_rng([17, n])
        at = np.arange(model.seq)
        source = 3 + n % 7
        used = model.seq - n % 3
        later = (at >= source) & (at < used)
        fields = {
            "tokens": random.integers(0, model.vocab, model.seq), "labels": random.integers(0, model.vocab, model.seq),
            "loss_mask": (later & (not (self.blind and n % 2))).astype(np.int64),
            "positions": np.where(at < source, at, random.integers(0, source)),
            "segments": np.where(at < source, 0, np.where(at < used, 1, 2)),
        }  # fmt: skip
        return fields | ({"token_types": np.where(later, at - source + 1, 0)} if model.token_types else {})


class MadeSpans:
    """Random samples for an encoder-decoder. The number of tokens that count differs between samples."""

    def __init__(self, model: ModelConfig, blind: bool = False) -> None:
        self.model, self.blind = model, blind

    def sample(self, n: int) -> dict[str, np.ndarray[Any, Any]]:
        m = self.model
        random = np.random.default_rng([13, n])
        length = m.t5.decoder_seq
        labels = random.integers(0, m.vocab, length)
        mask = (np.arange(length) < length - n % 3) & (not (self.blind and n % 2))
        return {
            "tokens": random.integers(0, m.vocab, m.seq), "decoder_tokens": np.append(m.t5.start, labels[:-1]),
            "labels": labels, "loss_mask": mask.astype(np.int64),
        }  # fmt: skip


def made_for(config: Config, **made: Any) -> Any:
    """Return a dataset of random samples for a config's objective, with `made` as further arguments."""
    m = config.model
    if config.objective_facts.splits_documents:
        return MadeTokens(m.vocab, m.seq, **made)
    return {"masked": MadeMasked, "blanks": MadeBlanks, "spans": MadeSpans}[config.objective](m, **made)


class MadeAnswers:
    """Packed samples of answers of different lengths, with some padding: pairs of answers, or `judged` single ones."""

    def __init__(self, vocab: int, seq: int, judged: bool) -> None:
        self.vocab, self.seq, self.judged = vocab, seq, judged

    def sample(self, n: int) -> dict[str, np.ndarray[Any, Any]]:
        random = np.random.default_rng([5, n])
        names = ("tokens", "labels", "loss_mask", "segments", "positions")
        fields = {name: np.zeros(self.seq, np.int64) for name in names}
        begin, number = 0, 0
        for number in range(2 if n % 3 == 2 else 4):
            length = self.seq // 8 + (n + number) % 3
            ids = random.integers(0, self.vocab, length + 1)
            here = slice(begin, begin + length)
            fields["tokens"][here], fields["labels"][here] = ids[:-1], ids[1:]
            mark = 2 if self.judged and (n + number) % 2 else 1
            fields["loss_mask"][here] = np.where(np.arange(length) >= 1, mark, 0)
            fields["segments"][here], fields["positions"][here] = number, np.arange(length)
            begin += length
        # The rest of the sample is padding, a separate document whose tokens do not count.
        fields["segments"][begin:], fields["positions"][begin:] = number + 1, np.arange(self.seq - begin)
        return fields


class Fields:
    """A dataset reduced to the fields that a config's data have. A step sends no other fields."""

    def __init__(self, dataset: Any, config: Config) -> None:
        self.dataset = dataset
        self.names = set(data_fields(config))

    def sample(self, n: int) -> dict[str, np.ndarray[Any, Any]]:
        return {name: value for name, value in self.dataset.sample(n).items() if name in self.names}


class WithoutFirstDocument:
    """The samples of a dataset with the first document (or pair of answers) excluded from the loss.

    `changed`: the first document also has other tokens, which must not affect the loss of the others.
    """

    FIRST = 16  # From this sample on, the first document has some length.

    def __init__(self, dataset: Any, vocab: int, documents: int, changed: bool) -> None:
        self.dataset, self.vocab, self.documents, self.changed = dataset, vocab, documents, changed

    def sample(self, n: int) -> dict[str, np.ndarray[Any, Any]]:
        fields = dict(self.dataset.sample(n + self.FIRST))
        first = fields["segments"] < self.documents
        fields["loss_mask"] = np.where(first, 0, fields["loss_mask"])
        if self.changed:
            fields["tokens"] = np.where(first, (fields["tokens"] + 1 + n) % self.vocab, fields["tokens"])
        return fields


def samples_for(config: Config) -> Any:
    """Return a dataset of random samples with the fields, masks and documents of a config's data."""
    m = config.model
    if config.objective_facts.judges_answers:
        return Fields(MadeAnswers(m.vocab, m.seq, config.tune.judges_each), config)
    if config.objective_facts.splits_documents:
        return Fields(MadeTokens(m.vocab, m.seq, segments=True), config)
    return Fields(made_for(config), config)
