"""The tune section of a config: the parts of a model that are trained. With adapters, its weights are frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.config.blocks import not_negative, positive
from meshwright.errors import UserError

ALL = "all"
# Name of a reported value: the share of pairs whose chosen answer has become likelier than the rejected one, compared
# with the reference.
PREFERENCE_ACCURACY = "chosen answers likelier (share of pairs)"
# The losses that compare with a reference: the model before this training.
NEED_REFERENCE = ("dpo", "ipo", "kto")


# The names of the modules of Llama-like models, which users know from PEFT, and our names of their products.
PEFT_NAMES = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "out", "gate_proj": "gate", "up_proj": "up",
    "down_proj": "down", "all-linear": ALL,
}  # fmt: skip


@dataclass(frozen=True)
class TuneConfig:
    """The adaptation of a model: train all weights (full), or low-rank changes of some products (lora, dora)."""

    kind: Literal["full", "lora", "dora"] = "full"
    base: str = ""  # with lora and dora: the checkpoint, run or Hugging Face folder whose weights are adapted
    rank: int = 16  # rank of the changes
    alpha: float = 0.0  # the change is scaled by alpha / rank; 0: 2 x rank
    rslora: bool = False  # scale by alpha / sqrt(rank) instead
    dropout: float = 0.0  # on the adapters' inputs
    targets: tuple[str, ...] = (ALL,)  # the products that are adapted, e.g. q, v; all: all except those of experts
    modules_to_save: tuple[str, ...] = ()  # parts that are trained in full as well, e.g. embedding, head, norm1
    quantise: Literal["none", "nf4"] = "none"  # nf4: store the frozen weights of the blocks' products in 4 bits

    # The keys below apply to data.objective=preference.
    loss: Literal["dpo", "ipo", "orpo", "simpo", "kto"] = "dpo"
    # The model that the losses compare with, if --from names adapters. start: the base with them, which become
    # part of the frozen weights; base: the bare base, and the same adapters are trained further.
    reference: Literal["start", "base"] = "start"
    beta: float = 0.1  # weight of changes in an answer's log-probability; orpo: weight of the odds ratio
    # simpo: the lead that the better answer's mean log-probability should have, times beta.
    margin: float = 0.0

    def __post_init__(self) -> None:
        positive("tune", self, "rank", "beta")
        not_negative("tune", self, "alpha", "margin")
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"tune.dropout={self.dropout} must be at least 0 and below 1")
        object.__setattr__(self, "targets", tuple(PEFT_NAMES.get(name, name) for name in self.targets))
        if not self.targets:
            raise UserError("tune.targets is empty: name the products to adapt, e.g. [q, v], or all")
        idle = {"base": self.base, "quantise": self.quantise != "none", "modules_to_save": self.modules_to_save}
        if self.kind == "full" and any(idle.values()):
            key = next(key for key, given in idle.items() if given)
            raise UserError(f"tune.{key} has no effect with tune.kind=full: set tune.kind=lora, or leave it out")

    @property
    def adapts(self) -> bool:
        """True if adapters are trained."""
        return self.kind != "full"

    @property
    def trains_norms(self) -> bool:
        """True if the norms of the changed weights' rows are trained (DoRA)."""
        return self.kind == "dora"

    @property
    def packs(self) -> bool:
        """True if the frozen weights of the blocks' products are stored in 4 bits."""
        return self.quantise == "nf4"

    @property
    def judges_each(self) -> bool:
        """True if the loss judges single answers instead of pairs."""
        return self.loss == "kto"

    @property
    def scale(self) -> float:
        """The factor on the product of an adapter's two matrices."""
        return (self.alpha or 2.0 * self.rank) / (self.rank**0.5 if self.rslora else self.rank)
