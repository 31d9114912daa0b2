"""The section on the optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from meshwright.config.blocks import not_negative, positive
from meshwright.errors import UserError
from meshwright.plugins import Registry


class RuleEntry(NamedTuple):
    """An optimizer: the path of its update rule's class (`engine/optim/rule.py`).

    A rule with `whole_matrices` updates each matrix of a block as a whole, so these lie in buffers of their own.
    """

    rule: str
    whole_matrices: bool = False


# The optimizers by the names that a config may give.
RULES = Registry("optimizer.name", {
    "adamw": RuleEntry("meshwright.engine.optim.adam:AdamW"),
    "lion": RuleEntry("meshwright.engine.optim.lion:Lion"),
    "muon": RuleEntry("meshwright.engine.optim.muon:Muon", whole_matrices=True),
    "sgd": RuleEntry("meshwright.engine.optim.sgd:SGD"),
})  # fmt: skip


@dataclass(frozen=True)
class MuonConfig:
    momentum: float = 0.95
    iterations: int = 5  # of the polynomial that orthogonalises
    coefficients: Literal["simple", "polar_express"] = "simple"  # of the polynomials
    scale: Literal["match_adamw", "original"] = "match_adamw"  # 0.2 sqrt(max(out, in)) or sqrt(max(1, out / in))
    precision: Literal["bf16", "fp32"] = "bf16"  # of the iterations
    adamw_lr: float = 0.0  # the peak for embeddings, the head, norms and biases; 0: optimizer.lr

    def __post_init__(self) -> None:
        positive("optimizer.muon", self, "iterations")
        not_negative("optimizer.muon", self, "adamw_lr")
        if not 0.0 <= self.momentum < 1.0:
            raise UserError(f"optimizer.muon.momentum={self.momentum} must be in [0, 1), e.g. 0.95")


@dataclass(frozen=True)
class OptimizerConfig:
    name: str = "adamw"  # one of RULES
    lr: float = 3e-4  # the peak
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1  # not on norms and biases
    master_dtype: Literal["fp32", "bf16"] = "fp32"  # bf16, with train.precision=bf16: no masters
    state_dtype: Literal["fp32", "bf16"] = "fp32"  # of the rule's states; updates are computed in fp32
    muon: MuonConfig = field(default_factory=MuonConfig)

    def __post_init__(self) -> None:
        RULES.named(self.name)
        positive("optimizer", self, "lr", "eps")
        not_negative("optimizer", self, "weight_decay")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise UserError(f"optimizer.betas={list(self.betas)} must be two numbers in [0, 1), e.g. [0.9, 0.95]")

    @property
    def whole_matrices(self) -> bool:
        """True if the rule updates matrices as wholes."""
        return RULES[self.name].whole_matrices
