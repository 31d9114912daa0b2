"""The seams of a model's graph: streams that norms read, and a second encoder.

One model has a condition of each sample, which its norms read as a stream. The other has a second encoder whose stream
is put into that of the tokens. Both are described in this file alone, and train on two stages as on one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.config.kinds import MODEL_KINDS, ModelKind
from meshwright.config.sections import ModelConfig
from meshwright.nn.build import MODULES
from meshwright.nn.inputs import Inputs
from meshwright.nn.norm import StreamNorm
from meshwright.nn.parallel import Parallel
from meshwright.plan.job import job_of
from meshwright.plan.memory import rank_memory
from meshwright.spec.layout.params import Init, whole
from meshwright.spec.model.description import gpt, layout_of, model_of, split_layers
from meshwright.spec.model.graph import HIDDEN, Model, Node, Stream, stack_nodes
from meshwright.spec.model.part import SINGLE_RANK, Coordinate, MicroBatch, NamedPart, Part, Records, Rows, Unit
from tests.support.oracle import EXACT, WholeTensors, gather_global, make_trainer, small_config, true_gradients, worst
from tests.support.ranks import run_ranks

WIDTH, TIMES, PATCHES, PIXELS = 6, 5, 4, 11


@dataclass(frozen=True)
class TablePart(Part):
    """A table that is looked up by a field of each sample."""

    size: int
    width: int

    def records(self, at: Coordinate, name: str) -> Records:
        return {"weight": whole(f"{name}.weight", (self.size, self.width), Init("normal", 0.5))}


class Table(nn.Module):
    def __init__(self, parallel: Parallel, part: TablePart, records: Records) -> None:
        super().__init__()
        self.weight = parallel.parameter(records["weight"])

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids.flatten(), self.weight)


@dataclass(frozen=True)
class TimedNormPart(Part):
    """A norm whose scale and shift depend on the condition of the sample."""

    hidden: int

    @property
    def reads(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("condition",)

    def records(self, at: Coordinate, name: str) -> Records:
        return {"weight": whole(f"{name}.weight", (2 * self.hidden, WIDTH), Init("normal", 0.3))}


class TimedNorm(StreamNorm):
    def __init__(self, parallel: Parallel, part: TimedNormPart, records: Records) -> None:
        super().__init__()
        self.weight = parallel.parameter(records["weight"])

    def forward(self, x: Tensor, inputs: Inputs) -> Tensor:
        both = F.linear(inputs.streams["condition"], self.weight)
        scale, shift = both.repeat_interleave(x.shape[0] // inputs.sequences, 0).chunk(2, 1)
        return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


def timed(model: ModelConfig) -> Model:
    """Return a GPT all of whose blocks are conditioned on a time step."""
    plain, norm = gpt(model), TimedNormPart(model.hidden)

    def changed(node: Node) -> Unit:
        parts = tuple(each._replace(part=norm) if "norm" in each.key else each for each in node.unit.parts)
        return replace(node.unit, parts=parts) if node.stackable else node.unit

    first, *rest = plain.map_units(changed).nodes
    rows = Rows(1, divided=False)
    time = Unit((NamedPart("time", "time", TablePart(TIMES, WIDTH)),), rows)
    nodes = (first, Node("time", time, writes="condition", fields=("time",)), *rest)
    streams = (*plain.streams, Stream("condition", WIDTH, rows))
    return replace(plain, nodes=nodes, streams=streams, lengths=(("time", 1),))


@dataclass(frozen=True)
class ScatterPart(Part):
    """A part that puts rows of one stream into another, at the places that a field of each sample names."""


class Scatter(nn.Module):
    def __init__(self, parallel: Parallel, part: ScatterPart, records: Records) -> None:
        super().__init__()

    def forward(self, hidden: Tensor, image: Tensor, places: Tensor) -> Tensor:
        first = torch.arange(len(places), device=places.device)[:, None] * (hidden.shape[0] // len(places))
        return hidden.index_copy(0, (places + first).flatten(), image)


def seeing(model: ModelConfig) -> Model:
    """Return a GPT whose first two blocks read patches of an image, which replace some tokens."""
    plain, rows = gpt(model), Rows(PATCHES)
    embedding, *_, head = plain.nodes
    patches = Unit((NamedPart("patches", "patches", TablePart(PIXELS, model.hidden)),), rows)
    nodes = (
        Node("patches", patches, writes="image", fields=("pixels",)),
        *stack_nodes([replace(block, rows=rows) for block in plain.blocks[:2]], "image", "vision", "vision.layers"),
        embedding,
        Node("scatter", Unit((NamedPart("", "", ScatterPart()),)), (HIDDEN, "image"), HIDDEN, ("places",)),
        *stack_nodes(plain.blocks[2:], first=2),
        head,
    )
    lengths = (("pixels", PATCHES), ("places", PATCHES))
    return replace(plain, nodes=nodes, streams=(*plain.streams, Stream("image", model.hidden, rows)), lengths=lengths)


for name, described in {"timed": timed, "seeing": seeing}.items():
    MODEL_KINDS.register(name, ModelKind(described, ("causal",), MODEL_KINDS["gpt"].supports))
MODULES |= {TablePart: Table, TimedNormPart: TimedNorm, ScatterPart: Scatter}


class Samples:
    """Random tokens with a time step and an image."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model

    def sample(self, n: int) -> dict[str, np.ndarray[Any, Any]]:
        random, m = np.random.default_rng(n), self.model
        return {
            "tokens": random.integers(0, m.vocab, m.seq), "labels": random.integers(0, m.vocab, m.seq),
            "loss_mask": np.ones(m.seq, np.int64), "time": random.integers(0, TIMES, 1),
            "pixels": random.integers(0, PIXELS, PATCHES), "places": random.permutation(m.seq)[:PATCHES],
        }  # fmt: skip


CASES: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "timed": ("timed", {}),
    "timed-recomputed": ("timed", {"recompute": {"mode": "full"}}),
    "timed-sharded": ("timed", {"zero": {"stage": 3}, "layout": {}}),
    "seeing": ("seeing", {}),
    "seeing-untied": ("seeing", {"model": {"tied_embeddings": False}}),
    "seeing-late": ("seeing", {"pipeline": {"split": [3, 1]}}),  # The table's two ends are on different stages.
}


def trainer_of(name: str, rank: int = 0, world: int = 1) -> Any:
    kind, given = CASES[name]
    sections = {**given, "model": {"kind": kind, **given.get("model", {})}}
    if world == 1:
        sections = {"model": sections["model"]}
    elif "zero" not in sections:
        sections["layout"] = {"pp": world}
    config = small_config(**sections, run={"device": "cpu"})
    return make_trainer(config, rank, world, data=Samples(config.model))


def gradient_errors(rank: int, world: int, wholes: dict[str, WholeTensors]) -> dict[str, tuple[float, str]]:
    return {name: worst(true_gradients(trainer_of(name, rank, world)), found) for name, found in wholes.items()}


def test_two_stages_train_as_one_process() -> None:
    wholes = {name: gather_global(true_gradients(trainer_of(name))) for name in CASES}
    assert {"time.weight", "layers.3.norm1.weight"} <= wholes["timed"].keys()
    assert {"patches.weight", "vision.layers.1.mlp.up.weight"} <= wholes["seeing"].keys()
    assert all(np.abs(found[name]).max() > 0 for found in wholes.values() for name in found if "norm" in name)
    for found in run_ranks(2, gradient_errors, wholes):
        for name, (error, parameter) in found.items():
            assert error <= EXACT, f"{name}: {parameter} is off by {error:.1e}"


@pytest.mark.parametrize(
    ("describe", "split", "passed"),
    [
        (timed, (2, 2), {HIDDEN: (32, 32), "condition": (2, WIDTH)}),
        (timed, (4, 0), {HIDDEN: (32, 32)}),  # The head reads no condition.
        (seeing, (1, 3), {"image": (8, 32)}),
        (seeing, (2, 2), {"image": (8, 32)}),  # The tokens' embedding begins the second stage.
        (seeing, (3, 1), {HIDDEN: (32, 32)}),
    ],
)
def test_live_streams_pass(
    describe: Callable[[ModelConfig], Model], split: tuple[int, int], passed: dict[str, tuple[int, ...]]
) -> None:
    model = describe(small_config().model)
    first, second = split_layers(4, 2, split)
    assert model.passes(SINGLE_RANK, MicroBatch(2, 16), first) == {}
    assert model.passes(SINGLE_RANK, MicroBatch(2, 16), second) == passed


def test_both_are_planned() -> None:
    for kind in ("timed", "seeing"):
        config = small_config(model={"kind": kind}, layout={"pp": 2})
        job = job_of(config, 2)
        assert [rank_memory(job, rank).parameters > 0 for rank in range(2)] == [True, True]
    held = dict(layout_of(config, 2).shared)
    assert held == {"embedding": (1,)}, "both ends of the table are on the second stage"
    assert "embedding" in model_of(config).groups(split_layers(4, 2)[1])
