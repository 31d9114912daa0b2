"""Build the token datasets of a config and check them before any rank starts. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meshwright.config.data import BLANK_SPECIALS, SPECIALS
from meshwright.config.sections import Config
from meshwright.data.blanks import BlankOptions
from meshwright.data.blend import Blend
from meshwright.data.masked import Masking
from meshwright.data.packed import CHAT, JUDGED, PAIRS, PackedStream, is_chat, packed_datasets
from meshwright.data.spans import SpanOptions
from meshwright.data.stream import SampleOptions, build_datasets
from meshwright.data.token_file import read_metadata
from meshwright.data.tokenizers import Tokenizer
from meshwright.data.word_parts import special_ids, word_parts
from meshwright.errors import UserError
from meshwright.record.companions import tokenizer_of_data

# Vocabularies are usually rounded up to a multiple of this, times the ranks that share them.
VOCAB_MULTIPLE = 128


class CheckedDataset:
    """A dataset that checks its token ids.

    An embedding sharded over tp silently returns zeros for an id outside the vocabulary.
    """

    def __init__(self, dataset: Any, vocab: int) -> None:
        self.dataset, self.vocab = dataset, vocab

    def sample(self, n: int) -> dict[str, np.ndarray[Any, Any]]:
        sample: dict[str, np.ndarray[Any, Any]] = self.dataset.sample(n)
        ids = [sample[name] for name in ("tokens", "decoder_tokens", "labels") if name in sample]
        least, top = min(int(x.min()) for x in ids), max(int(x.max()) for x in ids)
        if top >= self.vocab:
            raise UserError(
                f"the data hold token {top}, beyond model.vocab={self.vocab}: prepare them with the model's tokenizer, "
                f"or begin a run with model.vocab={top + 1} or more"
            )
        if least < 0:
            raise UserError(f"the data hold token {least}, and no token has a negative id: prepare them again")
        return sample

    def source_of(self, n: int) -> str:
        return str(self.dataset.source_of(n))

    @property
    def sources(self) -> dict[str, int]:
        """The number of samples per period that each file of a blend gives; empty for a single file."""
        source = getattr(self.dataset, "source", None)
        if not isinstance(source, Blend):
            return {}
        return {dataset.file.prefix: weight for dataset, weight in zip(source.datasets, source.weights, strict=True)}


def masking_of(config: Config) -> Masking:
    """Return the rules of masking. The words and special tokens come from the data's tokenizer, if it is known."""
    model = config.model
    c = config.data.masked
    prefix = config.data.prefixes[0]
    tokenizer = tokenizer_of_data(config.data.prefixes)
    pieces = [] if tokenizer is None else tokenizer.pieces()
    if c.needs_words and not pieces:
        raise UserError(
            f"data.masked.whole_words=true needs the tokenizer of {prefix}, and its file is not known or gone: prepare "
            "the data again, or set it to auto"
        )
    vocab = len(pieces) or int((read_metadata(prefix) or {}).get("vocab_size", 0))
    specials = c.specials or special_ids(pieces) or (tuple(range(vocab, vocab + len(SPECIALS))) if vocab else ())
    if not specials:
        raise UserError(
            f"{prefix}.json does not say which tokens there are: set data.masked.specials to the ids of [CLS], [SEP], "
            "[MASK] and [PAD]"
        )
    if max(specials) >= model.vocab:
        raise UserError(
            f"model.vocab={model.vocab} leaves no room for the special tokens {list(specials)}: set "
            f"model.vocab={max(specials) + 1} or more"
        )
    words = word_parts(pieces) if pieces and c.wants_words else None
    return Masking(model.predictions, c.share, c.ngrams, specials, vocab or model.vocab, words, model.pooler)


def spans_of(config: Config) -> SpanOptions:
    """Return the options of span corruption. If the config names no end token, the data's is used."""
    model, d = config.model, config.data
    known = [read_metadata(prefix) or {} for prefix in d.prefixes]
    ends = {int(metadata["eod"]) for metadata in known if "eod" in metadata} if d.eod < 0 else {d.eod}
    if len(ends) != 1:
        why = f"{d.prefixes[0]}.json does not name the end-of-document token"
        if ends:
            why = f"the token files end documents with different tokens {sorted(ends)}"
        raise UserError(f"{why}, with which targets end: set data.eod to its id")
    # Sentinels count down from the first one, so by default they are the last ids of the vocabulary.
    first = model.vocab - 1 if d.spans.sentinel < 0 else d.spans.sentinel
    options = SpanOptions(
        model.seq, model.t5.decoder_seq, d.spans.share, d.spans.mean, first, model.t5.start, ends.pop()
    )
    if first >= model.vocab:
        raise UserError(f"data.spans.sentinel={first} is no token of model.vocab={model.vocab}: use one below that")
    used = max((int(metadata["vocab_size"]) for metadata in known if "vocab_size" in metadata), default=0)
    if d.spans.sentinel < 0 and used > options.last_sentinel:
        raise UserError(
            f"model.vocab={model.vocab} leaves no room for {options.spans} sentinels above the {used} tokens of "
            "the data: "
            f"set model.vocab={used + options.spans} or more, or data.spans.sentinel where the tokenizer has its own"
        )
    if options.last_sentinel < 0:
        raise UserError(f"data.spans.sentinel={first} leaves no room for {options.spans} sentinels: raise it")
    return options


def blank_specials(config: Config, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the ids of [MASK], [gMASK], [sop], [eop] and [pad].

    They are the config's, or else the five ids after the last one of the tokenizer.
    """
    model = config.model
    b = config.data.blanks
    prefix = config.data.prefixes[0]
    used = 0 if tokenizer is None else len(tokenizer.pieces())
    used = used or int((read_metadata(prefix) or {}).get("vocab_size", 0))
    specials = b.specials or (tuple(range(used, used + len(BLANK_SPECIALS))) if used else ())
    if not specials:
        names = ", ".join(f"[{name}]" for name in BLANK_SPECIALS)
        raise UserError(
            f"{prefix}.json does not say which tokens there are: set data.blanks.specials to the ids of {names}"
        )
    if max(specials) >= model.vocab:
        raise UserError(
            f"model.vocab={model.vocab} leaves no room for the special tokens {list(specials)}: set "
            f"model.vocab={max(specials) + 1} or more"
        )
    return specials


def blanks_of(config: Config) -> BlankOptions:
    """Return the options of blank infilling (GLM)."""
    m, b = config.model, config.data.blanks
    specials = blank_specials(config, tokenizer_of_data(config.data.prefixes))
    options = BlankOptions(
        m.seq, b.short, b.share, b.mean, b.least, specials, bool(m.token_types), b.instructions, b.instruction_share
    )
    if options.added_tokens >= m.seq // 2:
        raise UserError(f"model.seq={m.seq} is too short for up to {options.added_tokens // 2} blanks: raise it")
    return options


def datasets_of(config: Config) -> tuple[Any, Any, Any]:
    """Return the train, validation and test datasets (None where the split leaves none).

    Raises a UserError for every mistake that can be seen from the files.
    """
    d = config.data
    options = SampleOptions(d.eod if d.eod >= 0 else None, d.mask_eod, d.reset_positions, d.reset_attention)
    if config.objective_facts.packed:
        return _check_vocabulary(config, packed_of(config))
    if held := [prefix for prefix in d.prefixes if is_chat(prefix)]:
        raise UserError(f"{held[0]} holds conversations, whose loss is masked: set data.objective=chat or preference")
    makers: dict[str, Callable[[Config], Any]] = {"masked": masking_of, "spans": spans_of, "blanks": blanks_of}
    made: list[Any] = [maker(config) if name == config.objective else None for name, maker in makers.items()]
    settings = (config.model.seq, config.train.seed, options, d.draw_split, *made)
    return _check_vocabulary(config, build_datasets(d.prefixes, d.weights or None, d.split, *settings))


def packed_of(config: Config) -> list[PackedStream | None]:
    """Return the splits of packed conversations, pairs of answers, or judged answers."""
    d, m = config.data, config.model
    if d.weights:
        raise UserError("data.weights has no effect on conversations, which are all packed together: leave it out")
    judged = JUDGED if config.tune.judges_each else PAIRS
    kinds = {judged if config.objective_facts.judges_answers else CHAT}
    positions = m.numbers_positions
    return packed_datasets(d.prefixes, d.split, m.seq, config.train.seed, d.draw_split, positions, kinds)


def unused_tokens(config: Config, data: Any) -> str:
    """Return a note if the model's vocabulary exceeds that of the data by more than the usual rounding, else "".

    Objectives that add tokens to those of the data get no note.
    """
    needed, vocab = data.dataset.vocab_needed, config.model.vocab
    unit = VOCAB_MULTIPLE * config.layout.tp
    if needed is None or vocab <= -(-needed // unit) * unit or not config.objective_facts.splits_documents:
        return ""
    return f"the data use {needed:,} of the model's {vocab:,} tokens: the others are never trained (model.vocab)"


def _check_vocabulary(config: Config, parts: Sequence[Any]) -> tuple[Any, Any, Any]:
    assert parts[0] is not None
    needed = parts[0].vocab_needed
    if needed is not None and needed > config.model.vocab:
        raise UserError(
            f"model.vocab={config.model.vocab} is too small for the data, whose tokenizer has {needed} tokens: "
            f"set model.vocab={needed} or more"
        )
    return tuple(part if part is None else CheckedDataset(part, config.model.vocab) for part in parts)  # type: ignore[return-value]
