"""Runs of replicas that synchronise rarely: the weights of each rank after some steps, and the traffic of each step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from meshwright.engine.optim.outer import OuterOptimizer
from meshwright.engine.step import Trainer
from meshwright.plan.communication import Line, Traffic, predict_rank
from tests.engine.sums import lines_of, placed
from tests.support.oracle import made_for, make_trainer, parameters, small_config

Sections = dict[str, Any]
Whole = dict[str, np.ndarray]
PLAIN_STEPS = {"optimizer": {"name": "sgd", "lr": 0.5, "weight_decay": 0.0}, "lr": {"schedule": "constant"}}
EVERY_STEP = {"steps": 1, "outer": "sgd", "outer_lr": 1.0}


def replicas(number: int, local: Sections | None = None, layout: Sections | None = None, **more: Sections) -> Sections:
    """Return the config sections of a run of replicas, which by default synchronises after every plain SGD step."""
    train = {"clip": 0.0, "local": EVERY_STEP if local is None else local} | more.pop("train", {})
    return PLAIN_STEPS | {"layout": {"replicas": number} | (layout or {}), "train": train} | more


def alone(sections: Sections) -> Sections:
    """Return the sections of the same run in one process without replicas."""
    dropped = ("layout", "zero", "context")
    train = {key: value for key, value in sections["train"].items() if key != "local"}
    return {name: keys for name, keys in sections.items() if name not in dropped} | {"train": train}


class RankResult(NamedTuple):
    """The results of one rank: its losses, its final parameters, the traffic of each step, and the planned traffic."""

    losses: list[float]
    parameters: Whole
    calls: list[dict[Line, Traffic]]
    planned: list[dict[Line, Traffic]]


def values_of(trainer: Trainer) -> Whole:
    into: Whole = {}
    placed(parameters(trainer), into)
    return into


def trained(rank: int, world: int, cases: list[Sections], steps: int) -> list[RankResult]:
    torch.set_num_threads(1)
    found = []
    for sections in cases:
        config = small_config(**sections)
        trainer = make_trainer(config, rank, world)
        losses, calls = [], []
        for _ in range(steps):
            losses.append(trainer.step().loss)
            calls.append(lines_of(trainer))
        planned = [predict_rank(config, world, rank, step=step + 1) for step in range(steps)]
        found.append(RankResult(losses, values_of(trainer), calls, planned))
    return found


def furthest(found: Whole, reference: Whole) -> float:
    """Return the largest difference, relative to the largest value of the reference. Elements that a rank does not hold
    are NaN and are not compared.
    """
    scale = max(float(np.abs(value).max()) for value in reference.values())
    return max(float(np.nanmax(np.abs(value - reference[name]))) for name, value in found.items()) / scale


class Part:
    """The samples that one replica takes from a run, numbered as if the replica ran alone."""

    def __init__(self, data: Any, batch: int, part: range) -> None:
        self.data, self.batch, self.part = data, batch, part

    def sample(self, n: int) -> dict[str, np.ndarray]:
        step, at = divmod(n, len(self.part))
        return self.data.sample(step * self.batch + self.part.start + at)


def by_hand(sections: Sections, steps: int) -> list[list[np.ndarray]]:
    """Return the weights of each replica by bucket, computed with lone trainers and a few lines of numpy."""
    config = small_config(**sections)
    local, n, batch = config.train.local, config.layout.replicas, config.train.global_batch
    shares = local.shares or (1,) * n
    ends = np.cumsum([0, *(batch * share // sum(shares) for share in shares)])
    data, single = made_for(config), alone(sections)
    trainers = []
    for first, end in pairwise(ends.tolist()):
        train = single["train"] | {"global_batch": end - first}
        lone = small_config(**single | {"train": train})
        trainers.append(make_trainer(lone, data=Part(data, batch, range(first, end))))
    own = [[b.own_params.numpy() for buffer in t.data_parallel.trained for b in buffer.buckets] for t in trainers]
    outer, momentum = [x.copy() for x in own[0]], [np.zeros_like(x) for x in own[0]]
    tokens, arriving = np.zeros((local.fragments, n)), {}

    def fragment_slices(f: int) -> list[slice]:
        cut = [-(-x.size // (16 * n)) for x in outer]
        return [slice(c * f // local.fragments * 16 * n, c * (f + 1) // local.fragments * 16 * n) for c in cut]

    def begin(f: int) -> list[np.ndarray]:
        weights = tokens[f] / tokens[f].sum()
        tokens[f] = 0
        outer_grads = [
            sum(w * (x[at] - mine[i][at]) for w, mine in zip(weights, own, strict=True))
            for i, (x, at) in enumerate(zip(outer, fragment_slices(f), strict=True))
        ]
        return outer_grads

    def arrive(f: int, outer_grads: list[np.ndarray], local_weight: float) -> None:
        for i, (at, outer_grad) in enumerate(zip(fragment_slices(f), outer_grads, strict=True)):
            if local.outer == "nesterov":
                momentum[i][at] = local.momentum * momentum[i][at] + outer_grad
                outer_grad = outer_grad + local.momentum * momentum[i][at]
            outer[i][at] -= (1.0 if local.outer == "average" else local.outer_lr) * outer_grad
            for mine in own:
                mine[i][at] = local_weight * mine[i][at] + (1 - local_weight) * outer[i][at]

    for step in range(1, steps + 1):
        tokens += [trainer.step().counted for trainer in trainers]
        for f in range(local.fragments):
            if (step, f) in arriving:
                arrive(f, arriving.pop((step, f)), 0.5)
        at = (step - 1) % local.steps + 1
        for f in (f for f in range(local.fragments) if (f + 1) * local.steps // local.fragments == at):
            found = begin(f)
            if local.delay:
                arriving[step + local.delay, f] = found
            else:
                arrive(f, found, 0.0)
    return own


def weights_of(rank: int, world: int, sections: Sections, steps: int, bug: str = "") -> list[np.ndarray]:
    """Return the weights of this rank's replica by bucket after some steps, with a planted bug if one is named."""
    if bug:
        BUGS[bug]()
    trainer = make_trainer(small_config(**sections), rank, world)
    for _ in range(steps):
        trainer.step()
    return [b.own_params.numpy().copy() for buffer in trainer.data_parallel.trained for b in buffer.buckets]


def momentum_twice() -> None:
    arrived = OuterOptimizer._arrived

    def twice(self: OuterOptimizer, state: Any, bucket: Any, f: int, own: float) -> None:
        before = [x.clone() for x in state.momentum]
        arrived(self, state, bucket, f, own)
        for now, was in zip(state.momentum, before, strict=True):
            now.add_(was, alpha=self.config.momentum)

    OuterOptimizer._arrived = twice  # type: ignore[method-assign]


def samples_not_weighted() -> None:
    after = OuterOptimizer.after
    OuterOptimizer.after = lambda self, step, last, tokens: after(self, step, last, torch.ones_like(tokens))  # type: ignore[method-assign]


def way_begins_anew() -> None:
    """Plant a bug: a replica measures its next progress from its current weights instead of from the outer
    parameters.
    """
    begin = OuterOptimizer._begin

    def replaces(self: OuterOptimizer, state: Any, bucket: Any, f: int) -> None:
        begin(self, state, bucket, f)
        piece = state.pieces[bucket.index][f]
        state.params[bucket.index][piece.low : piece.high] = state.master(bucket, piece)

    OuterOptimizer._begin = replaces  # type: ignore[method-assign]


BUGS = {"momentum twice": momentum_twice, "not weighted": samples_not_weighted, "begins replaces": way_begins_anew}
