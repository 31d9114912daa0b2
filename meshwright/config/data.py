"""The data section of a config: the token files, and what is learned from them."""

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
    """An objective: the loss that a model learns by, and the form of its samples."""

    learns: str  # in words
    packed: bool = False  # samples are packed conversations
    has_segments: bool = False  # samples say which of their tokens see each other
    splits_documents: bool = False  # samples are cut from documents, about whose ends the keys of `data` decide
    fills_blanks: bool = False  # samples have a source and blanks of it
    judges_answers: bool = False  # the loss compares answers, or judges each
    fields: tuple[str, ...] = ("tokens", "labels", "loss_mask")  # of every sample


OBJECTIVES = {
    "causal": Objective("the next token", splits_documents=True),
    "masked": Objective(
        "masked tokens", has_segments=True,
        fields=("tokens", "token_types", "segments", "places", "labels", "loss_mask"),
    ),
    "spans": Objective("spans", fields=("tokens", "decoder_tokens", "labels", "loss_mask")),
    "blanks": Objective(
        "blanks", has_segments=True, fills_blanks=True,
        fields=("tokens", "labels", "loss_mask", "positions", "segments"),
    ),
    "chat": Objective("answers of conversations", packed=True, has_segments=True, splits_documents=True),
    "preference": Objective(
        "pairs of answers", packed=True, has_segments=True, splits_documents=True, judges_answers=True
    ),
}  # fmt: skip


@dataclass(frozen=True)
class MaskedConfig:
    """Which tokens are masked for `data.objective=masked`: 80 % of those become the mask token, 10 % another token, and
    10 % stay."""

    share: float = 0.15  # of a sample's tokens; at most model.predictions
    ngrams: int = 1  # the most words that are masked together; runs of n words have the odds 1/n
    whole_words: Literal["auto", "true", "false"] = "auto"  # auto: where the tokenizer shows where words begin
    # The ids of [CLS], [SEP], [MASK] and [PAD]; empty: the tokenizer's or, where it has none, the four after its last.
    specials: tuple[int, ...] = ()

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
    """Which spans of a text are taken out for `data.objective=spans`. A sentinel stands for each in the input; the
    target is each sentinel with its span."""

    share: float = SHARE  # of a sample's tokens that are taken out
    mean: float = MEAN  # tokens of a span, on average
    sentinel: int = -1  # the id of the first sentinel, below which the others follow; -1: model.vocab - 1

    def __post_init__(self) -> None:
        positive("data.spans", self, "share")
        if self.share > 0.5:
            raise UserError(f"data.spans.share={self.share:g} must be at most 0.5, e.g. 0.15")
        if not 1.5 <= self.mean <= 100.0:
            raise UserError(f"data.spans.mean={self.mean:g} must lie between 1.5 and 100 tokens, e.g. 3")


@dataclass(frozen=True)
class BlanksConfig:
    """Which blanks are filled in for `data.objective=blanks`: in some samples short spans all over the text, each with
    a [MASK] in its place, in the others its whole end, for which [gMASK] stands."""

    short: float = 0.3  # of the samples that have short spans
    share: float = 0.15  # of such a sample's tokens that are in them
    mean: float = 3.0  # tokens of a short span, on average (they follow Poisson's law)
    least: float = 0.5  # the shortest end, as a share of the sample's tokens; the longest is all of it
    instructions: tuple[str, ...] = ()  # files of `data chat`, whose answers are blanks behind what was said before
    instruction_share: float = 0.05  # of the samples that come from them (GLM-130B: 5 %)
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
        """The mean square of the source's share of a sample. Of s tokens with a source of f s, attention sees f^2 s^2
        pairs within it, f (1 - f) s^2 from the spans to it and half of (1 - f)^2 s^2 among them: (1 + f^2) / 2 s^2."""
        ends = (1.0 - self.least) ** 2 / 3  # its share is as likely to lie anywhere from 0 to 1 - least
        return self.short * (1.0 - self.share) ** 2 + (1.0 - self.short) * ends


@dataclass(frozen=True)
class DataConfig:
    prefixes: tuple[str, ...]
    weights: tuple[float, ...] = ()  # empty: in proportion to the tokens of each file
    split: tuple[float, ...] = (0.95, 0.05, 0.0)
    draw_split: bool = True  # draw each part from all over a file; false: in its order, as Megatron-LM does
    mask_eod: bool = False
    reset_positions: bool = False
    reset_attention: bool = False
    any_tokenizer: bool = False  # take data that were made with another tokenizer than the model's
    eod: int = -1  # the end token's id; -1: from the file that `data prepare` wrote beside the tokens
    # auto: as model.kind has it; chat: the answers of conversations; preference: pairs of answers
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
