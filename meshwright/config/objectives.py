"""What a run learns from its tokens where that is not simply the next one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.config.blocks import positive
from meshwright.errors import UserError

SPECIALS = ("cls", "sep", "mask", "pad")


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
