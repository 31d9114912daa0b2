"""Parts of models that another program builds, cut over tp by the styles of its plan. No torch.

A plan names a style for a module or a parameter, such as `colwise` or `rowwise` in the words of transformers. `STYLES`
defines each style: the dimension of a parameter that tp cuts, and the communication at the module's input and output.
`models/wrapped` builds such modules and puts the same calls around them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from meshwright.errors import UserError, divisors, either
from meshwright.spec.layout.params import Box, Init, ParamRecord
from meshwright.spec.model.graph import Model
from meshwright.spec.model.part import (
    BlockUnit,
    Collective,
    Coordinate,
    Kernels,
    MicroBatch,
    Part,
    Product,
    Records,
    SavedTensor,
    Unit,
    Work,
    hash_once,
)

Cut = Literal["", "out", "in", "rows", "columns"]
InputStep = Literal["", "copy", "slice", "ids", "experts", "share"]
OutputStep = Literal["", "sum", "gather", "rotary"]


class Style(NamedTuple):
    """The meaning of a style of a plan.

    - `cut`: the dimension that tp cuts: the outputs of a product (`out`, rows of the matrix), its inputs (`in`,
      columns; a bias is then whole), or the rows or columns of a table.
    - `before`: the operation on the input. copy: all ranks read it, and its gradient is a sum over them. slice: each
      rank takes its part. ids: each rank looks up the ids in its rows. experts: copy for all tensors that have
      gradients. share: it is divided by the number of ranks.
    - `after`: the operation on the output: sum, gather, or rotary (copy for its last elements).
    - `pieces`: the number of tensors that are concatenated along the cut dimension. Each of them is cut.
    - `partial`: the parameter is whole, and each rank has a partial sum of its gradient.
    """

    cut: Cut = ""
    before: InputStep = ""
    after: OutputStep = ""
    pieces: int = 1
    partial: bool = False

    @property
    def looks_up(self) -> bool:
        """True if the module is a table of which each rank holds some rows."""
        return self.before == "ids"

    @property
    def sums_products(self) -> bool:
        """True if each rank has a partial sum of the module's product, to which a whole bias is added once."""
        return self.after == "sum" and self.cut == "in"


STYLES = {
    "colwise": Style("out", "copy"),
    "colwise_gather_output": Style("out", "copy", "gather"),
    "colwise_rep": Style("out", "copy", "gather"),
    "packed_colwise": Style("out", "copy", pieces=2),
    "rowwise": Style("in", "", "sum"),
    "rowwise_split_input": Style("in", "slice", "sum"),
    "rowwise_rep": Style("in", "slice", "sum"),
    "packed_rowwise": Style("in", pieces=2),
    "embedding_rowwise": Style("rows", "ids", "sum"),
    "embedding_colwise": Style("columns", "", "gather"),
    "replicated_with_grad_allreduce": Style(partial=True),
    "mla_kv_a_proj": Style(after="rotary"),
    "all_reduce": Style(after="sum"),
    "moe_tp_experts": Style(before="experts", after="sum"),
    "moe_identity_expert": Style(before="share"),
    "replicate": Style(),
    "local_params": Style(),  # nothing to do, since parameters are local tensors here anyway
    "": Style(),
}


TABLE_DIMS = {"rows": 0, "columns": 1}  # the dimension of a table that tp cuts, by `Style.cut`


class PlannedParameter(NamedTuple):
    """A parameter of a unit: its local name, its shape, the style that places it, and the global name of the parameter
    that it is tied to, if any."""

    name: str
    shape: tuple[int, ...]
    style: str = ""
    tied: str = ""
    wide: bool = False

    @property
    def dim(self) -> int | None:
        """The dimension that tp cuts, if any."""
        cut, last = STYLES[self.style].cut, len(self.shape) - 1
        if cut in TABLE_DIMS:
            return TABLE_DIMS[cut]
        # Inputs are the last dim of a matrix. A bias has no inputs, so every rank holds all of it.
        if cut == "in":
            return None if self.name.rpartition(".")[2] == "bias" or (self.is_packed and not last) else last
        # Outputs are the second last dim of a matrix or of a stack of experts, and the only dim of a bias.
        return max(0, last - 1) if cut == "out" else None

    @property
    def is_packed(self) -> bool:
        return STYLES[self.style].pieces > 1

    def record(self, at: Coordinate, name: str) -> ParamRecord:
        """Return the record of the parameter. `name` is its global name."""
        tp, index = at.size("tp"), at.index("tp")
        dim, style = self.dim, STYLES[self.style]
        shape = self.shape
        ends = ("embedding",) if self.tied and at.size("embedding") > 1 else ()
        record = ParamRecord(
            name, shape, shape, (), PLACED, decay=len(shape) > 1, tied=self.tied, wide=self.wide, partial=ends,
            copies=ends,
        )  # fmt: skip
        zeros = (0,) * len(shape)
        if dim is None or tp == 1:
            copies = ("tp",) if tp > 1 else ()
            axes = copies if style.partial else ()
            return replace(record, boxes=(Box(zeros, shape, zeros),), partial=(*axes, *ends), copies=(*copies, *ends))
        count = shape[dim] // style.pieces // tp
        if count * style.pieces * tp != shape[dim]:
            size = shape[dim] // style.pieces
            raise UserError(
                f"layout.tp={tp} does not divide the {size} that {name} is cut by ({self.style}): try "
                f"layout.tp={either(divisors(size)[:6])}"
            )

        def sized(n: int) -> tuple[int, ...]:
            return (*shape[:dim], n, *shape[dim + 1 :])

        def corner(n: int) -> tuple[int, ...]:
            return (*zeros[:dim], n, *zeros[dim + 1 :])

        # Each concatenated tensor is cut by itself, and this rank's shards of them are concatenated locally.
        boxes = tuple(
            Box(corner((piece * tp + index) * count), sized(count), corner(piece * count))
            for piece in range(style.pieces)
        )
        return replace(record, local_shape=sized(count * style.pieces), boxes=boxes)


PLACED = Init("placed")


class PlannedCall(NamedTuple):
    """A collective over tp in one micro-batch, of `width` elements per token."""

    phase: str
    op: str
    width: int


@dataclass(frozen=True)
class PlannedPart(Part):
    """The modules of one unit as a plan cuts them, with their parameters and their communication over tp."""

    parameters: tuple[PlannedParameter, ...]
    calls: tuple[PlannedCall, ...] = ()
    kept_whole: float = 0.0  # measured elements per token that every tp rank saves
    kept_cut: float = 0.0  # measured elements per token that are divided over tp
    used: int = 1  # the number of experts per token
    logits: int = 0  # of a head: the size of the vocabulary, since every tp rank has all logits

    __hash__ = hash_once

    def records(self, at: Coordinate, name: str) -> Records:
        return {each.name: each.record(at, each.tied or f"{name}{each.name}") for each in self.parameters}

    def collectives(self, at: Coordinate, batch: MicroBatch) -> Iterator[Collective]:
        for phase, op, width in self.calls:
            yield Collective(phase, "tp", op, batch.tokens(at) * width * batch.element)

    def saved(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[SavedTensor]:
        """Yield the measured activations and, for a head, its log-probabilities."""
        tokens = batch.tokens(at)
        elements = self.kept_whole + self.kept_cut / (at.size("tp") if self.calls else 1)
        yield SavedTensor("activations", tokens * elements * batch.element)
        yield SavedTensor("log-probabilities", tokens * self.logits * batch.wide)

    def workspace(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """Return the bytes of the logits and of their gradient, in accumulation precision."""
        return 2.0 * batch.tokens(at) * self.logits * batch.wide

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        """Return the products of all matrices except tables. Each expert of a stack multiplies some of the tokens."""
        tokens, products = batch.tokens(at), []
        for parameter in self.parameters:
            if len(parameter.shape) >= 2 and not STYLES[parameter.style].looks_up:
                *stack, n, k = parameter.record(at, parameter.name).local_shape
                rows = tokens * self.used // stack[0] if stack else tokens
                products.append(Product(parameter.name, rows, n, k, stack[0] if stack else 1, defers=False))
        return Work(tuple(products), kernels=len(products))


@dataclass(frozen=True)
class PlannedBlock(BlockUnit):
    """A block without the structure of norms and bodies. All figures come from its only part."""

    __hash__ = hash_once

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        return Unit.work(self, at, batch, kernels)

    def saved(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> tuple[SavedTensor, ...]:
        return Unit.saved(self, at, batch, kernels)

    def workspace(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        return Unit.workspace(self, at, batch, kernels) + 3.0 * batch.tokens(at) * self.hidden * batch.element

    def split_workspace(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        return Unit.split_workspace(self, at, batch, kernels)


@dataclass(frozen=True)
class PlannedModel(Model):
    """A model whose blocks are a list inside a module.

    `path` is the name of the list in the module, and the prefix of the names of the blocks' parameters. `beside` are
    the parameters that belong neither to the embedding nor to the blocks nor to the modules after them.
    """

    path: str = ""
    family: str = ""
    beside: tuple[str, ...] = ()

    __hash__ = hash_once
