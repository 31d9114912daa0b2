"""The job that is planned: one training step of a config on a number of devices, with a software stack. Every planning
command asks this one value: parameters, FLOPs, bytes, memory and time are folds over its model's units. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, wraps
from itertools import pairwise
from typing import Any, Concatenate, ParamSpec, TypeVar

from meshwright.config.rules import batch_problem, batch_unit, check
from meshwright.config.sections import Config
from meshwright.engine.sharding.compression.make import gradient_sums, replica_sums
from meshwright.engine.sharding.reducers import ReducerPlan, mixing
from meshwright.errors import UserError
from meshwright.plan.stack import BYTES, Stack, States, own_stack, states_of
from meshwright.spec.layout import Layout
from meshwright.spec.layout.context import CONTEXT_PLANS, NOT_SHARED
from meshwright.spec.layout.layout import DENSE_AXES, EXPERT_AXES, EXPERT_WORDS
from meshwright.spec.layout.params import DATA_AXES
from meshwright.spec.model.description import data_fields, layout_of, model_of, stages_of
from meshwright.spec.model.graph import Model, Stage
from meshwright.spec.model.part import Coordinate, Kernels, MicroBatch, Unit, coordinate_of
from meshwright.spec.schedule.kinds import computes, placement_of
from meshwright.spec.schedule.table import Op
from meshwright.spec.traffic.placement import shard_axes

FIELD_BYTES = {
    "int64": 8, "float64": 8, "int32": 4, "float32": 4, "int16": 2, "float16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


Figure = TypeVar("Figure")
More = ParamSpec("More")


def shared(function: Callable[[Job], Figure]) -> cached_property[Figure]:
    """Makes a property that is computed once for all jobs that differ in ZeRO or recomputation alone: the search tries
    many of these."""

    @wraps(function)
    def found(job: Job) -> Figure:
        if job.origin is None:
            return function(job)
        same: Figure = getattr(job.origin, function.__name__)
        return same

    return cached_property(found)


def remembered(
    *sections: str,
) -> Callable[[Callable[Concatenate[Job, More], Figure]], Callable[Concatenate[Job, More], Figure]]:
    """Remembers a function of a job, which depends on these sections of its config among ZeRO and recomputation, for
    all jobs that share the rest."""

    def made(function: Callable[Concatenate[Job, More], Figure]) -> Callable[Concatenate[Job, More], Figure]:
        @wraps(function)
        def asked(job: Job, /, *args: More.args, **kwargs: More.kwargs) -> Figure:
            key = (function, *(getattr(job.config, section) for section in sections), *args, *kwargs.items())
            if key not in job.known:
                job.known[key] = function(job, *args, **kwargs)
            found: Figure = job.known[key]
            return found

        return asked

    return made


@dataclass(frozen=True)
class Job:
    """One step of `config` on `world` ranks."""

    config: Config
    world: int
    stack: Stack
    cluster_node: int = 0  # devices per node, unless the config says
    samples: int | None = None  # the step's global batch (None: the config's, at the end of a ramp)
    fields: Mapping[str, str] | None = None  # name -> dtype of a dataset that is no token file
    monitored: int = 0  # values that `forward_step` returns beside the loss
    terms: int = 0  # terms of the loss that a program declares; 0: the model's own
    host: bool = False  # the devices are a machine's processors
    reducer: ReducerPlan | None = None  # sums the gradients; None: as `comm` says, after `warmup_steps`
    imbalance: float = 1.0  # rows of the busiest rank's experts over the mean
    step: int | None = None  # its number, which decides what replicas synchronise in it; None: nothing
    replica: int | None = None  # whose step it is, where they take different numbers of samples
    rank: int | None = None  # whose calls are asked for, where ranks of a stage send different amounts
    origin: Job | None = field(default=None, init=False, repr=False, compare=False)  # see `shared`

    def replaced(self, **sections: Mapping[str, Any]) -> Job:
        """Returns the same job with some keys of its config changed, section by section."""
        changed = {name: replace(getattr(self.config, name), **keys) for name, keys in sections.items()}
        job = replace(self, config=replace(self.config, **changed))
        if sections.keys() <= {"zero", "recompute"}:
            object.__setattr__(job, "origin", self.origin or self)
        return job

    @shared
    def known(self) -> dict[object, Any]:
        """The figures of functions that are `remembered`."""
        return {}

    @property
    def _placed_alike(self) -> Job | None:
        """The origin, unless ZeRO's keys cut the layout into parts."""
        return None if self.config.zero.stays_in_node or self.config.comm.gather.node_copy else self.origin

    @cached_property
    def layout(self) -> Layout:
        same = self._placed_alike
        return same.layout if same else layout_of(self.config, self.world, self.cluster_node)

    @shared
    def sums(self) -> ReducerPlan:
        """How gradients are summed over the data axes."""
        return self.reducer or gradient_sums(self.config, self.layout.node_size or self.layout.world).plan

    @shared
    def outer_sums(self) -> ReducerPlan:
        """How replicas sum their changes."""
        return replica_sums(self.config.train.local, self.config.train.seed).plan

    @property
    def mixing(self) -> int:
        """Where parameters begin in buffers whose elements a sum mixes, see `ReducerPlan`; 0 if none does."""
        return mixing(self.sums, *([self.outer_sums] if self.layout.replicas > 1 else []))

    @property
    def hides_gradients(self) -> float:
        """The share of the sums over the data axes that can be hidden, where their reducer overlaps backward."""
        return self.stack.hide_dp if self.config.comm.overlap.gradients else 0.0

    @property
    def hides_weights(self) -> float:
        return self.stack.hide_dp if self.config.comm.overlap.weights else 0.0

    @property
    def hides_sends(self) -> float:
        return self.stack.hide_pp if self.config.comm.overlap.pipeline else 0.0

    @property
    def node_size(self) -> int:
        return self.config.layout.node_size or self.cluster_node or self.world

    @shared
    def model(self) -> Model:
        return model_of(self.config)

    @cached_property
    def at(self) -> Coordinate:
        """The coordinate of rank 0, or of `rank`: the bytes that parts declare are the same for all ranks of a
        layout."""
        if (same := self._placed_alike) is not None:
            return same.at
        other = CONTEXT_PLANS["ring"] if self.layout.cp > 1 else NOT_SHARED
        context = self.config.context_plan if self.stack.own else other
        pieces = self.config.comm.overlap.piece_flops if self.stack.own else None
        return coordinate_of(self.layout, self.rank or 0, self.config.layout.sequence_parallel, context, pieces)

    @shared
    def batch(self) -> MicroBatch:
        c = self.config
        prefix = c.data.blanks.source_square if c.objective_facts.fills_blanks else 0.0
        element = BYTES[c.train.precision]
        return MicroBatch(c.train.micro_batch, c.model.seq, element, c.has_segments, self.imbalance, prefix)

    @cached_property
    def kernels(self) -> Kernels:
        return self.stack.kernels(self.host, self.config.recompute.pieces, self.config.train.precision == "fp8")

    @cached_property
    def states(self) -> States:
        return self.stack.states or states_of(self.config, self.stack.own)

    @property
    def global_batch(self) -> int:
        return self.config.train.global_batch if self.samples is None else self.samples

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches per rank in the step, of the replica with the most samples."""
        parts = self.config.train.local.parts(self.global_batch, self.layout.replicas)
        samples = max(map(len, parts)) if self.replica is None else len(parts[self.replica])
        return max(1, samples // (self.layout.dp * self.config.train.micro_batch))

    @property
    def releases_gradients(self) -> bool:
        """True if whole gradients in ZeRO stages 0 and 1 are allocated only from backward to the update
        (`engine.step.releases_grads`)."""
        return self.stack.own and self.micro_batches == 1 and not self.host

    @property
    def declared_terms(self) -> int:
        """The number of declared terms of the loss; 0 where there is one, which needs no declaration."""
        own = len(self.model.terms)
        return self.terms or (own if own > 1 else 0)

    @property
    def tokens(self) -> int:
        """The number of tokens of the whole step."""
        return self.global_batch * self.config.model.seq

    @cached_property
    def data_fields(self) -> Mapping[str, str]:
        """The fields of a sample, name -> dtype."""
        if self.fields is not None:
            return self.fields
        return dict.fromkeys(data_fields(self.config), "int64")

    @shared
    def placement(self) -> tuple[tuple[int, int], ...]:
        """The (pipeline rank, chunk) of every virtual stage."""
        return placement_of(self.config.pipeline.schedule, self.layout.pp, self.config.layout.chunks)

    @shared
    def splits_backwards(self) -> bool:
        """True if the schedule computes weight gradients separately from input gradients."""
        c = self.config
        order = computes(c.pipeline.schedule, c.layout.pp, 1, c.layout.chunks, 0)
        return any(action.op is Op.INPUT_GRAD for action in order)

    @shared
    def chunks(self) -> tuple[tuple[Stage, ...], ...]:
        """The stages of every pipeline rank, by chunk."""
        found: list[dict[int, Stage]] = [{} for _ in range(self.layout.pp)]
        for stage, (rank, chunk) in zip(stages_of(self.config), self.placement, strict=True):
            found[rank][chunk] = stage
        return tuple(tuple(stages[chunk] for chunk in sorted(stages)) for stages in found)

    def units(self, stage: Stage) -> tuple[tuple[Unit, int], ...]:
        """Returns the units of a stage with the number of each kind: embedding, kinds of blocks, head."""
        return units_of(self.model, stage)

    def rank_units(self, pp_rank: int) -> list[tuple[Unit, int]]:
        """Returns the units of all chunks of a pipeline rank with the number of each kind."""
        return [pair for stage in self.chunks[pp_rank] for pair in self.units(stage)]

    @property
    def scatters_sends(self) -> bool:
        """Whether each tp rank sends only its share to the next stage, where it is gathered again."""
        return self.stack.scatter_sends and self.layout.tp > 1 and not self.at.splits_tokens

    @shared
    def representative_ranks(self) -> tuple[int, ...]:
        """For every pipeline rank, the first with the same kinds of units, and so the same compute and memory."""
        first: dict[tuple[object, ...], int] = {}
        held = (tuple(self.units(stage) for stage in stages) for stages in self.chunks)
        return tuple(first.setdefault(units, rank) for rank, units in enumerate(held))

    def sharding(self, data_axes: str = DATA_AXES) -> tuple[int, int, int]:
        """Returns the effective ZeRO stage of parameters that are summed over these axes, the ranks that divide their
        states, and the copies of each share."""
        stage, shards, replicas = shard_axes(self.layout, self.config.zero, data_axes)
        return stage, self.layout.size(shards) if shards else 1, self.layout.size(replicas) if replicas else 1


@lru_cache(maxsize=20_000)
def units_of(model: Model, stage: Stage) -> tuple[tuple[Unit, int], ...]:
    return tuple(Counter(node.unit for node in model.nodes_of(stage)).items())


def kept_together(units: Sequence[Unit], together: int) -> list[tuple[int, int]]:
    """Returns the ranges of units that are kept and released together: single units, or runs of blocks that are
    recomputed together."""
    found: list[tuple[int, int]] = []
    for at, unit in enumerate(units):
        begin, end = found[-1] if found else (0, 0)
        block = unit.stackable and bool(found) and units[begin].stackable
        if block and end - begin < together:
            found[-1] = (begin, at + 1)
        else:
            found.append((at, at + 1))
    return found


def job_of(config: Config, world: int, stack: Stack | None = None, **more: Any) -> Job:
    """Returns the job of a config, by default on our own stack, if its step can be divided among `world` ranks."""
    host = more.pop("host", config.run.device == "cpu")
    job = Job(config, world, stack or own_stack(config, host), host=host, **more)
    c = config.layout
    if world < 1 or world % c.least_world:
        word, size = (" x replicas", f" x {c.replicas}") if c.replicas > 1 else ("", "")
        raise UserError(
            f"{world} devices are not divisible by tp x cp x pp{word} = {c.tp} x {c.cp} x {c.pp}{size} = "
            f"{c.least_world}: change the number of devices or the layout"
        )
    unit, product = batch_unit(config, world)
    if job.samples is None and job.global_batch % unit:
        raise UserError(f"train.global_batch={job.global_batch} {batch_problem(config, world, job.global_batch)}")
    if job.global_batch < 1 or job.global_batch % unit:
        near = max(1, job.global_batch // unit) * unit
        raise UserError(f"samples={job.global_batch} is not a multiple of {product}: try {near}")
    for name, dtype in job.data_fields.items():
        if dtype not in FIELD_BYTES:
            raise UserError(f"field '{name}' has the unknown dtype '{dtype}': use one of {', '.join(FIELD_BYTES)}")
    return job


def checked_job(config: Config, world: int, stack: Stack | None = None, **more: Any) -> Job:
    """Returns the job of a config that passes all rules for training."""
    check(config, world)
    return job_of(config, world, stack, **more)


def ranks_per_node(layout: Layout, axis: str) -> int:
    """Returns how many ranks of one group of `axis` are on one node, for the group that spans the most nodes."""
    return _ranks_per_node(replace(layout, parts=()) if layout.parts and "." not in axis else layout, axis)


@lru_cache(maxsize=100_000)
def _ranks_per_node(layout: Layout, axis: str) -> int:
    node = layout.node_size or layout.world
    first = layout.group(axis, 0)
    alike = "." not in axis and _groups_align_with_nodes(layout, node, axis)
    groups = (first,) if alike else layout.groups(axis)
    return max(1, len(first) // max(len({rank // node for rank in group}) for group in groups))


def _groups_align_with_nodes(layout: Layout, node_size: int, axis: str = "pp") -> bool:
    """Returns whether no group of neighbours, in the view of the axis, begins inside one node and ends inside another,
    so that all are alike."""
    expert = axis in ("ep", "etp", "edp")
    words = [EXPERT_WORDS.get(word, word) if expert else word for word in layout.order.split("-")]
    span = 1
    for word in words:
        if word in (EXPERT_AXES if expert else DENSE_AXES):
            span *= layout.axis_size(word)
            if node_size % span and span % node_size:
                return False
    return True


@lru_cache(maxsize=100_000)
def senders_across(layout: Layout, around: bool) -> int:
    """Returns the largest number of ranks on one node that send to a next stage on another node. With `around` the last
    pipeline rank also sends to the first."""
    node = layout.node_size or layout.world
    if _groups_align_with_nodes(layout, node):  # one rank of each group on a node sends to another node, if any does
        here = ranks_per_node(layout, "pp")
        return min(layout.world, node) // here if here < layout.pp else 0
    found: Counter[int] = Counter()
    for group in layout.groups("pp"):
        for hop in [*pairwise(group), *([(group[-1], group[0])] if around else [])]:
            found[hop[0] // node] += layout.crosses_node(hop)
    return max(found.values(), default=0)
