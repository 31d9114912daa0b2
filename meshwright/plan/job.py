"""Defines the job that is planned: one training step of a config on a number of devices, with a software stack.

Every planning command starts from this value. Parameters, FLOPs, bytes, memory and time are sums over the units of its
model. No torch.
"""

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
from meshwright.engine.sharding.reducers import ReducerPlan, mixing_alignment
from meshwright.errors import UserError
from meshwright.plan.stack import BYTES, Stack, States, own_stack, states_of
from meshwright.spec.layout import Layout
from meshwright.spec.layout.context import CONTEXT_PLANS, WHOLE_SEQUENCES
from meshwright.spec.layout.layout import DENSE_AXES, EXPERT_AXES, EXPERT_WORDS, ONLY_EXPERTS
from meshwright.spec.layout.params import DATA_AXES
from meshwright.spec.model.description import data_fields, layout_of, model_of, stages_of
from meshwright.spec.model.graph import Model, Stage
from meshwright.spec.model.part import Coordinate, Kernels, MicroBatch, Unit, coordinate_of
from meshwright.spec.schedule.kinds import computes, placement_of
from meshwright.spec.schedule.table import Op
from meshwright.spec.traffic.placement import shard_axes

# Bytes per element of a batch's field, by dtype.
FIELD_BYTES = {
    "int64": 8, "float64": 8, "int32": 4, "float32": 4, "int16": 2, "float16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


Figure = TypeVar("Figure")
More = ParamSpec("More")


def shared_property(function: Callable[[Job], Figure]) -> cached_property[Figure]:
    """Make a property that is computed once for all jobs that differ only in ZeRO or recomputation.

    The search tries many such jobs.
    """

    @wraps(function)
    def from_origin(job: Job) -> Figure:
        if job.origin is None:
            return function(job)
        same: Figure = getattr(job.origin, function.__name__)
        return same

    return cached_property(from_origin)


def remember(
    *sections: str,
) -> Callable[[Callable[Concatenate[Job, More], Figure]], Callable[Concatenate[Job, More], Figure]]:
    """Cache a function of a job for all jobs that differ only in ZeRO or recomputation.

    `sections` names the config sections among these two on which the function depends.
    """

    def decorate(function: Callable[Concatenate[Job, More], Figure]) -> Callable[Concatenate[Job, More], Figure]:
        @wraps(function)
        def cached(job: Job, /, *args: More.args, **kwargs: More.kwargs) -> Figure:
            key = (function, *(getattr(job.config, section) for section in sections), *args, *kwargs.items())
            if key not in job.cached_results:
                job.cached_results[key] = function(job, *args, **kwargs)
            figure: Figure = job.cached_results[key]
            return figure

        return cached

    return decorate


@dataclass(frozen=True)
class Job:
    """One step of `config` on `world` ranks."""

    config: Config
    world: int
    stack: Stack
    cluster_node: int = 0  # Devices per node, unless the config sets them.
    samples: int | None = None  # The step's global batch; None: the config's, at the end of a ramp.
    fields: Mapping[str, str] | None = None  # The fields of a dataset other than a token file: name -> dtype.
    monitored: int = 0  # The number of values that `forward_step` returns in addition to the loss.
    terms: int = 0  # The number of loss terms that a program declares; 0: the model's own.
    host: bool = False  # True if the devices are a machine's CPU cores.
    reducer: ReducerPlan | None = None  # Sums the gradients; None: as `comm` says, after `warmup_steps`.
    imbalance: float = 1.0  # The rows of the busiest rank's experts over the mean.
    step: int | None = None  # The step's number, on which the sums of replicas depend; None: replicas sum nothing.
    replica: int | None = None  # The replica that is planned, if replicas take different numbers of samples.
    rank: int | None = None  # The rank whose calls are planned, if ranks of a stage send different amounts.
    origin: Job | None = field(default=None, init=False, repr=False, compare=False)  # See `shared_property`.

    def with_keys(self, **sections: Mapping[str, Any]) -> Job:
        """Return the same job with some keys of its config changed, given by section."""
        changed = {name: replace(getattr(self.config, name), **keys) for name, keys in sections.items()}
        job = replace(self, config=replace(self.config, **changed))
        # `origin` is no argument of the constructor, and the dataclass is frozen.
        if sections.keys() <= {"zero", "recompute"}:
            object.__setattr__(job, "origin", self.origin or self)
        return job

    @shared_property
    def cached_results(self) -> dict[object, Any]:
        """Return the cached results of functions that `remember` wraps."""
        return {}

    @property
    def _placed_alike(self) -> Job | None:
        """The origin if it has the same layout: some keys of ZeRO and gathers divide axes of the layout into parts."""
        return None if self.config.zero.stays_in_node or self.config.comm.gather.node_copy else self.origin

    @cached_property
    def layout(self) -> Layout:
        """The layout of the ranks."""
        same = self._placed_alike
        return same.layout if same else layout_of(self.config, self.world, self.cluster_node)

    @shared_property
    def sums(self) -> ReducerPlan:
        """Return the reducer that sums gradients over the data axes."""
        return self.reducer or gradient_sums(self.config, self.layout.node_size or self.layout.world).plan

    @shared_property
    def outer_sums(self) -> ReducerPlan:
        """Return the reducer that sums the changes of replicas."""
        return replica_sums(self.config.train.local, self.config.train.seed).plan

    @property
    def mixing_alignment(self) -> int:
        """The alignment of parameters in buffers whose elements a sum mixes (see `ReducerPlan`); 0 if none does."""
        return mixing_alignment(self.sums, *([self.outer_sums] if self.layout.replicas > 1 else []))

    @property
    def hides_gradients(self) -> float:
        """The share of the gradient reductions that can be hidden, if their reducer overlaps backward."""
        return self.stack.hide_dp if self.config.comm.overlap.gradients else 0.0

    @property
    def hides_weights(self) -> float:
        """The share of the weight gathers that can be hidden."""
        return self.stack.hide_dp if self.config.comm.overlap.weights else 0.0

    @property
    def hides_sends(self) -> float:
        """The share of the sends between stages that can be hidden."""
        return self.stack.hide_pp if self.config.comm.overlap.pipeline else 0.0

    @property
    def node_size(self) -> int:
        """The number of ranks on a node."""
        return self.config.layout.node_size or self.cluster_node or self.world

    @shared_property
    def model(self) -> Model:
        """Return the model as a graph of units."""
        return model_of(self.config)

    @cached_property
    def at(self) -> Coordinate:
        """The coordinate of rank 0, or of `rank`. Parts declare the same bytes for all ranks of a layout."""
        if (same := self._placed_alike) is not None:
            return same.at
        # Other programs are assumed to pass keys and values around a ring.
        assumed = CONTEXT_PLANS["ring"] if self.layout.cp > 1 else WHOLE_SEQUENCES
        context = self.config.context_plan if self.stack.own else assumed
        pieces = self.config.comm.overlap.piece_flops if self.stack.own else None
        return coordinate_of(self.layout, self.rank or 0, self.config.layout.sequence_parallel, context, pieces)

    @shared_property
    def batch(self) -> MicroBatch:
        """Return one micro-batch of the step."""
        c = self.config
        prefix = c.data.blanks.source_square if c.objective_facts.fills_blanks else 0.0
        element = BYTES[c.train.precision]
        return MicroBatch(c.train.micro_batch, c.model.seq, element, c.has_segments, self.imbalance, prefix)

    @cached_property
    def kernels(self) -> Kernels:
        """The kernels of the stack, and the tensors that they save for backward."""
        fp8 = self.config.train.precision_facts.scales_products
        return self.stack.kernels(self.host, self.config.recompute.pieces, fp8)

    @cached_property
    def states(self) -> States:
        """The bytes and the places of the states: weights, gradients, masters and moments."""
        return self.stack.states or states_of(self.config, self.stack.own)

    @property
    def global_batch(self) -> int:
        """The number of samples in the step."""
        return self.config.train.global_batch if self.samples is None else self.samples

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches per rank in the step, for the chosen replica or the one with the most samples."""
        parts = self.config.train.local.parts(self.global_batch, self.layout.replicas)
        samples = max(map(len, parts)) if self.replica is None else len(parts[self.replica])
        return max(1, samples // (self.layout.dp * self.config.train.micro_batch))

    @property
    def releases_gradients(self) -> bool:
        """True if ZeRO stages 0 and 1 allocate whole gradients only between backward and the update.

        See `engine.step.releases_grads`.
        """
        return self.stack.own and self.micro_batches == 1 and not self.host

    @property
    def declared_terms(self) -> int:
        """The number of declared loss terms. It is 0 for a single term, which needs no declaration."""
        own = len(self.model.terms)
        return self.terms or (own if own > 1 else 0)

    @property
    def tokens(self) -> int:
        """The number of tokens of the whole step."""
        return self.global_batch * self.config.model.seq

    @cached_property
    def data_fields(self) -> Mapping[str, str]:
        """The fields of a sample: name -> dtype."""
        if self.fields is not None:
            return self.fields
        return dict.fromkeys(data_fields(self.config), "int64")

    @shared_property
    def placement(self) -> tuple[tuple[int, int], ...]:
        """Return the (pipeline rank, chunk) of every virtual stage."""
        return placement_of(self.config.pipeline.schedule, self.layout.pp, self.config.layout.chunks)

    @shared_property
    def splits_backwards(self) -> bool:
        """Return True if the schedule computes weight gradients separately from input gradients."""
        c = self.config
        order = computes(c.pipeline.schedule, c.layout.pp, 1, c.layout.chunks, 0)
        return any(action.op is Op.INPUT_GRAD for action in order)

    @shared_property
    def chunks(self) -> tuple[tuple[Stage, ...], ...]:
        """Return the stages of every pipeline rank, by chunk."""
        by_rank: list[dict[int, Stage]] = [{} for _ in range(self.layout.pp)]
        for stage, (rank, chunk) in zip(stages_of(self.config), self.placement, strict=True):
            by_rank[rank][chunk] = stage
        return tuple(tuple(stages[chunk] for chunk in sorted(stages)) for stages in by_rank)

    def units(self, stage: Stage) -> tuple[tuple[Unit, int], ...]:
        """Return the kinds of units in a stage (embedding, blocks, head), with the number of each."""
        return units_of(self.model, stage)

    def rank_units(self, pp_rank: int) -> list[tuple[Unit, int]]:
        """Return the kinds of units in all chunks of a pipeline rank, with the number of each."""
        return [pair for stage in self.chunks[pp_rank] for pair in self.units(stage)]

    @property
    def scatters_sends(self) -> bool:
        """True if each tp rank sends only its share to the next stage, where the shares are gathered again."""
        return self.stack.scatter_sends and self.layout.tp > 1 and not self.at.splits_tokens

    @shared_property
    def representative_ranks(self) -> tuple[int, ...]:
        """Return, for every pipeline rank, the first one with the same units.

        Both have the same compute and memory.
        """
        first: dict[tuple[object, ...], int] = {}
        held = (tuple(self.units(stage) for stage in stages) for stages in self.chunks)
        return tuple(first.setdefault(units, rank) for rank, units in enumerate(held))

    def sharding_over(self, data_axes: str = DATA_AXES) -> tuple[int, int, int]:
        """Return the effective ZeRO stage for gradients summed over these axes, the number of shards, and of copies."""
        stage, shards, replicas = shard_axes(self.layout, self.config.zero, data_axes)
        return stage, self.layout.size(shards) if shards else 1, self.layout.size(replicas) if replicas else 1


@lru_cache(maxsize=20_000)
def units_of(model: Model, stage: Stage) -> tuple[tuple[Unit, int], ...]:
    """Return the kinds of units in a stage of a model, with the number of each."""
    return tuple(Counter(node.unit for node in model.nodes_of(stage)).items())


def saved_together(units: Sequence[Unit], together: int) -> list[tuple[int, int]]:
    """Return the ranges [begin, end) of units whose activations are saved and freed together.

    A range is a single unit, or a run of up to `together` blocks that are recomputed together.
    """
    ranges: list[tuple[int, int]] = []
    for at, unit in enumerate(units):
        begin, end = ranges[-1] if ranges else (0, 0)
        block = unit.stackable and bool(ranges) and units[begin].stackable
        if block and end - begin < together:
            ranges[-1] = (begin, at + 1)
        else:
            ranges.append((at, at + 1))
    return ranges


def job_of(config: Config, world: int, stack: Stack | None = None, **more: Any) -> Job:
    """Return the job of a config, by default on our own stack. Refuse a step that `world` ranks can't divide."""
    host = more.pop("host", config.run.on_cpu)
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
    """Return the job of a config after checking all rules for training."""
    check(config, world)
    return job_of(config, world, stack, **more)


def ranks_per_node(layout: Layout, axis: str) -> int:
    """Return the number of ranks on one node for the group of `axis` that spans the most nodes."""
    # The groups of a whole axis don't depend on parts of axes. Without parts, more layouts share a cached result.
    return _ranks_per_node(replace(layout, parts=()) if layout.parts and "." not in axis else layout, axis)


@lru_cache(maxsize=100_000)
def _ranks_per_node(layout: Layout, axis: str) -> int:
    node = layout.node_size or layout.world
    first = layout.group(axis, 0)
    # If groups align with nodes, the first group represents all. Otherwise every group is examined, which is slow.
    alike = "." not in axis and _groups_align_with_nodes(layout, node, axis)
    groups = (first,) if alike else layout.groups(axis)
    return max(1, len(first) // max(len({rank // node for rank in group}) for group in groups))


def _groups_align_with_nodes(layout: Layout, node_size: int, axis: str = "pp") -> bool:
    """Return True if every group of neighbouring ranks, as the axis orders them, fills whole nodes or fits into one.

    Then all groups are alike, and one of them stands for all.
    """
    expert = axis in ONLY_EXPERTS
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
    """Return the largest number of ranks on one node that send to a next stage on another node.

    With `around`, the last pipeline rank also sends to the first.
    """
    node = layout.node_size or layout.world
    # If groups align with nodes, one rank of each group on a node sends to another node, or none does.
    if _groups_align_with_nodes(layout, node):
        here = ranks_per_node(layout, "pp")
        return min(layout.world, node) // here if here < layout.pp else 0
    senders: Counter[int] = Counter()
    for group in layout.groups("pp"):
        for hop in [*pairwise(group), *([(group[-1], group[0])] if around else [])]:
            senders[hop[0] // node] += layout.crosses_node(hop)
    return max(senders.values(), default=0)
