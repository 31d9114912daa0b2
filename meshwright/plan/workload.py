"""What the planner plans: a model, a layout, a batch and how states are kept, as one plain value. No torch.

A config and a line of a table of published runs both become a `Workload`; FLOPs, memory and time are functions of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, cast

from meshwright.config.sections import Config, ModelConfig
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.models.description import kv_parts, stages
from meshwright.plan.flops import Cut, head_work, layer_work

# Bytes of one number of an activation or of a parameter that a product reads.
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}


@dataclass(frozen=True)
class Parallel:
    """How the devices are divided. `shard` is how many ranks share one copy of the sharded states (0: dp x cp)."""

    world: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    chunks: int = 1
    order: str = "tp-cp-ep-dp-pp"
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    zero: int = 0
    shard: int = 0

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def shard_ranks(self) -> int:
        return self.shard or self.dp * self.cp


@dataclass(frozen=True)
class States:
    """Bytes of one element of each kind of state, and where the states live."""

    param: int = 2
    grad: int = 4
    master: int = 4
    moment: int = 4
    moments: int = 2
    keeps_param: bool = True  # beside the master, parameters are kept in the precision that products read
    grad_copy: int = 0  # bytes a parameter of a second gradient in another precision
    step_copy: int = 0  # bytes an own parameter that the update needs for a while
    buckets: bool = False  # DeepSpeed's fixed buckets and live parameters
    optimizer_on: str = "device"  # device, cpu or disk
    params_on: str = "device"
    checkpoints_on: str = "device"  # where the inputs of recomputed blocks wait


@dataclass(frozen=True)
class Workload:
    """One training step of a model on a number of devices."""

    model: ModelConfig
    parallel: Parallel
    micro_batch: int
    global_batch: int
    precision: str = "bf16"
    # none, full, every:N, core (attention's core alone), or selective: whatever a stack calls so.
    recompute: str = "none"
    states: States = field(default_factory=States)
    split: tuple[int, ...] = ()
    node_size: int = 8
    fused_loss: bool = False  # logits are made and used piece by piece
    own_loss: bool = False  # in the pieces that our own loss takes
    documents: bool = False  # attention stays within a document, by a mask that is kept

    @property
    def world(self) -> int:
        return self.parallel.world

    @property
    def micro_batches(self) -> int:
        return max(1, self.global_batch // (self.parallel.dp * self.micro_batch))

    @property
    def tokens(self) -> int:
        """Tokens of the whole step."""
        return self.global_batch * self.model.seq

    @property
    def rank_tokens(self) -> int:
        """Tokens of one micro-batch that one rank works on (a tp group works on the same ones)."""
        return self.micro_batch * self.model.seq // self.parallel.cp

    @property
    def activation_bytes(self) -> int:
        return BYTES[self.precision]

    @cached_property
    def layout(self) -> Layout:
        p = self.parallel
        return Layout(
            p.world, tp=p.tp, pp=p.pp, cp=p.cp, order=p.order, node_size=self.node_size,
            parts=kv_parts(self.model, p.tp),
        )  # fmt: skip

    @cached_property
    def stage_layers(self) -> tuple[tuple[int, ...], ...]:
        """Layers of each chunk of each pipeline rank: [pp rank][chunk]."""
        p = self.parallel
        sizes = [len(stage.layers) for stage in stages(self.model.layers, p.pp * p.chunks, self.split)]
        return tuple(tuple(sizes[chunk * p.pp + rank] for chunk in range(p.chunks)) for rank in range(p.pp))

    def with_parallel(self, **changes: Any) -> Workload:
        return replace(self, parallel=replace(self.parallel, **changes))


def head_worth(model: ModelConfig) -> float:
    """The layers whose products equal those of the output layer."""
    cut = Cut(1, model.seq)
    return head_work(model, cut).flops / layer_work(model, cut, True).flops


def balanced_split(model: ModelConfig, stages: int) -> tuple[int, ...]:
    """Layers of each stage when the output layer counts as the layers it is worth: the longest stage is shortest."""
    worth, others = head_worth(model), stages - 1
    exact = (model.layers + worth) / stages - worth
    tried = {max(0, min(model.layers - others, round(exact) + step)) for step in (-1, 0, 1)}
    last = min(tried, key=lambda n: (max(-(-(model.layers - n) // others), n + worth), -n))
    rest = model.layers - last
    return (*(rest // others + (i < rest % others) for i in range(others)), last)


def best_split(model: ModelConfig, stages: int) -> tuple[int, ...]:
    """`balanced_split` where it makes the longest stage shorter than even stages do; else (), which means even."""
    if stages == 1:
        return ()
    worth, split = head_worth(model), balanced_split(model, stages)
    even = max(-(-model.layers // stages), model.layers // stages + worth)
    return split if max(*split[:-1], split[-1] + worth) < even and min(split[:-1]) > 0 else ()


def ranks_per_node(workload: Workload, axis: str) -> int:
    """How many ranks of one group of `axis` stand on one node, in the group that is spread over the most nodes."""
    p = workload.parallel
    return _ranks_per_node(p.world, p.tp, p.pp, p.cp, p.order, workload.node_size, axis)


@lru_cache(maxsize=100_000)
def _ranks_per_node(world: int, tp: int, pp: int, cp: int, order: str, node_size: int, axis: str) -> int:
    layout = Layout(world, tp=tp, pp=pp, cp=cp, order=order, node_size=node_size)
    first = layout.group(axis, 0)
    groups = (first,) if _alike(layout, node_size) else layout.groups(axis)
    return max(1, len(first) // max(len({rank // node_size for rank in group}) for group in groups))


def _alike(layout: Layout, node_size: int) -> bool:
    """Whether the groups of an axis all lie alike on the nodes: no group of neighbours begins inside of one node and
    ends inside of another."""
    span = 1
    for axis in layout.order.split("-"):
        span *= layout.axis_size(axis)
        if node_size % span and span % node_size:
            return False
    return True


def senders_across(workload: Workload) -> int:
    """The ranks of one node that send to a next stage on another node, on the node where these are the most."""
    p = workload.parallel
    return _senders_across(p.world, p.tp, p.pp, p.cp, p.order, workload.node_size, p.chunks > 1)


@lru_cache(maxsize=100_000)
def _senders_across(world: int, tp: int, pp: int, cp: int, order: str, node_size: int, around: bool) -> int:
    """`around`: the last stage sends to the first, too."""
    layout = Layout(world, tp=tp, pp=pp, cp=cp, order=order, node_size=node_size)
    if _alike(layout, node_size):  # of a group's ranks on a node one sends away, if the group is on several
        here = _ranks_per_node(world, tp, pp, cp, order, node_size, "pp")
        return min(world, node_size) // here if here < pp else 0
    found: Counter[int] = Counter()
    for group in layout.groups("pp"):
        for hop in [*pairwise(group), *([(group[-1], group[0])] if around else [])]:
            found[hop[0] // node_size] += layout.crosses_node(hop)
    return max(found.values(), default=0)


def workload_of(config: Config, world: int, node_size: int = 0) -> Workload:
    """The workload of a config on `world` devices, `node_size` a node unless the config says."""
    c = config.layout
    size = c.node_size or node_size or world
    if world % (c.tp * c.pp * c.cp):
        raise UserError(
            f"{world} devices are not divisible by tp x cp x pp = {c.tp} x {c.cp} x {c.pp} = {c.tp * c.cp * c.pp}: "
            "change the number of devices or the layout"
        )
    dp = world // (c.tp * c.pp * c.cp)
    if config.train.global_batch % (dp * config.train.micro_batch):
        unit = dp * config.train.micro_batch
        raise UserError(
            f"train.global_batch={config.train.global_batch} is not a multiple of dp x micro_batch = {unit}: "
            f"try {max(1, config.train.global_batch // unit) * unit}"
        )
    parallel = Parallel(
        world=world, tp=c.tp, pp=c.pp, cp=c.cp, chunks=c.chunks, order=c.order, schedule=config.pipeline.schedule,
        sequence_parallel=c.sequence_parallel and c.tp > 1, zero=config.zero.stage,
    )  # fmt: skip
    if config.zero.shard_group == "node":
        parallel = sharing_on_node(parallel, size)
    return Workload(
        model=config.model, parallel=parallel, micro_batch=config.train.micro_batch,
        global_batch=config.train.global_batch, precision=config.train.precision,
        recompute=own_mode(config.recompute.mode), states=states_of(config),
        split=config.pipeline.split, node_size=size, own_loss=True, documents=config.data.reset_attention,
    )  # fmt: skip


def sharing_on_node(p: Parallel, node_size: int) -> Parallel:
    """States are divided among those of the ranks with the same work that stand on one node."""
    layout = Layout(p.world, tp=p.tp, pp=p.pp, cp=p.cp, order=p.order, node_size=node_size)
    return replace(p, shard=sum(rank < node_size for rank in layout.group("dp-cp", 0)))


def own_mode(mode: str) -> str:
    """What Meshwright's `selective` does: attention's core is run again, nothing else."""
    return "core" if mode == "selective" else mode


def config_mode(mode: str) -> str:
    """The config's word for it."""
    return "selective" if mode == "core" else mode


def states_of(config: Config) -> States:
    precision = config.train.precision
    own = BYTES[precision]
    low = own < 4
    master = config.optimizer.master_dtype

    def wide(name: str) -> int:
        return max(BYTES.get(name, 4), 8 if precision == "fp64" else 0)

    places = {"none": "device", "cpu": "cpu", "disk": "disk"}
    return States(
        param=own, grad=wide(config.train.grad_dtype), master=wide(master) if low and master != precision else 0,
        moment=wide(config.optimizer.state_dtype), moments=2 if config.optimizer.name == "adamw" else 0,
        optimizer_on=places[config.zero.offload.optimizer],
        params_on=places[config.zero.offload.params],
    )  # fmt: skip


def config_with(config: Config, w: Workload) -> Config:
    """The config with a workload's layout, batch and way of keeping states."""
    p = w.parallel
    layout = replace(
        config.layout, tp=p.tp, pp=p.pp, cp=p.cp, chunks=p.chunks, order=p.order, node_size=w.node_size,
        sequence_parallel=p.sequence_parallel,
    )  # fmt: skip
    return replace(
        config, model=w.model, layout=layout, zero=replace(config.zero, stage=p.zero),
        pipeline=replace(config.pipeline, schedule=cast(Any, p.schedule), split=w.split),
        train=replace(
            config.train, global_batch=w.global_batch, micro_batch=w.micro_batch, precision=cast(Any, w.precision)
        ),
        recompute=replace(config.recompute, mode=config_mode(w.recompute)),
    )  # fmt: skip
