"""The data section of a config: the token files, and the objective that is learned from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from meshwright.config.blocks import positive
from meshwright.data.span_lengths import MEAN, SHARE
from meshwright.errors import UserError

SPECIALS = ("cls", "sep", "mask", "pad")
BLANK_SPECIALS = ("MASK", "gMASK", "sop", "eop", "pad")


@dataclass(frozen=True)
class Objective:
    """A training objective: the loss of a model, and the form of its samples."""

    learns: str  # what the model learns to predict, in words for error sentences
    packed: bool = False  # samples are packed conversations
    has_segments: bool = False  # samples say which of their tokens see each other
    splits_documents: bool = False  # samples consist of documents, so `data.mask_eod` etc. apply to them
    fills_blanks: bool = False  # samples are a source text and the spans that fill its blanks
    continues: bool = False  # each token is predicted from those before it
    judges_answers: bool = False  # the loss compares pairs of answers, or judges single ones
    fields: tuple[str, ...] = ("tokens", "labels", "loss_mask")  # the fields of every sample


OBJECTIVES = {
    "causal": Objective("the next token", splits_documents=True, continues=True),
    "masked": Objective(
        "masked tokens", has_segments=True,
        fields=("tokens", "token_types", "segments", "places", "labels", "loss_mask"),
    ),
    "spans": Objective("spans", fields=("tokens", "decoder_tokens", "labels", "loss_mask")),
    "blanks": Objective(
        "blanks", has_segments=True, fills_blanks=True,
        fields=("tokens", "labels", "loss_mask", "positions", "segments"),
    ),
    "chat": Objective(
        "answers of conversations", packed=True, has_segments=True, splits_documents=True, continues=True
    ),
    "preference": Objective(
        "pairs of answers", packed=True, has_segments=True, splits_documents=True, continues=True, judges_answers=True
    ),
}  # fmt: skip


@dataclass(frozen=True)
class MaskedConfig:
    """The choice of masked tokens for `data.objective=masked`. Of the chosen tokens, 80 % are replaced by the mask
    token, 10 % by another token, and 10 % stay."""

    share: float = 0.15  # fraction of a sample's tokens that is chosen; at most model.predictions tokens
    ngrams: int = 1  # the most words that are masked together; the odds of a run of n words are 1/n
    whole_words: Literal["auto", "true", "false"] = "auto"  # auto: if the tokenizer shows where words begin
    # The ids of [CLS], [SEP], [MASK] and [PAD]; empty: the tokenizer's or, where it has none, the four after its last.
    specials: tuple[int, ...] = ()

    @property
    def needs_words(self) -> bool:
        """True if whole words must be masked together."""
        return self.whole_words == "true"

    @property
    def wants_words(self) -> bool:
        """True if whole words are masked together where the tokenizer shows them."""
        return self.whole_words != "false"

    def __post_init__(self) -> None:
        positive("data.masked", self, "share", "ngrams")
        if self.share >= 1.0:
            raise UserError(f"data.masked.share={self.share:g} must be below 1, e.g. 0.15")
        if self.specials and (len(set(self.specials)) != len(SPECIALS) or min(self.specials) < 0):
            raise UserError(
                f"data.masked.specials={list(self.specials)} must be four different ids, of [CLS], [SEP], [MASK] and "
                "[PAD], e.g. [101, 102, 103, 0]"
            )


@dataclass(frozen=True)
class SpansConfig:
    """The spans that are taken out of a text for `data.objective=spans`. In the input, a sentinel replaces each span.
    The target has each sentinel followed by its span."""

    share: float = SHARE  # fraction of a sample's tokens that is taken out
    mean: float = MEAN  # tokens of a span, on average
    sentinel: int = -1  # the id of the first sentinel; the others have the ids below it. -1: model.vocab - 1

    def __post_init__(self) -> None:
        positive("data.spans", self, "share")
        if self.share > 0.5:
            raise UserError(f"data.spans.share={self.share:g} must be at most 0.5, e.g. 0.15")
        if not 1.5 <= self.mean <= 100.0:
            raise UserError(f"data.spans.mean={self.mean:g} must lie between 1.5 and 100 tokens, e.g. 3")


@dataclass(frozen=True)
class BlanksConfig:
    """The blanks that the model fills in for `data.objective=blanks`. In some samples they are short spans all over the
    text, each replaced by a [MASK]. In the others the whole end of the text is one blank, replaced by [gMASK]."""

    short: float = 0.3  # fraction of the samples that have short spans
    share: float = 0.15  # fraction of such a sample's tokens that is in the spans
    mean: float = 3.0  # tokens of a short span, on average (drawn from a Poisson distribution)
    least: float = 0.5  # the shortest end, as a fraction of the sample's tokens; the longest is the whole sample
    # Token files of `data chat`: each answer is a blank after the conversation that precedes it.
    instructions: tuple[str, ...] = ()
    instruction_share: float = 0.05  # fraction of the samples that are drawn from these files (GLM-130B: 5 %)
    # The ids of [MASK], [gMASK], [sop], [eop] and [pad]; empty: the five after the tokenizer's last.
    specials: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        positive("data.blanks", self, "share", "least")
        if not 0.0 <= self.short <= 1.0 or self.share > 0.5 or self.least > 1.0:
            raise UserError(
                f"data.blanks.short={self.short:g} and least={self.least:g} must be at most 1 and "
                f"share={self.share:g} at most 0.5, e.g. 0.3, 0.5 and 0.15"
            )
        if not 0.0 < self.instruction_share < 1.0:
            share = f"data.blanks.instruction_share={self.instruction_share:g}"
            raise UserError(f"{share} must lie between 0 and 1, e.g. 0.05")
        if not 1.0 <= self.mean <= 100.0:
            raise UserError(f"data.blanks.mean={self.mean:g} must lie between 1 and 100 tokens, e.g. 3")
        if self.specials and (len(set(self.specials)) != len(BLANK_SPECIALS) or min(self.specials) < 0):
            raise UserError(
                f"data.blanks.specials={list(self.specials)} must be five different ids, of [MASK], [gMASK], [sop], "
                "[eop] and [pad]"
            )

    @property
    def source_square(self) -> float:
        """The mean of f^2, where f is the source's share of a sample.

        In a sample of s tokens, attention sees f^2 s^2 pairs within the source, f (1 - f) s^2 from the spans to the
        source and (1 - f)^2 s^2 / 2 among the spans, which adds up to (1 + f^2) s^2 / 2."""
        # In a sample whose end is the blank, f is uniform between 0 and 1 - least.
        ends = (1.0 - self.least) ** 2 / 3
        return self.short * (1.0 - self.share) ** 2 + (1.0 - self.short) * ends


@dataclass(frozen=True)
class DataConfig:
    """The token files, how documents are divided and cut into samples, and the objective."""

    prefixes: tuple[str, ...]  # token files, each without .bin
    weights: tuple[float, ...] = ()  # shares of the samples, one per file; empty: in proportion to their tokens
    split: tuple[float, ...] = (0.95, 0.05, 0.0)  # shares of the documents in train, valid and test
    draw_split: bool = True  # draw the documents of each part from all over a file; false: in order, as in Megatron-LM
    mask_eod: bool = False  # no loss where the input is an end token
    reset_positions: bool = False  # positions restart after each end token
    reset_attention: bool = False  # attention does not cross the boundaries of documents
    any_tokenizer: bool = False  # accept data that were made with another tokenizer than the model's
    eod: int = -1  # the end token's id; -1: from the file that `data prepare` wrote beside the tokens
    # auto: the usual objective of model.kind; chat: the answers of conversations; preference: pairs of answers.
    objective: Literal["auto", "causal", "masked", "spans", "blanks", "chat", "preference"] = "auto"
    masked: MaskedConfig = field(default_factory=MaskedConfig)
    spans: SpansConfig = field(default_factory=SpansConfig)
    blanks: BlanksConfig = field(default_factory=BlanksConfig)

    def __post_init__(self) -> None:
        if not self.prefixes:
            raise UserError("data.prefixes is empty: name at least one token file (the path without .bin)")
        if self.weights and len(self.weights) != len(self.prefixes):
            raise UserError(
                f"data.weights has {len(self.weights)} numbers for {len(self.prefixes)} data.prefixes: "
                "give one each, or none"
            )
        if any(weight <= 0 for weight in self.weights):
            raise UserError(f"data.weights={list(self.weights)} must all be greater than zero")
        if len(self.split) != 3 or min(self.split) < 0 or self.split[0] <= 0:
            raise UserError(
                f"data.split={list(self.split)} must be three shares for train, valid and test, e.g. [0.95, 0.05, 0]"
            )
