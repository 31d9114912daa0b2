"""The tune section of a config: what of a model is trained. With adapters, its own weights are frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.config.blocks import not_negative, positive
from meshwright.errors import UserError

ALL = "all"
BETTER = "chosen answers likelier (share of pairs)"  # than the rejected ones, compared with the reference
NEED_REFERENCE = ("dpo", "ipo", "kto")  # losses that compare with the model as it was


# Names of Llama-like modules, by which PEFT's users know the products.
PEFT_NAMES = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "out", "gate_proj": "gate", "up_proj": "up",
    "down_proj": "down", "all-linear": ALL,
}  # fmt: skip


@dataclass(frozen=True)
class TuneConfig:
    """How a model is adapted: all of its weights (full), or low-rank changes of some products (lora, dora)."""

    kind: Literal["full", "lora", "dora"] = "full"
    base: str = ""  # with lora and dora: the checkpoint, run or Hugging Face folder whose weights are adapted
    rank: int = 16
    alpha: float = 0.0  # the change is scaled by alpha / rank; 0: 2 x rank
    rslora: bool = False  # by alpha / sqrt(rank) instead
    dropout: float = 0.0  # of the adapters' inputs
    targets: tuple[str, ...] = (ALL,)  # the products that are adapted, e.g. q, v; all: every one but those of experts
    modules_to_save: tuple[str, ...] = ()  # parts that are trained whole beside them, e.g. embedding, head, norm1
    quantise: Literal["none", "nf4"] = "none"  # nf4: the frozen weights of the blocks' products in 4 bits

    # With data.objective=preference:
    loss: Literal["dpo", "ipo", "orpo", "simpo", "kto"] = "dpo"
    beta: float = 0.1  # how much a change of an answer's log-probability counts; of orpo: the weight of its odds ratio
    margin: float = 0.0  # of simpo: by how much the better answer's mean log-probability shall be higher, times beta

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
        return self.kind != "full"

    @property
    def judges_each(self) -> bool:
        """True if the loss judges single answers instead of pairs."""
        return self.loss == "kto"

    @property
    def scale(self) -> float:
        """What the product of an adapter's two factors is multiplied by."""
        return (self.alpha or 2.0 * self.rank) / (self.rank**0.5 if self.rslora else self.rank)
