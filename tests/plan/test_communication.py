"""Predicted equals recorded: the closed formulas against what the ledger counts in real training steps on Gloo ranks.

One launch for each world size trains all of its layouts, two steps each (the first reduces its buckets after backward,
the second while it runs); everything is compared exactly, for every rank and for their sum.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest

from meshwright.config.load import config_from
from meshwright.config.sections import Config
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.layout.params import Init, whole
from meshwright.plan import communication
from meshwright.plan.communication import Call, Line, Traffic, predict_detail, predict_rank, predict_step
from tests.support.oracle import Made, small_config
from tests.support.ranks import run_ranks

LLAMA = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "tied_embeddings": False}
SP = {"sequence_parallel": True}
ALL = {"tokens": "int64", "labels": "int64", "loss_mask": "int64", "positions": "int64", "segments": "int64"}


@dataclass(frozen=True)
class Case:
    """A layout to train: sections on top of `small_config`, the data's fields, and values that are monitored."""

    name: str
    world: int
    sections: dict[str, dict[str, Any]]
    fields: dict[str, str] | None = None
    monitored: int = 0
    steps: int = field(default=2)

    @property
    def config(self) -> Config:
        sections = {"model": {}, "train": {}} | self.sections
        sections["model"] = {"layers": 2, "seq": 12, "hidden": 24, "heads": 4} | sections["model"]
        sections["train"] = {"global_batch": 4} | sections["train"]
        return small_config(**sections)


CASES = [
    Case("one", 1, {}),
    Case("dp", 2, {"comm": {"bucket_mib": 0.01}}),
    Case("dp-one-bucket", 2, {"train": {"micro_batch": 2}, "comm": {"bucket_mib": 25.0}}),
    Case("tp", 2, {"layout": {"tp": 2}, "model": {"vocab": 51}}),
    Case("tp-sp-fp32", 2, {"layout": {"tp": 2, **SP}, "train": {"precision": "fp32"}}),
    Case("tp-fields", 2, {"layout": {"tp": 2}}, fields=ALL),
    Case("pp", 2, {"layout": {"pp": 2}}),
    Case("pp-gpipe-untied", 2, {"layout": {"pp": 2}, "pipeline": {"schedule": "gpipe"}, "model": LLAMA}),
    Case("chunks-on-one-rank", 2, {"layout": {"chunks": 2}, "pipeline": {"schedule": "interleaved"}}),
    Case("tp-bf16", 2, {"layout": {"tp": 2}, "train": {"precision": "bf16", "global_batch": 1}}),
    Case("dp-fp16-ramp", 2, {"train": {"precision": "fp16", "ramp": [2, 2, 2]}}),
    Case("monitored", 2, {}, monitored=3),
    Case("kv-copies", 4, {"layout": {"tp": 4}, "model": {"kv_heads": 2}}),
    Case("kv-copies-sp", 4, {"layout": {"tp": 4, **SP}, "model": {"kv_heads": 1, **LLAMA}}),
    Case("dp-tp-sp", 4, {"layout": {"tp": 2, **SP}, "train": {"micro_batch": 2}, "comm": {"bucket_mib": 0.003}}),
    Case("pp-tp-sp-fields", 4, {"layout": {"tp": 2, "pp": 2, **SP}}, fields=ALL | {"loss_mask": "int32"}),
    Case("pp-interleaved", 4, {
        "layout": {"pp": 4, "chunks": 2}, "model": {"layers": 8, "hidden": 8, "heads": 2}, "train": {"global_batch": 6},
        "pipeline": {"schedule": "interleaved"},
    }),
    Case("pp-dp-order-split", 4, {"layout": {"pp": 2, "order": "pp-dp-tp-cp-ep"}, "pipeline": {"split": [0, 2]}}),
    Case("pp-middle-fields", 4, {"layout": {"pp": 2, "tp": 2, "order": "pp-tp-cp-ep-dp"}, "model": {"layers": 3}}),
    Case("all", 8, {"layout": {"tp": 2, "pp": 2, **SP}, "model": {"kv_heads": 2, "position": "rope"}}, fields=ALL),
    Case("all-bf16", 8, {
        "layout": {"tp": 2, "pp": 2, "chunks": 2, **SP}, "pipeline": {"schedule": "interleaved"},
        "model": {"layers": 4, "seq": 4, "hidden": 8, "vocab": 11}, "train": {"precision": "bf16"},
    }),
    Case("tp-pp-middle", 8, {"layout": {"tp": 2, "pp": 4}, "model": {"layers": 4, "hidden": 8}}),
]  # fmt: skip


class Fields(Made):
    """Samples with chosen fields and dtypes."""

    def __init__(self, config: Config, fields: dict[str, str] | None) -> None:
        fields = fields or {}
        super().__init__(config.model.vocab, config.model.seq, segments="segments" in fields)
        self.dtypes = fields

    def sample(self, n: int) -> dict[str, np.ndarray]:
        return {name: x.astype(self.dtypes.get(name, "int64")) for name, x in super().sample(n).items()}


def record(rank: int, world: int, cases: list[Case]) -> list[list[dict[str, Any]]]:
    """On a rank: for each case and step its samples, its `comm` and the ledger by (phase, axis, op)."""
    from meshwright.train.gpt import forward_step
    from tests.support.oracle import make_trainer

    found = []
    for case in cases:
        trainer = make_trainer(case.config, rank, world, Fields(case.config, case.fields))
        if case.monitored:
            ctx, values = trainer.ctx, {f"value{i}": float(i) for i in range(case.monitored)}

            def with_values(module: Any, batch: Any, received: Any, ctx: Any = ctx, values: Any = values) -> Any:
                out = forward_step(ctx, module, batch, received)
                return (*out[:2], values) if isinstance(out, tuple) else out

            trainer.executor.forward_step = with_values
        steps = []
        for _ in range(case.steps):
            result = trainer.step()
            lines: dict[Line, Traffic] = {}
            for entry, tally in trainer.ctx.ledger.entries.items():
                line = Line(entry.phase, entry.axis, entry.op)
                lines[line] = lines.get(line, Traffic()).plus(
                    Traffic(tally.calls, tally.payload_bytes, tally.wire_bytes)
                )
            steps.append({"samples": result.global_batch, "comm": result.comm, "lines": lines})
        found.append(steps)
    return found


@cache
def recorded(world: int) -> dict[str, list[list[dict[str, Any]]]]:
    """For each case of this many ranks: by rank, by step."""
    cases = [case for case in CASES if case.world == world]
    ranks = run_ranks(world, record, cases)
    return {case.name: [rank[i] for rank in ranks] for i, case in enumerate(cases)}


def differences(case: Case, ranks: list[list[dict[str, Any]]]) -> Iterator[str]:
    """Every way in which the prediction is not the record."""
    for step in range(case.steps):
        samples = ranks[0][step]["samples"]
        options = {"samples": samples, "fields": case.fields, "monitored": case.monitored}
        predicted = {axis: t._asdict() for axis, t in predict_step(case.config, case.world, **options).items()}
        together: dict[Line, Traffic] = {}
        for rank, steps in enumerate(ranks):
            if steps[step]["comm"] != predicted:
                yield f"step {step}, comm of rank {rank}: {steps[step]['comm']}, predicted {predicted}"
            lines = predict_rank(case.config, case.world, rank, **options)
            for line, traffic in steps[step]["lines"].items():
                together[line] = together.get(line, Traffic()).plus(traffic)
            for line in sorted({*lines, *steps[step]["lines"]}):
                pair = steps[step]["lines"].get(line), lines.get(line)
                if pair[0] != pair[1]:
                    yield f"step {step}, rank {rank}, {line}: recorded {pair[0]}, predicted {pair[1]}"
        if together != predict_detail(case.config, case.world, **options):
            yield f"step {step}: the sum over all ranks by line"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_predicted_equals_recorded(case: Case) -> None:
    assert list(differences(case, recorded(case.world)[case.name])) == []


def test_one_process_sends_nothing() -> None:
    assert predict_step(small_config(), 1) == {} == recorded(1)["one"][0][0]["comm"]


def unpadded(sizes: list[int], ranks: int, elements: int) -> Any:
    places, at = [], 0
    for size in sizes:
        places.append((at, 0))
        at += size
    return places, [(0, at)]


def without(name: str, dropped: Any) -> tuple[str, Any]:
    """A mutation: the calls of one source, less those that `dropped` says."""
    source = getattr(communication, name)

    def mutated(*args: Any) -> list[Call]:
        return [call for call in source(*args) if not dropped(call)]

    return name, mutated


MUTATIONS: dict[str, tuple[str, tuple[str, Any]]] = {
    "no padding": ("dp-one-bucket", ("place", unpadded)),
    "one bucket": ("dp", ("bucket_elements", lambda size, element: 10**9)),
    "gradients in bf16": ("all-bf16", ("grad_bytes", lambda size: size)),
    "no gather again": ("tp-sp-fp32", without("column", lambda call: call.op == "all_gather" and call.phase == "backward")),
    "no loss": ("tp", without("loss", lambda call: True)),
    "labels everywhere": ("pp-tp-sp-fields", ("EVERYWHERE", frozenset(ALL))),
    "no fields in the middle": ("all", ("EVERYWHERE", frozenset())),
    "no further axes": ("kv-copies", without("gradients", lambda call: call.axis == "tp.kv")),
    "a tie counted once": ("pp", without("gradients", lambda call: call.axis == "embedding")),
    "metrics not counted": ("pp", without("sums", lambda call: call.phase == "metrics")),
    "no sends back": ("pp-interleaved", without("pipeline", lambda call: call.phase == "backward")),
    "forgotten axes": ("kv-copies", ("mesh_axes", lambda layout: ["tp", "dp", "pp", "embedding", "world"])),
}  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_formula_is_found(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, (attribute, replacement) = MUTATIONS[mutation]
    case = next(case for case in CASES if case.name == name)
    ranks = recorded(case.world)[name]
    assert not list(differences(case, ranks))
    monkeypatch.setattr(communication, attribute, replacement)
    assert list(differences(case, ranks))


def six(rank: int, world: int, bucket_mib: float) -> tuple[list[Any], dict[Line, Traffic]]:
    """A module that is not ours, with three bf16 matrices and three fp32 norms, through data parallelism."""
    import torch
    from torch import nn

    from meshwright.comm.mesh import Mesh
    from meshwright.sharding.data_parallel import DataParallel

    widths = (6, 8, 5, 2)
    parts: list[nn.Module] = []
    for into, out in zip(widths, widths[1:], strict=False):
        parts += [nn.RMSNorm(into), nn.Linear(into, out, bias=False, dtype=torch.bfloat16)]
    mesh = Mesh(Layout(world), rank)
    parallel = DataParallel([nn.Sequential(*parts)], mesh, bucket_mib)
    for _ in range(2):
        mesh.ledger.clear()
        parallel.begin(1)
        x = torch.ones(3, 6)
        for part in parts:
            x = part(x.to(part.weight.dtype))
        x.sum().backward()
        parallel.finish()
    packed = [
        (str(b.params.dtype), b.size, [(slot.name, slot.start, slot.stop) for slot in b.slots],
         [(bucket.start, bucket.stop) for bucket in b.buckets])
        for b in parallel.buffers
    ]  # fmt: skip
    lines = {Line(e.phase, e.axis, e.op): Traffic(t.calls, t.payload_bytes, t.wire_bytes)
             for e, t in mesh.ledger.entries.items()}  # fmt: skip
    return packed, lines


# The two buffers as docs/communication.md draws them: parameters start at multiples of 16 elements, the last first.
MATRICES = [("0.5.weight", 0, 10), ("0.3.weight", 16, 56), ("0.1.weight", 64, 112)]
NORMS = [("0.4.weight", 0, 5), ("0.2.weight", 16, 24), ("0.0.weight", 32, 38)]
SHAPES = [((6,), "fp32"), ((8, 6), "bf16"), ((8,), "fp32"), ((5, 8), "bf16"), ((5,), "fp32"), ((2, 5), "bf16")]


@pytest.mark.parametrize(
    ("bucket_mib", "matrix_buckets", "calls"),
    [(25.0, [(0, 128)], 2), (256 / 2**20, [(0, 64), (64, 128)], 3)],
    ids=["one bucket", "buckets of 64"],
)
def test_six_parameters_of_two_dtypes(bucket_mib: float, matrix_buckets: list[Any], calls: int) -> None:
    """128 and 64 elements of fp32 gradients are 512 + 256 bytes; two ranks send 2 (2 - 1) / 2 of that, all of it."""
    line, traffic = Line("reduce", "dp", "all_reduce"), Traffic(calls, 768, 768)
    for packed, lines in run_ranks(2, six, bucket_mib):
        assert packed == [("torch.bfloat16", 128, MATRICES, matrix_buckets), ("torch.float32", 64, NORMS, [(0, 64)])]
        assert lines == {line: traffic}
    records = [(whole(f"{i}", shape, Init("zeros")), dtype) for i, (shape, dtype) in enumerate(SHAPES)]
    assert communication.by_line(communication.gradients(records, Layout(2), bucket_mib)) == {line: traffic}


def worked(sequence_parallel: bool) -> dict[str, dict[str, int]]:
    """The worked layout of docs/communication.md: calls by source and op of a rank of the first and of the last stage."""
    config = config_from({
        "model": {"layers": 8, "hidden": 1024, "heads": 16, "vocab": 50304, "seq": 2048},
        "data": {"prefixes": ["made"]},
        "layout": {"tp": 4, "pp": 2, "sequence_parallel": sequence_parallel},
        "train": {"precision": "bf16", "global_batch": 16, "micro_batch": 1},
    })  # fmt: skip
    return {axis: traffic._asdict() for axis, traffic in predict_step(config, 16).items()}


def test_the_worked_layout_of_the_docs() -> None:
    """By hand: H = 2048 x 1024 x 2 B = 4 MiB, M = 16 / 2 = 8, 16 ranks of which 8 hold each stage, 4 layers a stage."""
    h, m, each = 2048 * 1024 * 2, 8, 8
    t = 2048
    fields = 8 * t  # one field of int64
    plain, split = worked(False), worked(True)
    # Blocks: 2 + 2 all_reduces in each of 8 layers; 1 for the embedding, 1 for the head; the loss; the batch.
    small = (m * each, m * each * 4 * t), (m * each, m * each * 8 * t)
    batches = (2 * m * each, m * each * (fields + 2 * fields))
    calls = (8 * 4 + 2) * m * each
    assert plain["tp"]["calls"] == calls + sum(n for n, _ in small) + batches[0]
    assert plain["tp"]["payload_bytes"] == calls * h + sum(n for _, n in small) + batches[1]
    assert plain["tp"]["wire_bytes"] == (calls * h + sum(n for _, n in small)) * 3 // 2 + batches[1]
    # Split tokens: all_gather and reduce_scatter instead, 8 and a half as many bytes more for the gathers again.
    calls = (8 * 10 + 2 + 3) * m * each - 8 * 2 * m * each + 8 * 0
    blocks = 8 * (2 + 2 + 4 + 2) * m * each
    ends = (1 + 1 + 1 + 2) * m * each
    extra = split["tp"]["calls"] - blocks - ends - 2 * m * each - batches[0]
    assert extra == 8 + 8, "two all_reduces of shared gradients: norms and biases of each stage"
    assert calls > 0
