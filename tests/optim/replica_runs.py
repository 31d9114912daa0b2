"""Runs of replicas that synchronise rarely: what each rank has after some steps, and what each step sent."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from meshwright.plan.communication import Line, Traffic, predict_rank
from meshwright.train.step import Trainer
from tests.sharding.sums import lines_of, placed
from tests.support.oracle import make_trainer, parameters, small_config

Sections = dict[str, Any]
Whole = dict[str, np.ndarray]
PLAIN_STEPS = {"optimizer": {"name": "sgd", "lr": 0.5, "weight_decay": 0.0}, "lr": {"schedule": "constant"}}
EVERY_STEP = {"steps": 1, "outer": "sgd", "outer_lr": 1.0}


def replicas(number: int, local: Sections | None = None, layout: Sections | None = None, **more: Sections) -> Sections:
    """The sections of a run of replicas, by default of one that synchronises after each plain step."""
    train = {"clip": 0.0, "local": EVERY_STEP if local is None else local} | more.pop("train", {})
    return PLAIN_STEPS | {"layout": {"replicas": number} | (layout or {}), "train": train} | more


def alone(sections: Sections) -> Sections:
    """The same run of one process without replicas."""
    dropped = ("layout", "zero", "context")
    train = {key: value for key, value in sections["train"].items() if key != "local"}
    return {name: keys for name, keys in sections.items() if name not in dropped} | {"train": train}


class Found(NamedTuple):
    """What one rank found: losses, its parameters at the end, the calls of each step, and those planned."""

    losses: list[float]
    parameters: Whole
    calls: list[dict[Line, Traffic]]
    planned: list[dict[Line, Traffic]]


def values_of(trainer: Trainer) -> Whole:
    into: Whole = {}
    placed(parameters(trainer), into)
    return into


def trained(rank: int, world: int, cases: list[Sections], steps: int) -> list[Found]:
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
        found.append(Found(losses, values_of(trainer), calls, planned))
    return found


def furthest(found: Whole, reference: Whole) -> float:
    """The largest difference, over the largest number of all; what a rank does not hold is not compared."""
    scale = max(float(np.abs(value).max()) for value in reference.values())
    return max(float(np.nanmax(np.abs(value - reference[name]))) for name, value in found.items()) / scale
