"""The config section on the optimizer, and the registry of update rules."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from meshwright.config.blocks import not_negative, positive
from meshwright.errors import UserError
from meshwright.plugins import Registry


class RuleEntry(NamedTuple):
    """An optimizer, named by the path of its update rule's class (see `engine/optim/rule.py`).

    A rule with `whole_matrices` updates each matrix of a block as a whole, so matrices get separate buffers.
    """

    rule: str
    whole_matrices: bool = False


# The optimizers by name, for the key `optimizer.name`.
RULES = Registry("optimizer.name", {
    "adafactor": RuleEntry("meshwright.engine.optim.adafactor:Adafactor", whole_matrices=True),
    "adamw": RuleEntry("meshwright.engine.optim.adam:AdamW"),
    "lion": RuleEntry("meshwright.engine.optim.lion:Lion"),
    "muon": RuleEntry("meshwright.engine.optim.muon:Muon", whole_matrices=True),
    "sgd": RuleEntry("meshwright.engine.optim.sgd:SGD"),
    "soap": RuleEntry("meshwright.engine.optim.soap:Soap", whole_matrices=True),
})  # fmt: skip


@dataclass(frozen=True)
class MuonConfig:
    """Muon, which orthogonalises the momentum of matrices. Other parameters are updated by AdamW."""

    momentum: float = 0.95
    iterations: int = 5  # iterations of the polynomial that orthogonalises the momentum
    # The coefficients of the polynomials. All except simple have different ones for each iteration.
    coefficients: Literal["simple", "quintic", "cans", "polar_express", "deepseek_v4"] = "simple"
    # Factor on a matrix's update: 0.2 sqrt(max(out, in)) (match_adamw) or sqrt(max(1, out / in)) (original).
    scale: Literal["match_adamw", "original"] = "match_adamw"
    precision: Literal["bf16", "fp32"] = "bf16"  # precision of the iterations
    per_head: bool = False  # the queries, keys and values of each head are separate matrices
    adamw_lr: float = 0.0  # peak learning rate of embeddings, the head, norms and biases; 0: optimizer.lr

    def __post_init__(self) -> None:
        positive("optimizer.muon", self, "iterations")
        not_negative("optimizer.muon", self, "adamw_lr")
        if not 0.0 <= self.momentum < 1.0:
            raise UserError(f"optimizer.muon.momentum={self.momentum} must be in [0, 1), e.g. 0.95")


@dataclass(frozen=True)
class AdafactorConfig:
    """Adafactor, whose second moments of a matrix are one vector of rows and one of columns."""

    decay: float = 0.8  # the second moments' factor in step t is 1 - t^-decay
    clip: float = 1.0  # the largest root mean square of a matrix's update, before the learning rate
    eps: float = 1e-30  # is added to the squares of gradients

    def __post_init__(self) -> None:
        positive("optimizer.adafactor", self, "decay", "clip", "eps")


@dataclass(frozen=True)
class SoapConfig:
    """SOAP, which is Adam in a basis that fits each matrix. Other parameters are updated by AdamW."""

    every: int = 10  # the steps from one improvement of the bases to the next
    max_side: int = 8192  # a side of a matrix that is longer keeps its own basis

    def __post_init__(self) -> None:
        positive("optimizer.soap", self, "every", "max_side")


@dataclass(frozen=True)
class GroupConfig:
    """Parameters with their own settings. Of several groups that match a parameter, the first one applies."""

    match: str  # a pattern of the parameters' names, such as *.attention.*; * stands for any characters
    lr: float = 0.0  # their peak learning rate; 0: that of all others
    decay: float | None = None  # their weight decay, also of norms and biases; None: that of all others
    optimizer: str = ""  # their update rule; empty: optimizer.name

    def __post_init__(self) -> None:
        where = f"optimizer.groups[{self.match}]"
        if not self.match:
            raise UserError('optimizer.groups: match is empty: give a pattern of parameter names, e.g. match: "*norm*"')
        not_negative(where, self, "lr", *(["decay"] if self.decay is not None else []))
        if self.optimizer:
            RULES.entry(self.optimizer)


@dataclass(frozen=True)
class OptimizerConfig:
    """The update rule, its hyperparameters, and the dtypes of master weights and optimizer states."""

    name: str = "adamw"  # one of RULES
    lr: float = 3e-4  # peak learning rate
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1  # does not apply to norms and biases
    master_dtype: Literal["fp32", "bf16"] = "fp32"  # bf16 needs train.precision=bf16: there are no master weights then
    state_dtype: Literal["fp32", "bf16"] = "fp32"  # dtype of the optimizer states; updates are computed in fp32
    ema: float = 0.0  # keep a moving average of the weights with this factor, e.g. 0.9999; 0: none
    muon: MuonConfig = field(default_factory=MuonConfig)
    adafactor: AdafactorConfig = field(default_factory=AdafactorConfig)
    soap: SoapConfig = field(default_factory=SoapConfig)
    groups: tuple[GroupConfig, ...] = ()  # parameters with their own learning rate, weight decay or update rule

    def __post_init__(self) -> None:
        RULES.entry(self.name)
        positive("optimizer", self, "lr", "eps")
        not_negative("optimizer", self, "weight_decay")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise UserError(f"optimizer.betas={list(self.betas)} must be two numbers in [0, 1), e.g. [0.9, 0.95]")
        if not 0.0 <= self.ema < 1.0:
            raise UserError(f"optimizer.ema={self.ema} must be in [0, 1), e.g. 0.9999")

    @property
    def whole_matrices(self) -> bool:
        """True if an update rule needs whole matrices."""
        names = {self.name, *(one.optimizer for one in self.groups if one.optimizer)}
        return any(RULES[name].whole_matrices for name in names)

    def of_group(self, number: int) -> OptimizerConfig:
        """Return the settings of a group by its number from 1, or of all other parameters (0)."""
        if not number:
            return replace(self, groups=())
        group = self.groups[number - 1]
        decay = self.weight_decay if group.decay is None else group.decay
        # The group's learning rate is that of all of its parameters, whichever rule they follow.
        muon = replace(self.muon, adamw_lr=0.0) if group.lr else self.muon
        return replace(
            self, name=group.optimizer or self.name, lr=group.lr or self.lr, weight_decay=decay, muon=muon, groups=()
        )
