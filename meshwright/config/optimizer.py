"""The section on the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from meshwright.config.blocks import not_negative, positive
from meshwright.errors import UserError

# The optimizers by the names that a config may give, each with the class of its rule (see `engine/optim/rule.py`).
RULES = {
    "adamw": "meshwright.engine.optim.adam:AdamW",
    "lion": "meshwright.engine.optim.lion:Lion",
    "sgd": "meshwright.engine.optim.sgd:SGD",
}

if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[tuple(RULES)]


@dataclass(frozen=True)
class OptimizerConfig:
    name: OptimizerName = "adamw"
    lr: float = 3e-4  # the peak
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1  # not on norms and biases
    master_dtype: Literal["fp32", "bf16"] = "fp32"  # bf16, with train.precision=bf16: no masters
    state_dtype: Literal["fp32", "bf16"] = "fp32"  # of the rule's states; updates are computed in fp32

    def __post_init__(self) -> None:
        positive("optimizer", self, "lr", "eps")
        not_negative("optimizer", self, "weight_decay")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise UserError(f"optimizer.betas={list(self.betas)} must be two numbers in [0, 1), e.g. [0.9, 0.95]")
