"""Compares gradients, losses and parameters of any layout with those of a single process, which is the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.check.made_samples import MadeBlanks as MadeBlanks
from meshwright.check.made_samples import MadeMasked as MadeMasked
from meshwright.check.made_samples import MadeSpans as MadeSpans
from meshwright.check.made_samples import MadeTokens
from meshwright.check.made_samples import made_for as made_for
from meshwright.check.oracle import EXACT as EXACT
from meshwright.check.oracle import Pairs as Pairs
from meshwright.check.oracle import WholeTensors as WholeTensors
from meshwright.check.oracle import gather_global as gather_global
from meshwright.check.oracle import parameters as parameters
from meshwright.check.oracle import relative as relative
from meshwright.check.oracle import true_gradients as true_gradients
from meshwright.check.oracle import whole_locals
from meshwright.check.oracle import worst as worst
from meshwright.checkpoint.load import Reader, complete_load, read_into
from meshwright.config.load import config_from
from meshwright.config.rules import check
from meshwright.config.sections import Config
from meshwright.device import Device
from meshwright.engine.context import Context, build_context
from meshwright.engine.optim.owned import MatrixState
from meshwright.engine.providers import forward_step, model_provider
from meshwright.engine.sharding.buffers import REDUCER
from meshwright.engine.step import StepResult, Trainer
from meshwright.run.pretrain import build_modules

Made = MadeTokens
LOSSES = 1e-5  # the relative error of fp32 losses over a run

STEPS_64 = 3  # steps in float64, after which parameters are compared
STEPS_32 = 20


def small_config(**sections: dict[str, Any]) -> Config:
    """Return the config of a tiny model in float64. The given sections are merged into it key by key."""
    base: dict[str, dict[str, Any]] = {
        "model": {"layers": 4, "hidden": 32, "heads": 4, "vocab": 53, "seq": 16},
        "data": {"prefixes": ["made"]},
        "train": {"precision": "fp64", "global_batch": 8, "micro_batch": 1, "steps": 20, "compile": False},
        "comm": {"bucket_mib": 0.02},
    }
    for name, keys in sections.items():
        base[name] = base.get(name, {}) | keys
    return config_from(base)


def load_into(trainer: Trainer, reader: Reader, model_only: bool = False) -> None:
    """Load a checkpoint as a resuming run does, but without agreeing on errors: no rank fails alone in a test."""
    read_into(trainer, reader, model_only)
    complete_load(trainer, reader, model_only)


def make_trainer(
    config: Config, rank: int = 0, world: int = 1, data: Any = None, process_groups: dict[str, Any] | None = None,
    device: Device | None = None,
) -> Trainer:  # fmt: skip
    check(config, world)
    device = device or Device("cpu")
    ctx: Context = build_context(config, rank, world, device, process_groups=process_groups, trains=True)
    data = data or made_for(config)
    return Trainer(ctx, build_modules(ctx, model_provider), forward_step, data, data)


def moments(trainer: Trainer) -> Pairs:
    """Return (record, value) of the optimizer states of every local parameter, each under a unique name."""
    pairs: Pairs = []
    for state in trainer.states():
        name = state.name
        if isinstance(state, MatrixState):
            held = [state.held[id(slot)] for slot in state.buffer.slots if id(slot) in state.held]
            pairs += [(replace(o.record, name=f"{name}/{o.record.name}"), o.tensor.double().cpu()) for o in held]
        elif name != "param" and not name.startswith(REDUCER):
            found = whole_locals(trainer, state.buffer, state.tensors)
            pairs += [(replace(slot.record, name=f"{name}/{slot.record.name}"), value) for slot, value in found]
    return pairs


@dataclass(frozen=True)
class Reference:
    """The results of one process.

    These are the gradients of the first batch, and the norms, expert counts, parameters, moments and validation loss of
    STEPS_64 steps in float64. The losses are those of STEPS_32 steps in fp32.
    """

    gradients: WholeTensors
    norms: list[float]
    counted: list[float]
    parameters: WholeTensors
    moments: WholeTensors
    validation: float
    losses: list[float]

    def of_kind(self, kind: str) -> WholeTensors:
        """Return the states of one kind only, since kinds differ in magnitude."""
        return {name: value for name, value in self.moments.items() if name.startswith(f"{kind}/")}


def exact_reference(trainer: Trainer) -> Reference:
    """Return the results of a single process's trainer in float64, without fp32 losses."""
    gradients = gather_global(true_gradients(trainer))
    results = [trainer.step() for _ in range(STEPS_64)]
    norms, counted = [result.grad_norm for result in results], counted_of(results[1:])
    after, states = gather_global(parameters(trainer)), gather_global(moments(trainer))
    return Reference(gradients, norms, counted, after, states, validation_loss(trainer), [])


def solo(exact: Config, single: Config, data: Any = None) -> Reference:
    """Return the reference of a config without any layout, given in float64 and in fp32."""
    found = exact_reference(make_trainer(exact, data=data))
    trainer = make_trainer(single, data=data)
    return replace(found, losses=[trainer.step().loss for _ in range(STEPS_32)])


def counted_of(results: Sequence[StepResult]) -> list[float]:
    """Return the rows of every expert and the routers' mean entropy in each of these steps.

    The first step of a trainer also counts the gradients that were computed before it.
    """
    mixed = [result.experts for result in results if result.experts]
    return [float(n) for found in mixed for rows in (*found["rows"], [found["entropy"]]) for n in rows]


def validation_loss(trainer: Trainer) -> float:
    line = trainer.validate()
    assert line is not None
    return float(line["loss"])


@dataclass(frozen=True)
class Outcome:
    """The errors of one rank against the reference: for each quantity the error, or (error, worst parameter)."""

    gradients: tuple[float, str]
    overlapped: tuple[float, str]  # computed again, with buckets reduced while backward runs
    norm: float
    counted: float = 0.0
    parameters: tuple[float, str] = (0.0, "")
    moments: tuple[float, str] = (0.0, "")
    validation: float = 0.0
    losses: float = 0.0

    def complaints(self, exact: float = EXACT) -> list[str]:
        found = []
        for what in ("gradients", "overlapped", "parameters", "moments"):
            error, name = getattr(self, what)
            if error > exact:
                found.append(f"{what}: {name} is off by {error:.1e}")
        for what, limit in (("norm", exact), ("counted", exact), ("validation", exact), ("losses", LOSSES)):
            if getattr(self, what) > limit:
                found.append(f"{what}: off by {getattr(self, what):.1e}")
        return found


def compare_exact(trainer: Trainer, reference: Reference) -> Outcome:
    """Compare the gradients of the first batch, twice, and the norm that a step reports with the reference.

    Ranks only measure, and the test that started them judges: a rank that raised alone would leave the others waiting.
    """
    first = worst(true_gradients(trainer), reference.gradients)
    again = worst(true_gradients(trainer), reference.gradients)
    return Outcome(first, again, relative([trainer.step().grad_norm], reference.norms[:1]))


def compare_steps(trainer: Trainer, reference: Reference) -> Outcome:
    """Compare as `compare_exact` does, and then the next steps, which show the effects of an update.

    These are the norms of the steps, their expert counts, and all parameters after them, including frozen ones (the
    biases that balance experts).
    """
    o = compare_exact(trainer, reference)
    results = [trainer.step() for _ in range(STEPS_64 - 1)]
    norm = relative([result.grad_norm for result in results], reference.norms[1:])
    differences = [abs(a - b) for a, b in zip(counted_of(results), reference.counted, strict=True)]
    counted = max((d if d == d else np.inf for d in differences), default=0.0)
    after = worst(parameters(trainer), reference.parameters)
    return replace(o, norm=max(o.norm, norm), counted=counted, parameters=after)


def compare(exact: Trainer, single: Trainer, reference: Reference, steps: int = STEPS_32) -> Outcome:
    """Compare everything: as `compare_states` does, and then the fp32 losses of `steps` steps."""
    o = compare_states(exact, reference)
    losses = relative([single.step().loss for _ in range(steps)], reference.losses[:steps])
    return replace(o, losses=losses)


def compare_states(exact: Trainer, reference: Reference) -> Outcome:
    """Compare as `compare_steps` does, and then the moments and the validation loss after these steps."""
    o = compare_steps(exact, reference)
    found = moments(exact)
    states = max(
        (worst([pair for pair in found if pair[0].name.startswith(f"{kind}/")], reference.of_kind(kind))
         for kind in {name.split("/")[0] for name in reference.moments}), default=(0.0, ""),
    )  # fmt: skip
    validation = relative([validation_loss(exact)], [reference.validation])
    return replace(o, moments=states, validation=validation)


def complaints(outcomes: Sequence[Outcome], exact: float = EXACT) -> list[str]:
    """Return the complaints of all ranks, each one once with the first rank that has it."""
    found: dict[str, str] = {}
    for rank, outcome in enumerate(outcomes):
        for complaint in outcome.complaints(exact):
            found.setdefault(complaint.split(":")[0], f"rank {rank}: {complaint}")
    return list(found.values())
