"""What an optimizer's update rule states of itself, and how it is found by its name. No torch.

A rule knows arithmetic: which states it keeps for a parameter, and how one update changes masters and states. It does
not know where these are stored, in which precision or on how many ranks: that is `engine/optim/flat.py`. The planner,
offload and checkpoints read the rule's states; so a new elementwise optimizer is a file with its rule, which must not
import torch before an update is made, and a line in `RULES` of config/optimizer.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from meshwright.config.optimizer import RULES, OptimizerConfig
from meshwright.errors import UserError
from meshwright.plugins import load_object

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.engine.optim.flat import UpdatePart


class StateSpec(NamedTuple):
    """A state with one element for each element of a parameter. Checkpoints name it STATE/PARAMETER, so two rules may
    share a name only if either can go on from the other's values. It begins with zeros and is stored in
    `optimizer.state_dtype`, or in fp32 if it is `wide`."""

    name: str
    wide: bool = False


class UpdateStep(NamedTuple):
    """The numbers of one update: how many were made with this one, its learning rate, and the divisor that turns the
    stored gradient into the one to use."""

    number: int
    lr: float
    divisor: float


class Rule(ABC):
    """An update rule that treats every element alike, so that it runs on any range of a flat buffer.

    The planner takes an update to read the gradient, to read and write the master and each of `states`, and to compute
    no more than that hides. A rule with a kernel (`has_kernel`) also updates a range on an accelerator in one pass, in
    whatever precisions it is stored in, by numbers that are on the device.
    """

    states: ClassVar[tuple[StateSpec, ...]] = ()
    has_kernel: ClassVar[bool] = False

    def __init__(self, config: OptimizerConfig) -> None:
        self.config = config

    @abstractmethod
    def update(self, parts: Sequence[UpdatePart], decay: float, step: UpdateStep) -> None:
        """Update the masters and states of some ranges, all in the precision of updates, with this weight decay. The
        gradients may be overwritten."""

    def kernel_numbers(self, updates: Any) -> list[Any]:
        """Return the numbers that the kernel takes besides the scale of the gradient, given how many updates were made
        with this one: as a number, or as a tensor that the host does not read."""
        raise NotImplementedError

    def update_by_kernel(self, part: UpdatePart, lr: float, numbers: Tensor) -> None:
        """Update one range by the kernel. `numbers` are on the device: 0 if nothing must change, the factor of the
        gradient, and the `kernel_numbers`."""
        raise NotImplementedError


class MatrixRule(Rule):
    """A rule that updates the matrices of blocks, each as a whole, and leaves all other parameters to the rule
    `others`. An update has three passes: `direct`, on ranges of elements; `transform`, on whole matrices, which the
    storage brings to one rank each; and `update`, on ranges again."""

    others: ClassVar[type[Rule]]

    @abstractmethod
    def matrix_flops(self, rows: int, columns: int) -> float:
        """Return the FLOPs of `transform` for one matrix, by which ranks share the work."""

    @abstractmethod
    def matrix_bytes(self, rows: int, columns: int, element: int) -> float:
        """Return the bytes that `transform` needs beside one matrix of this element size, its result included."""

    @abstractmethod
    def direct(self, parts: Sequence[UpdatePart], step: UpdateStep) -> None:
        """Replace the gradients of some ranges by what `transform` takes."""

    @abstractmethod
    def transform(self, x: Tensor) -> Tensor:
        """Return what takes the place of matrices [count, rows, columns] in the gradients."""


class Rules(NamedTuple):
    """The rules of an optimizer: for parameters whose elements are updated alike, and for matrices if it has one."""

    elements: Rule
    matrices: MatrixRule | None


def rule_class(name: str) -> type[Rule]:
    """Return the rule of an optimizer's name."""
    found: type[Rule] = load_object(RULES[name].rule)
    return found


def rules_of(config: OptimizerConfig) -> Rules:
    """Return the rules that a config asks for."""
    rule = rule_class(config.name)(config)
    if isinstance(rule, MatrixRule) != config.whole_matrices:
        base = "MatrixRule" if config.whole_matrices else "Rule"
        raise UserError(
            f"optimizer.name={config.name} is registered with whole_matrices={config.whole_matrices}, so its class "
            f"must be a {base}: correct the RuleEntry or the class"
        )
    return Rules(rule.others(config), rule) if isinstance(rule, MatrixRule) else Rules(rule, None)
