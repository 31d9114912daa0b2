"""Predicted equals recorded: the closed formulas against the ledger of real training steps on Gloo ranks.

One launch per world size trains all of its layouts for two steps each. The first step reduces its buckets after
backward, the second one during it. Everything is compared exactly, for every rank and for their sum.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.config.load import config_from
from meshwright.config.memory import ZeroConfig
from meshwright.config.sections import Config
from meshwright.errors import UserError
from meshwright.plan import communication, held
from meshwright.plan.communication import Line, Traffic, predict_step
from meshwright.plan.held import HeldParameter, buffers_of, packing_of
from meshwright.plan.job import job_of
from meshwright.spec.layout import Layout
from meshwright.spec.layout.params import Init, whole
from meshwright.spec.model import gpt
from meshwright.spec.model.description import fields_read
from meshwright.spec.model.gpt import context_calls
from meshwright.spec.traffic.counts import counts_bytes
from meshwright.spec.traffic.placement import bucket_elements
from tests.plan.recording import SP, Case, Records, assert_found, differences, record
from tests.support.oracle import small_config
from tests.support.ranks import run_ranks

LLAMA = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "tied_embeddings": False}
KV = (("tp", (("tp.kv", 2), ("tp.q", 2))),)
ALL = {"tokens": "int64", "labels": "int64", "loss_mask": "int64", "positions": "int64", "segments": "int64"}


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
    Case("token-norms", 4, {
        "layout": {"tp": 4, **SP}, "model": {"kv_heads": 2, "qk_norm": True, "qk_norm_over": "all", **LLAMA},
        "recompute": {"mode": "full"},
    }),
    Case("dp-tp-sp", 4, {"layout": {"tp": 2, **SP}, "train": {"micro_batch": 2}, "comm": {"bucket_mib": 0.003}}),
    Case("pp-tp-sp-fields", 4, {"layout": {"tp": 2, "pp": 2, **SP}}, fields=ALL | {"loss_mask": "int32"}),
    Case("pp-interleaved", 4, {
        "layout": {"pp": 4, "chunks": 2}, "model": {"layers": 8, "hidden": 8, "heads": 2}, "train": {"global_batch": 6},
        "pipeline": {"schedule": "interleaved"},
    }),
    Case("pp-dp-order-split", 4, {"layout": {"pp": 2, "order": "pp-dp-tp-cp-ep"}, "pipeline": {"split": [0, 2]}}),
    Case("pp-tp-order", 4, {"layout": {"pp": 2, "tp": 2, "order": "pp-tp-cp-ep-dp"}, "model": {"layers": 3}}),
    Case("all", 8, {"layout": {"tp": 2, "pp": 2, **SP}, "model": {"kv_heads": 2, "position": "rope"}}, fields=ALL),
    Case("all-bf16", 8, {
        "layout": {"tp": 2, "pp": 2, "chunks": 2, **SP}, "pipeline": {"schedule": "interleaved"},
        "model": {"layers": 4, "seq": 4, "hidden": 8, "vocab": 11}, "train": {"precision": "bf16"},
    }),
    Case("zero1", 2, {"zero": {"stage": 1}, "comm": {"bucket_mib": 0.01}}),
    Case("zero2", 2, {"zero": {"stage": 2}, "comm": {"bucket_mib": 0.01}}),
    Case("zero3", 2, {"zero": {"stage": 3}}),
    Case("zero3-untied-bf16", 2, {"zero": {"stage": 3}, "model": LLAMA, "train": {"precision": "bf16"}}),
    Case("zero3-full", 2, {"zero": {"stage": 3}, "recompute": {"mode": "full"}}),
    Case("zero3-every", 2, {"zero": {"stage": 3}, "recompute": {"mode": "every:3"}, "model": {"layers": 5}}),
    Case("zero3-chunks-on-one-rank", 2, {
        "zero": {"stage": 3}, "layout": {"chunks": 2}, "pipeline": {"schedule": "interleaved"},
    }),
    Case("zero-alone", 2, {"zero": {"stage": 3}, "layout": {"tp": 2}}),
    Case("tp-sp-recompute", 2, {"layout": {"tp": 2, **SP}, "recompute": {"mode": "every:2"}, "model": {"layers": 3}}),
    Case("tp-recompute-full", 2, {"layout": {"tp": 2}, "recompute": {"mode": "full"}}),
    Case("tp-recompute-selective", 2, {"layout": {"tp": 2}, "recompute": {"mode": "selective"}}),
    Case("zero1-tp-sp", 4, {"zero": {"stage": 1}, "layout": {"tp": 2, **SP}}),
    Case("zero2-pp", 4, {"zero": {"stage": 2}, "layout": {"pp": 2}, "train": {"precision": "bf16", "global_batch": 8}}),
    Case("zero3-tp-sp", 4, {"zero": {"stage": 3}, "layout": {"tp": 2, **SP}, "recompute": {"mode": "full"}}),
    Case("zero1-node", 4, {"zero": {"stage": 1, "shard_group": "node"}, "layout": {"node_size": 2}}),
    Case("zero3-node", 8, {
        "zero": {"stage": 3, "shard_group": "node"}, "layout": {"node_size": 4, "tp": 2, **SP},
        "train": {"global_batch": 8},
    }),
    Case("zero3-all", 8, {
        "layout": {"tp": 2, "pp": 2, "chunks": 2, **SP}, "pipeline": {"schedule": "interleaved"},
        "model": {"layers": 4, "seq": 4, "hidden": 8, "vocab": 11}, "zero": {"stage": 3}, "train": {"global_batch": 8},
    }),
    Case("cp-gather", 2, {"layout": {"cp": 2}, "context": {"kind": "gather"}}),
    Case("cp-ring", 4, {
        "layout": {"cp": 4}, "context": {"kind": "ring", "order": "striped"}, "model": {"kv_heads": 2},
        "recompute": {"mode": "full"},
    }, fields=ALL),
    Case("cp-ulysses-kv-copies", 4, {
        "layout": {"cp": 4}, "context": {"kind": "ulysses", "order": "striped"}, "model": {"kv_heads": 1},
        "train": {"precision": "bf16"},
    }),
    Case("cp-gather-tp", 4, {
        "layout": {"cp": 2, "tp": 2, **SP}, "context": {"kind": "gather"}, "recompute": {"mode": "full"},
    }, fields=ALL),
    Case("cp-hybrid", 8, {
        "layout": {"cp": 4, "pp": 2}, "context": {"kind": "hybrid", "inner": 2, "order": "contiguous"},
        "zero": {"stage": 1},
    }),
    Case("tp-pp-middle", 8, {"layout": {"tp": 2, "pp": 4}, "model": {"layers": 4, "hidden": 8}}),
]  # fmt: skip


RECORDS = Records(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_predicted_equals_recorded(case: Case) -> None:
    assert list(differences(case, RECORDS.of(case))) == []


@pytest.mark.wide
def test_compiled_blocks_that_share_sequences_send_what_is_predicted() -> None:
    """This holds for every kind of context parallelism with documents, run as `train.compile=true` runs it."""
    kinds: list[dict[str, Any]] = [{"kind": kind} for kind in ("gather", "ring", "ulysses")]
    compiled = {"precision": "fp32", "compile": True}
    cases = [
        Case(str(kind), 4, {"layout": {"cp": 4}, "context": kind, "train": compiled, "model": {"seq": 16}}, ALL)
        for kind in [*kinds, {"kind": "hybrid", "inner": 2}]
    ]
    ranks = run_ranks(4, record, cases, deadline=600.0)
    for number, case in enumerate(cases):
        assert list(differences(case, [rank[number] for rank in ranks])) == [], case.name


def test_one_process_sends_nothing() -> None:
    assert predict_step(CASES[0].config, 1) == {} == RECORDS.of(CASES[0])[0][0]["comm"]


def unpadded(sizes: list[int], ranks: int, elements: int, units: list[int] | None, align: int) -> Any:
    places, at = [], 0
    for size in sizes:
        places.append((at, 0))
        at += size
    return places, [(0, at)]


def without(owner: Any, name: str, dropped: Any) -> tuple[Any, str, Any]:
    """Return a mutation that removes from a source of traffic, or from a part, the calls for which `dropped` is
    true.
    """
    source = getattr(owner, name)

    def mutated(*args: Any) -> list[Any]:
        return [call for call in source(*args) if not dropped(call)]

    return owner, name, mutated


def instead(name: str, replacement: Any) -> tuple[Any, str, Any]:
    return communication, name, replacement


def instead_in_parts(name: str, replacement: Any) -> tuple[Any, str, Any]:
    return gpt, name, replacement


def closed_ring(at: Any, *sizes: Any) -> Iterator[Any]:
    """Yield the calls of a textbook ring, in which the gradients of keys and values take one more hop."""
    for call in context_calls(at, *sizes):
        yield replace(call, times=call.times + 1) if call.phase == "backward" else call


def ends_only(stage: Any, model: Any, cp: int) -> set[str]:
    return fields_read(stage, model, cp) - {"positions", "segments"}


MUTATIONS: dict[str, tuple[str, tuple[Any, str, Any]]] = {
    "no padding": ("dp-one-bucket", (held, "place", unpadded)),
    "one bucket": ("dp", (held, "bucket_elements", lambda size, element, ranks: 10**9)),
    "gradients in bf16": ("all-bf16", (held, "grad_bytes", lambda size, wanted: size)),
    "no gather again": ("tp-sp-fp32", without(gpt, "column_calls", lambda call: call.repeated)),
    "no loss": ("tp", without(gpt.OutputLayerPart, "collectives", lambda call: call.phase == "forward")),
    "labels everywhere": ("pp-tp-sp-fields", instead("fields_read", lambda stage, model, cp: set(ALL))),
    "no positions or segments": ("all", instead("fields_read", ends_only)),
    "no further axes": ("kv-copies", without(communication, "expand_calls", lambda call: call.axis == "tp.kv")),
    "a tie counted once": ("pp", without(communication, "expand_calls", lambda call: call.axis == "embedding")),
    "metrics not counted": ("pp", without(communication, "sums", lambda call: call.phase == "metrics")),
    "a ring that closes": ("cp-ring", instead_in_parts("context_calls", closed_ring)),
    "no rows of other ranks": ("cp-gather-tp", instead("WIDE", 0)),
    "no sends back": ("pp-interleaved", without(communication, "pipeline", lambda call: call.phase == "backward")),
    "forgotten axes": ("kv-copies", instead("counts_bytes", lambda axes, world: counts_bytes(5, world))),
}  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_formula_is_found(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, (owner, attribute, replacement) = MUTATIONS[mutation]
    case = next(case for case in CASES if case.name == name)
    assert_found(case, RECORDS.of(case), owner, attribute, replacement, monkeypatch)


def six(rank: int, world: int, bucket_mib: float) -> tuple[list[Any], dict[Line, Traffic]]:
    """Train three bf16 matrices and three fp32 norms of a plain torch module, and return its packing and its
    traffic.
    """
    import torch
    from torch import nn

    from meshwright.comm.mesh import Mesh
    from meshwright.engine.sharding.data_parallel import DataParallel

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
    held = [HeldParameter(whole(f"{i}", shape, Init("zeros")), dtype, 0) for i, (shape, dtype) in enumerate(SHAPES)]
    buffers = buffers_of(held, Layout(2), bucket_mib, ZeroConfig())
    found = communication.expand_calls(communication.bucket_calls(held, buffers, Layout(2)))
    assert communication.by_line(found) == {line: traffic}


def worked(sequence_parallel: bool) -> Config:
    """Return the worked layout of docs/communication.md."""
    return config_from({
        "model": {"layers": 8, "hidden": 1024, "heads": 16, "vocab": 50304, "seq": 2048},
        "data": {"prefixes": ["made"]},
        "layout": {"tp": 4, "pp": 2, "sequence_parallel": sequence_parallel},
        "train": {"precision": "bf16", "global_batch": 16, "micro_batch": 1},
    })  # fmt: skip


@pytest.mark.parametrize("split", [False, True], ids=["plain", "sequence parallel"])
def test_the_worked_layout_by_hand(split: bool) -> None:
    """The tp axis of 16 ranks has 8 ranks on each of two stages, with 4 layers and M = 8 micro-batches. The ring shares
    are 3/2, 3/4 and 1.
    """
    m, each, tokens, hidden = 8, 8, 2048, 1024
    h = tokens * hidden * 2
    layer, ends = (10, 2 + 2) if split else (4, 1 + 1)  # ends: embedding + head
    calls = (8 * layer + ends) * m * each
    loss = 3 * tokens * 4 * m * each  # in two all_reduces
    batches = 3 * tokens * 8 * m * each  # tokens to the first stage, labels and mask to the last
    # Sequence parallelism also sums these gradients over tp: in each layer 2 norms of 2 h and the biases of out and
    # down, then the positions and the last norm.
    shared = 4 * (2 * 4 * 6 * hidden + tokens * hidden + 2 * hidden) * each if split else 0
    gathered, reduced = (calls * h, loss + shared) if split else (0, calls * h + loss)
    assert predict_step(worked(split), 16)["tp"] == Traffic(
        calls + 2 * m * each + 2 * m * each + (2 * each if split else 0),
        calls * h + loss + batches + shared,
        gathered * 3 // 4 + reduced * 3 // 2 + batches,
    )


def test_the_tables_of_the_docs() -> None:
    """Every row `| axis | off or on | calls | payload | wire |` of the page equals the prediction."""
    page = (Path(__file__).parents[2] / "docs" / "communication.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z]+)` \| (off|on) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", page, re.MULTILINE)
    found = {(axis, sp): Traffic(*(int(n.replace(",", "")) for n in numbers)) for axis, sp, *numbers in rows}
    predicted = {"off": predict_step(worked(False), 16), "on": predict_step(worked(True), 16)}
    assert found == {(axis, sp): traffic for sp, axes in predicted.items() for axis, traffic in axes.items()}


def test_mistakes_are_told() -> None:
    with pytest.raises(UserError, match="samples=3 is not a multiple of dp x micro_batch = 2 x 1 = 2: try 2"):
        predict_step(small_config(), 2, samples=3)
    with pytest.raises(UserError, match="field 'tokens' has the unknown dtype 'int65'"):
        predict_step(small_config(), 2, fields={"tokens": "int65"})
    with pytest.raises(UserError, match="not divisible by tp x cp x pp"):
        predict_step(small_config(layout={"tp": 2}), 3)


def test_no_torch() -> None:
    code = "import sys, meshwright.plan.communication; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def any_case(choose: random.Random, world: int, number: int) -> Case:
    """Return a random layout of `world` ranks that the rules allow."""
    while True:
        llama = choose.random() < 0.5
        chunks = choose.choice([1, 1, 2])
        case = Case(
            f"random-{number}", world,
            {
                "layout": {
                    "tp": choose.choice([1, 2, 4]), "pp": choose.choice([1, 2, 4]), "chunks": chunks,
                    "sequence_parallel": choose.random() < 0.5,
                },
                "pipeline": {"schedule": "interleaved" if chunks > 1 else choose.choice(["1f1b", "gpipe"])},
                "model": {
                    "layers": choose.choice([2, 3, 5, 8]), "hidden": 8, "heads": 4, "vocab": choose.randrange(9, 40),
                    "kv_heads": choose.choice([1, 2, 4]), "seq": choose.choice([4, 12]), **(LLAMA if llama else {}),
                },
                "train": {
                    "precision": choose.choice(["fp64", "fp32", "bf16"]), "micro_batch": choose.choice([1, 2]),
                    "global_batch": choose.choice([8, 16]),
                },
                "comm": {"bucket_mib": choose.choice([0.0005, 0.002, 25.0])},
            },
            ALL if choose.random() < 0.3 else None,
        )  # fmt: skip
        try:
            predict_step(case.config, world)
            return case
        except UserError:
            continue


@pytest.mark.wide
@pytest.mark.parametrize(("world", "seed"), [(2, 1), (4, 2), (4, 3), (8, 4)])
def test_any_layout(world: int, seed: int) -> None:
    choose = random.Random(seed)
    cases = [any_case(choose, world, number) for number in range(6)]
    ranks = run_ranks(world, record, cases)
    for i, case in enumerate(cases):
        assert list(differences(case, [rank[i] for rank in ranks])) == [], case


def test_all_ranks_of_unequal_replicas_are_counted_with_whole_matrices() -> None:
    sections = {
        "layout": {"replicas": 2, "tp": 2}, "optimizer": {"name": "muon"},
        "train": {"local": {"steps": 2, "shares": [1, 3]}, "global_batch": 8, "precision": "fp32"},
    }  # fmt: skip
    config = small_config(**sections)
    calls = sum(traffic.calls for rank in range(8) for traffic in communication.predict_rank(config, 8, rank).values())
    assert calls == sum(traffic.calls for traffic in communication.predict_detail(config, 8).values())


def test_buckets_grow_with_the_ranks_that_sum_them() -> None:
    """The slice of a bucket that a ring sends at a time is at least a quarter of a MiB, on any number of ranks."""
    mib = [bucket_elements(0.0, 4, ranks) * 4 / 2**20 for ranks in (1, 100, 512, 1024)]
    assert mib == [25.0, 25.0, 128.0, 256.0]
    assert bucket_elements(25.0, 4, 1024) * 4 == 25 * 2**20  # a size that the user has set stays
    model, train = {"layers": 64, "hidden": 1024, "heads": 8}, {"global_batch": 1024}
    config = small_config(model=model, train=train, comm={"bucket_mib": 0.0})
    largest = max(max(buffer.buckets) * buffer.gradient for buffer in packing_of(job_of(config, 1024), 0).buffers)
    assert largest / 2**20 > 256.0
