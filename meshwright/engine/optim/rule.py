"""The interface of an optimizer's update rule, and the lookup of rules by name. Does not import torch.

A rule is arithmetic: the states that it keeps for a parameter, and how one update changes masters and states. Where
these are stored, in which precision and on how many ranks is the business of `engine/optim/flat.py`. The planner,
offload and checkpoints read the rule's states. So a new elementwise optimizer is a file with its rule, which must not
import torch before an update is made, and a line in `RULES` of config/optimizer.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from meshwright.config.optimizer import RULES, OptimizerConfig
from meshwright.errors import UserError
from meshwright.plugins import load_object
from meshwright.spec.traffic.placement import UpdateKind

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.engine.optim.flat import UpdatePart


class StateSpec(NamedTuple):
    """An optimizer state with one element for each element of a parameter.

    Checkpoints name it STATE/PARAMETER, so two rules may share a name only if each can continue from the other's
    values. It is initialised with zeros and stored in `optimizer.state_dtype`, or in fp32 if it is `wide`.
    """

    name: str
    wide: bool = False


class UpdateStep(NamedTuple):
    """The numbers of one update: its number from 1, the learning rate, and the divisor of the stored gradient."""

    number: int
    lr: float
    divisor: float


class Rule(ABC):
    """An update rule that treats all elements in the same way, so that it runs on any range of a flat buffer.

    The planner assumes that an update reads the gradient, reads and writes the master and each of `states`, and is
    memory-bound. A rule with a kernel (`has_kernel`) also updates a range on an accelerator in one
    pass, in the precisions it is stored in, with numbers that are on the device.
    """

    states: ClassVar[tuple[StateSpec, ...]] = ()
    has_kernel: ClassVar[bool] = False

    def __init__(self, config: OptimizerConfig) -> None:
        self.config = config

    @abstractmethod
    def update(self, parts: Sequence[UpdatePart], decay: float, step: UpdateStep) -> None:
        """Update the masters and states of some ranges with this weight decay.

        All tensors are in the precision of updates. The gradients may be overwritten.
        """

    def kernel_numbers(self, updates: Any) -> list[Any]:
        """Return the numbers that the kernel takes in addition to the scale of the gradient.

        `updates` is the number of this update, from 1: a float, or a tensor that the host does not read.
        """
        raise NotImplementedError

    def update_by_kernel(self, part: UpdatePart, lr: float, numbers: Tensor) -> None:
        """Update one range with the kernel.

        `numbers` are on the device: 0 if nothing must change (else 1), the factor of the gradient, and the
        `kernel_numbers`.
        """
        raise NotImplementedError


class MatrixRule(Rule):
    """A rule that updates the matrices of blocks as wholes, and leaves all other parameters to the rule `others`.

    An update has three passes: `direct` on ranges of elements; `transform` on whole matrices, each of which is gathered
    on one rank, its owner; and `update` on ranges again.
    """

    others: ClassVar[type[Rule]]

    @property
    def precision(self) -> str:
        """The precision in which `transform` multiplies matrices, in runs that are not in fp64."""
        return "fp32"

    def matrix_states(self, rows: int, columns: int) -> Mapping[str, tuple[int, ...]]:
        """Return the states that the owner of a matrix keeps for it: their shapes by name.

        They begin with zeros and stay on the device, in the precision of updates. The names are the same for all
        matrices. Checkpoints name them STATE/PARAMETER, as they do those of `states`.
        """
        return {}

    @property
    def config_of_others(self) -> OptimizerConfig:
        """The settings of the rule `others`."""
        return self.config

    @abstractmethod
    def matrix_flops(self, rows: int, columns: int) -> float:
        """Return the FLOPs of `transform` for one matrix, by which matrices are distributed over ranks."""

    @abstractmethod
    def matrix_bytes(self, rows: int, columns: int, element: int) -> float:
        """Return the bytes of workspace that `transform` needs for one matrix of this element size, plus its result."""

    @abstractmethod
    def direct(self, parts: Sequence[UpdatePart], step: UpdateStep) -> None:
        """Replace the gradients of some ranges by the input of `transform`."""

    @abstractmethod
    def transform(self, x: Tensor, states: Sequence[Tensor], step: UpdateStep) -> Tensor:
        """Return the matrices [count, rows, columns] that replace these gradients.

        `states` are the `matrix_states` of all of them, stacked, which are changed in place.
        """


class Rules(NamedTuple):
    """The rules of a group of parameters: the elementwise one, and the one for matrices if there is one."""

    elements: Rule
    matrices: MatrixRule | None

    def of(self, kind: UpdateKind) -> Rule:
        """Return the rule of this kind of parameters of the group."""
        if not kind.matrices:
            return self.elements
        assert self.matrices is not None
        return self.matrices


def rule_class(name: str) -> type[Rule]:
    """Return the rule class of an optimizer's name."""
    rule: type[Rule] = load_object(RULES[name].rule)
    return rule


def rules_of(config: OptimizerConfig) -> tuple[Rules, ...]:
    """Return the rules that a config asks for: those of parameters in no group, and then those of each group."""
    return tuple(_rules(config.of_group(number)) for number in range(len(config.groups) + 1))


def _rules(config: OptimizerConfig) -> Rules:
    rule = rule_class(config.name)(config)
    if isinstance(rule, MatrixRule) != config.whole_matrices:
        base = "MatrixRule" if config.whole_matrices else "Rule"
        raise UserError(
            f"optimizer.name={config.name} is registered with whole_matrices={config.whole_matrices}, so its class "
            f"must be a {base}: correct the RuleEntry or the class"
        )
    return Rules(rule.others(rule.config_of_others), rule) if isinstance(rule, MatrixRule) else Rules(rule, None)
