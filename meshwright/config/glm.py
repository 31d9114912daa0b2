"""What only a model that fills in blanks (model.kind=glm) has, and what it can't be combined with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.config.blocks import positive
from meshwright.errors import UserError

if TYPE_CHECKING:
    from meshwright.config.sections import Config

BLANK_SPECIALS = ("MASK", "gMASK", "sop", "eop", "pad")


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


def glm_fits(c: Config, world: int) -> Iterator[str]:
    """What a model that fills in blanks can't be combined with."""
    m = c.model
    if m.kind != "glm":
        if c.objective == "blanks" and m.kind in ("gpt", "bert", "t5"):
            yield f"data.objective=blanks needs model.kind=glm, which sees its prefix both ways, not {m.kind}: set it"
        return
    if c.objective not in ("blanks", "causal"):
        yield f"model.kind=glm fills in blanks, and data.objective is {c.objective}: set data.objective=blanks"
    if c.layout.cp > 1:
        yield f"layout.cp={c.layout.cp} can't share the sequences of model.kind=glm yet: set layout.cp=1"
    if m.position == "alibi":
        yield "model.position=alibi looks back only, and model.kind=glm sees its prefix both ways: use rope or learned"
    if m.attention_dropout:
        yield (
            f"model.attention_dropout={m.attention_dropout:g} can't be combined with model.kind=glm, whose kernels "
            "know no dropout: set model.attention_dropout=0"
        )
    if m.latent.kv_rank:
        yield "model.latent is causal, and model.kind=glm sees its prefix both ways: leave it out"
    for key in ("pooler", "predictions"):
        if getattr(m, key):
            yield f"model.{key}={getattr(m, key)} has no effect with model.kind=glm: leave it out"
    if c.data.reset_attention and c.objective != "blanks":
        yield (
            "data.reset_attention=true can't be combined with model.kind=glm, which takes a first document for a "
            "prefix: set it to false"
        )
    for key in ("mask_eod", "reset_positions", "reset_attention") if c.objective == "blanks" else ():
        if getattr(c.data, key):
            yield f"data.{key}=true has no effect with data.objective=blanks: leave it out"
