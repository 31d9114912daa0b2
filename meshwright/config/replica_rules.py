"""The rules about replicas that synchronise rarely, and about the parameter server. See `rules`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from meshwright.config.sections import Config
from meshwright.errors import divisors, either, plural


def batch_unit(c: Config, world: int) -> tuple[int, str]:
    """Returns what a step's samples are a multiple of, on `world` ranks, and this product in words."""
    dp, micro, replicas = max(1, world // c.layout.least_world), c.train.micro_batch, c.layout.replicas
    parts = sum(c.train.local.shares) or replicas
    if parts == 1:
        return dp * micro, f"dp x micro_batch = {dp} x {micro} = {dp * micro}"
    name = "the sum of train.local.shares" if c.train.local.shares else "replicas"
    return dp * micro * parts, f"dp x micro_batch x {name} = {dp} x {micro} x {parts} = {dp * micro * parts}"


def batch_problem(c: Config, world: int, samples: int) -> str:
    """Returns what is wrong with a global batch of so many samples, and its fixes: first what trains the same."""
    (unit, product), micro = batch_unit(c, world), c.train.micro_batch
    shares = unit // micro
    if samples < shares and not c.train.local.shares:
        single = ", with train.micro_batch=1" if micro > 1 else ""
        most = world // shares * samples
        return (
            f"can't be divided over {shares} data-parallel ranks: use at most {plural(most, 'rank')}, or "
            f"train.global_batch={shares}{single}"
        )
    up = -(-samples // unit) * unit
    if samples % shares == 0:
        fits = max(n for n in divisors(samples // shares) if n < micro)
        experts = c.model.experts
        by_batch = experts.count and experts.aux_loss and experts.aux_level == "batch"
        same = "the balance loss is of each micro-batch" if by_batch else "the training stays the same"
        fix = f"set train.micro_batch={fits} ({same}), or train.global_batch={up}"
    else:
        fix = f"try {either(sorted({max(unit, samples // unit * unit), up}))}"
    return f"is not a multiple of {product}: {fix}"


def replicas_fit(c: Config, world: int) -> Iterator[str]:
    """What replicas can't be combined with, and what only replicas have."""
    replicas, local = c.layout.replicas, c.train.local
    if replicas == 1:
        for key in (f.name for f in fields(local)):
            if getattr(local, key) != getattr(type(local)(), key):
                yield (
                    f"train.local.{key} has no effect with layout.replicas=1: leave it out, or set layout.replicas to "
                    "the number of replicas that take steps of their own"
                )
        return
    if local.shares and len(local.shares) != replicas:
        yield (
            f"train.local.shares={list(local.shares)} must have one number for each of layout.replicas={replicas}: "
            "change one of them"
        )
    if c.train.precision == "fp16":
        yield (
            "train.precision=fp16 has a loss scale that replicas would change each for itself: use bf16 or fp32 with "
            f"layout.replicas={replicas}"
        )
    if c.comm.reduce.compresses:
        yield (
            f"{c.comm.reduce.words} compresses sums inside a replica, which can't be combined with "
            f"layout.replicas={replicas}: set train.local.compress.kind, which compresses what replicas send, instead"
        )
    offload = c.zero.offload
    if (offload.optimizer, offload.params) != ("none", "none"):
        yield (
            f"zero.offload can't be combined with layout.replicas={replicas}, whose synchronisation needs the states "
            "on the device: set zero.offload.optimizer=none and params=none"
        )


def server_fits(c: Config, world: int) -> Iterator[str]:
    """A server sums what is summed once per step over whole buckets, as it is."""
    server, o = c.train.server, c.layout
    if not server.ranks:
        return
    group = world // (o.tp * o.pp * o.replicas)
    if group % server.ranks:
        yield (
            f"train.server.ranks={server.ranks} must divide the {group} ranks that sum a gradient (dp x cp): try "
            f"{either(divisors(group))}"
        )
    taken = {
        "zero.stage": (c.zero.stage, 0), "comm.reduce.kind": (c.comm.reduce.kind, "plain"),
        "comm.reduce.adaptive": (c.comm.reduce.adaptive, False),
        "comm.algorithm": (c.comm.algorithm.dp, "torch"), "layout.replicas": (o.replicas, 1),
        "model.experts.count": (c.model.experts.count, 0),
    }  # fmt: skip
    for key, (value, needed) in taken.items():
        if value != needed:
            yield f"train.server.ranks={server.ranks} needs {key}={needed}, not {value}: change one of them"
