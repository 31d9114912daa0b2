"""Build the streams of numbered samples, with labels and masks, that a run trains and validates on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from meshwright.data.blanks import BlankOptions, BlankStream
from meshwright.data.blend import Blend, FromFile, NumberedDataset
from meshwright.data.dataset import GPTDataset, SplitTooSmall
from meshwright.data.instructions import Instructions
from meshwright.data.masked import DocumentPieces, MaskedStream, Masking
from meshwright.data.packed import CHAT, KINDS, is_chat
from meshwright.data.spans import SpanOptions, SpanStream
from meshwright.data.token_file import Metadata, TokenFile
from meshwright.errors import UserError

SPLIT_NAMES = ("train", "valid", "test")


@dataclass(frozen=True)
class SampleOptions:
    """The effects of the end-of-document token. If `eod` is None, the token files' metadata name it.

    mask_eod          no loss where the input is the end token, since another document follows it (as in Megatron)
    reset_positions   positions restart at 0 after each end token
    reset_attention   segments number the documents of a sample, so that attention stays within a document
    """

    eod: int | None = None
    mask_eod: bool = False
    reset_positions: bool = False
    reset_attention: bool = False

    @property
    def need_eod(self) -> bool:
        return self.mask_eod or self.reset_positions or self.reset_attention


class SampleStream:
    """The samples of one part of the data. Sample n, and so every batch, is a pure function of the seed and n."""

    def __init__(self, source: NumberedDataset, options: SampleOptions, vocab_needed: int | None = None) -> None:
        assert options.eod is not None or not options.need_eod, "these options need an end token"
        self.source, self.seq, self.options, self.vocab_needed = source, source.seq, options, vocab_needed

    def sample(self, n: int) -> dict[str, NDArray[np.int64]]:
        """Return tokens, shifted labels, loss_mask (0 or 1) and, by option, positions and segments: [seq] each."""
        text = self.source.sample(n)
        tokens, labels = text[:-1].copy(), text[1:].copy()
        sample = {"tokens": tokens, "labels": labels, "loss_mask": np.ones(self.seq, np.int64)}
        options = self.options
        if not options.need_eod:
            return sample
        ends = tokens == options.eod
        if options.mask_eod:
            sample["loss_mask"][ends] = 0
        begins = np.zeros(self.seq, bool)  # where a document begins, except the first of the sample
        begins[1:] = ends[:-1]
        if options.reset_positions:
            index = np.arange(self.seq, dtype=np.int64)
            sample["positions"] = index - np.maximum.accumulate(np.where(begins, index, 0))
        if options.reset_attention:
            sample["segments"] = np.cumsum(begins, dtype=np.int64)
        return sample

    def source_of(self, n: int) -> str:
        """Return the token file that sample n comes from, or an empty string if there is only one file."""
        return self.source.source_of(n) if isinstance(self.source, Blend) else ""


Stream = SampleStream | MaskedStream | SpanStream | BlankStream


class FirstEpoch:
    """The first epoch of a stream, up to `limit` samples, in which each token is a label at most once.

    Labels that belong to the second epoch have no loss, and a sample without labels of the first epoch is left out.
    """

    def __init__(self, stream: Stream, limit: int) -> None:
        self.stream, source = stream, stream.source
        self._numbers = list(islice((n for n in range(source.epoch_samples) if source.own_labels(n)), limit))
        self.samples = len(self._numbers)

    def sample(self, n: int) -> dict[str, NDArray[np.int64]]:
        sample = self.stream.sample(self._numbers[n])
        sample["loss_mask"][self.stream.source.own_labels(self._numbers[n]) :] = 0
        return sample


def split_documents(count: int, split: Sequence[float]) -> list[tuple[int, int]]:
    """Return the documents [low, high) of each part, in order. `split` are shares of the number of documents.

    If there are enough documents, each part with a share above 0 gets at least one.
    """
    shares = [share / sum(split) for share in split]
    left = sum(share > 0 for share in shares)  # parts that still need documents
    least = int(count >= left)
    ranges = []
    low = 0
    total = 0.0
    for share in shares:
        total += share
        high = low
        if share > 0:
            left -= 1
            # At least `least` documents for this part, and for each part after it. The last part gets the rest.
            high = min(max(round(total * count), low + least), count - least * left) if left else count
        ranges.append((low, high))
        low = high
    return ranges


def build_datasets(
    prefixes: Sequence[str],
    weights: Sequence[float] | None,
    split: Sequence[float],
    seq: int,
    seed: int,
    options: SampleOptions | None = None,
    drawn: bool = False,
    masking: Masking | None = None,
    spans: SpanOptions | None = None,
    blanks: BlankOptions | None = None,
) -> list[Stream | None]:
    """Return the train, valid and test streams of token files, blended by `weights` (None: by their tokens).

    Each file is split by documents, in their order or, with `drawn`, taken from all over it. A part whose share is 0 is
    None. `masking`, `spans` or `blanks` selects masked tokens, span corruption or blank filling instead of plain text.
    """
    files = [TokenFile(prefix) for prefix in prefixes]
    metadata = [file.metadata() for file in files]
    instructions = [TokenFile(prefix) for prefix in blanks.instructions] if blanks else []
    check_tokenizers([*files, *instructions], [*metadata, *(file.metadata() for file in instructions)])
    options = _with_eod(options or SampleOptions(), files, metadata)
    vocab = max((int(entry["vocab_size"]) for entry in metadata if entry), default=None)
    if weights is None:
        weights = [file.token_count for file in files]
    streams: list[Stream | None] = []
    cut = masking or blanks  # samples are made of chunks of single documents
    for part, name in enumerate(SPLIT_NAMES):
        if not split[part]:
            streams.append(None)
            continue
        datasets: list[FromFile] = []
        for number, file in enumerate(files):
            documents = split_documents(file.document_count, split)[part]
            try:
                key = f"{name}/{number}"
                if cut is None:
                    datasets.append(GPTDataset(file, spans.tokens if spans else seq, seed, documents, key, drawn))
                else:
                    datasets.append(DocumentPieces(file, seq - cut.added_tokens, seed, documents, key, drawn))
            except SplitTooSmall as error:
                raise UserError(f"the {name} part is too small: {error}") from None
        shares = list(weights)
        if blanks is not None and blanks.instructions:
            answers = _instructions(blanks, split, part, seed, drawn)
            datasets += answers
            shares = with_instructions(shares, [each.epoch_samples for each in answers], blanks.instruction_share)
        source: NumberedDataset = datasets[0] if len(datasets) == 1 else Blend(datasets, shares, seed)
        if spans is not None:
            streams.append(SpanStream(source, spans, seed, name, vocab))
            continue
        if cut is None:
            streams.append(SampleStream(source, options, vocab))
            continue
        needed = None if vocab is None else max(vocab, *(id + 1 for id in cut.specials))
        if blanks is not None:
            streams.append(BlankStream(source, blanks, seed, name, needed))
        elif masking is not None:
            streams.append(MaskedStream(source, seq, masking, seed, name, needed))
    return streams


def _instructions(
    blanks: BlankOptions, split: Sequence[float], part: int, seed: int, drawn: bool
) -> list[Instructions]:
    """Return a dataset of answers for each file of instructions, limited to one part of the data."""
    datasets: list[Instructions] = []
    for number, prefix in enumerate(blanks.instructions):
        if is_chat(prefix) != CHAT:
            raise UserError(
                f"data.blanks.instructions names {prefix}, which holds {KINDS[is_chat(prefix)].words} and no "
                "conversations: make it with `meshwright data chat`"
            )
        documents = split_documents(TokenFile(prefix).document_count, split)[part]
        key = f"{SPLIT_NAMES[part]}/instructions/{number}"
        try:
            datasets.append(Instructions(prefix, blanks.seq - blanks.added_tokens, seed, documents, key, drawn))
        except SplitTooSmall as error:
            raise UserError(f"the {SPLIT_NAMES[part]} part of the instructions is too small: {error}") from None
    return datasets


def with_instructions(weights: Sequence[float], answers: Sequence[int], share: float) -> list[float]:
    """Return the weights of the text files, followed by those of the files of answers.

    Together the files of answers get `share` of the samples, divided among them by their number of answers.
    """
    return [(1 - share) * w / sum(weights) for w in weights] + [share * count / sum(answers) for count in answers]


def check_tokenizers(files: Sequence[TokenFile], found: Sequence[Metadata | None]) -> None:
    """Raise a UserError if files were made with different tokenizers, because mixed ids would go unnoticed."""
    known = [(file.prefix, entry["tokenizer_digest"]) for file, entry in zip(files, found, strict=True)
             if entry and entry.get("tokenizer_digest")]  # fmt: skip
    for prefix, digest in known[1:]:
        if digest != known[0][1]:
            raise UserError(
                f"{known[0][0]} and {prefix} were made with different tokenizers: prepare them with the same one, "
                "for example --tokenizer FILE.tokenizer.json of the first"
            )


def _with_eod(options: SampleOptions, files: Sequence[TokenFile], found: Sequence[Metadata | None]) -> SampleOptions:
    """Return the options, with the end token from the metadata if they need one and do not name it."""
    if options.eod is not None or not options.need_eod:
        return options
    known = {int(entry["eod"]) for entry in found if entry}
    if not known:
        raise UserError(f"{files[0].prefix}.json does not name the end-of-document token: set data.eod to its id")
    if len(known) > 1:
        raise UserError(f"the token files end documents with different tokens {sorted(known)}: set data.eod to one")
    return replace(options, eod=known.pop())
