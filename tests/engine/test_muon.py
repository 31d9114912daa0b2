"""Muon matches its formula, and its plan makes matrices whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright.config.rules import check
from meshwright.engine.optim.matrices import BucketPlan, MatrixParameter, matrices_of, plan_rounds
from meshwright.engine.optim.muon import COEFFICIENTS, orthogonalised
from meshwright.errors import UserError
from meshwright.plan.communication import all_ranks, by_line, stage_calls
from meshwright.plan.job import job_of
from meshwright.spec.layout.params import ParamRecord
from meshwright.spec.layout.redistribute import Redistribution
from meshwright.spec.model.description import model_of
from meshwright.spec.model.part import Coordinate
from tests.support.oracle import make_trainer, small_config

LLAMA = {
    "hidden": 32, "heads": 4, "kv_heads": 2, "norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "ffn": 48,
    "bias": True, "layers": 2, "tied_embeddings": False,
}  # fmt: skip
# By the end of a name, the rows at which a parameter is cut into matrices: four query heads and two key-value heads of
# width 8, and gate and up.
MATRICES = {"qkv.weight": [0, 32, 48, 64], "out.weight": [0, 32], "gate_up.weight": [0, 48, 96], "down.weight": [0, 32]}


def orthogonal(d: Tensor) -> Tensor:
    """Run five iterations as the paper writes them, on the shorter side."""
    x = (d if d.shape[0] <= d.shape[1] else d.T) / d.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if d.shape[0] <= d.shape[1] else x.T


@pytest.mark.parametrize("adjusted", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_muon_equals_torch(precision: str, adjusted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch always iterates in bf16. In float64 its iterations are made exact too, and the results agree to the last
    digits. In bf16 they agree to the rounding of its 8 bits.
    """
    exact = precision == "fp64"
    if exact:
        monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())
    muon = {"momentum": 0.9, "scale": "original" if adjusted == "original" else "match_adamw"}
    sections = {"model": LLAMA | {"bias": False}, "train": {"precision": precision}}
    trainer = make_trainer(small_config(**sections, optimizer={"name": "muon", "lr": 0.02, "muon": muon}))
    slots = [s for buffer in trainer.data_parallel.buffers for s in buffer.slots if len(s.record.matrices) == 1]
    before = [slot.view.detach().clone() for slot in slots]
    theirs = [torch.nn.Parameter(slot.view.detach().clone()) for slot in slots]
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn=adjusted)
    draw = torch.Generator().manual_seed(5)
    for _ in range(4):
        for slot, parameter in zip(slots, theirs, strict=True):
            parameter.grad = torch.randn(slot.grad.shape, generator=draw, dtype=parameter.dtype)
            slot.grad.copy_(parameter.grad)
        trainer.optimizer.step(0.02, divisor=1.0)
        reference.step()
    for slot, parameter, first in zip(slots, theirs, before, strict=True):
        error = (slot.view.detach() - parameter.detach()).norm() / (parameter.detach() - first).norm()
        assert error < (1e-13 if exact else 2**-6), slot.name


@pytest.mark.parametrize("scale", ["match_adamw", "original"])
def test_muon_equals_its_formula(scale: str) -> None:
    """Queries, keys, values, gate and up are separate matrices. All parameters that are not matrices of a block follow
    AdamW with its own learning rate.
    """
    lr, own, mu, decay, (b1, b2) = 0.02, 0.003, 0.9, 0.1, (0.9, 0.95)
    muon = {"momentum": mu, "adamw_lr": own, "scale": scale}
    trainer = make_trainer(small_config(model=LLAMA, optimizer={"name": "muon", "lr": lr, "muon": muon}))
    slots = [slot for buffer in trainer.data_parallel.buffers for slot in buffer.slots]
    wanted = {slot.name: slot.view.detach().clone() for slot in slots}
    momenta = {slot.name: [torch.zeros_like(slot.view) for _ in range(2)] for slot in slots}
    draw = torch.Generator().manual_seed(5)
    seen = set()
    for step in (1, 2, 3):
        for slot in slots:
            g = torch.randn(slot.grad.shape, generator=draw, dtype=torch.float64)
            slot.grad.copy_(g * 7.0)
            p, (m, v) = wanted[slot.name], momenta[slot.name]
            cuts = next((rows for end, rows in MATRICES.items() if slot.record.name.endswith(end)), None)
            if cuts is None:
                m.mul_(b1).add_(g, alpha=1 - b1)
                v.mul_(b2).add_(g * g, alpha=1 - b2)
                p.mul_(1 - own * decay * slot.record.decay)
                p.sub_(own * m / (1 - b1**step) / ((v / (1 - b2**step)).sqrt() + 1e-8))
                continue
            seen.add(slot.record.name.split(".", 2)[-1])
            m.mul_(mu).add_(g)
            for low, high in zip(cuts, cuts[1:], strict=False):
                rows, columns = high - low, p.shape[1]
                size = 0.2 * math.sqrt(max(rows, columns)) if scale == "match_adamw" else max(1, rows / columns) ** 0.5
                u = size * orthogonal((g + mu * m)[low:high])
                p[low:high] = p[low:high] * (1 - lr * decay) - lr * u
        trainer.optimizer.step(lr, divisor=7.0)
    assert len(seen) == 4
    for slot in slots:
        torch.testing.assert_close(slot.view.detach(), wanted[slot.name], rtol=1e-11, atol=1e-12)


def test_every_expert_and_the_router_are_matrices() -> None:
    experts = {"count": 4, "ffn": 16, "shared": 1, "first_dense": 1}
    config = small_config(model=LLAMA | {"bias": False, "experts": experts}, optimizer={"name": "muon"})
    records = model_of(config).records(Coordinate()).values()
    shapes = {r.name.split(".", 2)[-1]: [m.shape for m in matrices_of(0, MatrixParameter(0, (r,)))]
              for r in records if r.matrices}  # fmt: skip
    assert shapes["experts.gate_up.weight"] == [(1, 16, 32)] * 8 and shapes["experts.router.weight"] == [(4, 32)]
    assert shapes["experts.shared.gate_up.weight"] == [(16, 32)] * 2
    others = {r.name.split(".")[-2] for r in records if not r.matrices}
    assert not any(r.matrices for r in records if not r.name.startswith("layers.")) and "embedding" in others


def test_heads_can_be_matrices() -> None:
    latent = {"q_rank": 12, "kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "v_dim": 6}
    cases: list[tuple[dict[str, Any], dict[str, list[int]]]] = [
        ({}, {"attention.qkv.weight": [8] * 8, "attention.out.weight": [32]}),
        ({"kv_heads": 4, "bias": False, "latent": latent},
         {"attention.q_b.weight": [12] * 4, "attention.kv_b.weight": [8, 6] * 4, "attention.q_a.weight": [12]}),
    ]  # fmt: skip
    for model, heights in cases:
        config = small_config(model=LLAMA | model, optimizer={"name": "muon", "muon": {"per_head": True}})
        found = {r.name.split(".", 2)[-1]: [*r.matrices] for r in model_of(config).records(Coordinate()).values()}
        assert {name: found[name] for name in heights} == heights


@pytest.mark.parametrize("shape", [(3, 20, 50), (2, 50, 20), (1, 1, 30), (4, 16, 16)])
def test_singular_values_come_near_one(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    # The simple polynomial trades exactness for speed: its values end in a band around 1.
    assert ((torch.linalg.svdvals(orthogonalised(x, "simple", 5)) - 1).abs() < 0.35).all()
    exact = orthogonalised(x, "polar_express", 12)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    torch.testing.assert_close(exact, u @ v, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("coefficients, iterations, band", [
    ("quintic", 5, 0.4), ("cans", 5, 0.2), ("polar_express", 8, 0.01), ("deepseek_v4", 10, 0.02),
])  # fmt: skip
def test_each_set_of_coefficients_brings_small_values_near_one(coefficients: str, iterations: int, band: float) -> None:
    """The singular values span three orders of magnitude, of which the first has most of the norm."""
    draw = torch.Generator().manual_seed(3)
    u, v = (torch.linalg.qr(torch.randn(n, 12, generator=draw, dtype=torch.float64)).Q for n in (12, 30))
    x = (u * torch.logspace(0, -2 if iterations == 5 else -3, 12, dtype=torch.float64)) @ v.T
    values = torch.linalg.svdvals(orthogonalised(x[None], coefficients, iterations))
    assert ((values - 1).abs() < band).all(), values


def test_a_config_takes_every_set_of_coefficients() -> None:
    for name in COEFFICIENTS:
        assert small_config(optimizer={"muon": {"coefficients": name}}).optimizer.muon.coefficients == name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_stay_and_small_gradients_do_not_underflow(dtype: torch.dtype) -> None:
    x = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert not orthogonalised(torch.zeros_like(x), "simple", 5).any()
    small = orthogonalised(x * 2.0**-110, "simple", 5)
    assert torch.equal(small, orthogonalised(x, "simple", 5)) and small.any()


def moved(plan: Redistribution, before: Sequence[Sequence[np.ndarray]], after: Sequence[Sequence[np.ndarray]]) -> None:
    """Run a plan in one process. Both lists are indexed by rank and tensor."""
    for move in plan.moves:
        values = before[move.source][move.tensor][move.slices(move.source_start)]
        after[move.target][move.tensor][move.slices(move.target_start)] = values


def local(record: ParamRecord, tensor: np.ndarray) -> np.ndarray:
    found = np.zeros(record.local_shape)
    for box in record.boxes:
        at = tuple(slice(a, a + n) for a, n in zip(box.local_start, box.shape, strict=True))
        found[at] = tensor[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))]
    return found


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("shards", [1, 2, 5])
def test_matrices_are_whole_on_one_owner_and_come_back(tp: int, shards: int) -> None:
    """tp=4 holds copies of the two key-value heads."""
    config = small_config(model=LLAMA | {"bias": False}, optimizer={"name": "muon"})
    by_rank = [model_of(config).records(Coordinate((("tp", tp, t),) if tp > 1 else ())) for t in range(tp)]
    keys = [key for key, record in by_rank[0].items() if record.matrices]
    drawn = np.random.default_rng(0)
    whole = {by_rank[0][key].name: drawn.normal(size=by_rank[0][key].shape) for key in keys}
    parameters, size = [], 0
    for key in keys:
        parameters.append(MatrixParameter(size, tuple(records[key] for records in by_rank)))
        size += parameters[-1].numel
    size = -(-size // shards) * shards
    plans = [[next(plan_rounds([(size, parameters)], (shards, s), (tp, t), lambda a, b: a * b * min(a, b)))[0]
              for s in range(shards)] for t in range(tp)]  # fmt: skip
    flats = []
    for t in range(tp):
        bucket = np.zeros(size)
        for parameter in parameters:
            record = parameter.peers[t]
            bucket[parameter.start :][: record.numel] = local(record, whole[record.name]).ravel()
        flats.append(np.split(bucket, shards))
    held = [[[np.zeros(plans[t][s].held)] for s in range(shards)] for t in range(tp)]
    for t in range(tp):
        moved(plans[t][0].gather, [[part] for part in flats[t]], held[t])
    owners = []
    for s in range(shards):
        owners += _check_owners([plans[t][s] for t in range(tp)], [held[t][s][0] for t in range(tp)], parameters, whole)
    # Queries, keys, values, out, gate, up and down of two blocks are each on one rank.
    assert len(owners) == 2 * 7 and len({(name, start) for name, start in owners}) == len(owners)
    for t in range(tp):
        back = [[np.zeros(size // shards)] for _ in range(shards)]
        moved(plans[t][0].scatter, held[t], back)
        assert all((-2.0 * part == found[0]).all() for part, found in zip(flats[t], back, strict=True))


def _check_owners(
    plans: Sequence[BucketPlan], held: Sequence[np.ndarray], parameters: Sequence[MatrixParameter],
    whole: dict[str, np.ndarray],
) -> list[tuple[str, Any]]:  # fmt: skip
    """Assemble the matrices of one shard's ranks, compare them, and put -2 times each back in place."""
    if not plans[0].matrices:
        return []
    views, made, found = [], [], []
    for t, plan in enumerate(plans):
        records = [parameters[m.parameter].peers[t] for m in plan.matrices]
        views.append([held[t][o : o + r.numel].reshape(r.local_shape)
                      for o, r in zip(plan.offsets, records, strict=True)])  # fmt: skip
        made.append([np.full(m.shape, np.nan) for m in plan.matrices])
    moved(plans[0].assemble, views, made)
    for t, plan in enumerate(plans):
        for number in plan.mine:
            m = plan.matrices[number]
            name = parameters[m.parameter].peers[0].name
            at = tuple(slice(a, a + n) for a, n in zip(m.start, m.shape, strict=True))
            assert (made[t][number] == whole[name][at]).all()
            made[t][number] *= -2.0
            found.append((name, m.start))
    moved(plans[0].disperse, made, views)
    return found


def test_the_work_is_shared() -> None:
    """The busiest rank has at most twice the mean if there are many matrices."""
    config = small_config(model=LLAMA | {"layers": 16}, optimizer={"name": "muon"})
    records = [record for record in model_of(config).records(Coordinate()).values() if record.matrices]
    parameters = [MatrixParameter(1000 * number, (record,)) for number, record in enumerate(records)]
    cost = lambda a, b: float(a * b * min(a, b))  # noqa: E731
    plans = [next(plan_rounds([(64000, parameters)], (8, s), (1, 0), cost))[0] for s in range(8)]
    work = [sum(cost(*m.shape[-2:]) for m in plan.matrices) for plan in plans]
    assert max(work) < 2 * sum(work) / 8


def test_all_ranks_calls_are_the_sum_of_each_ones() -> None:
    config = small_config(
        model=LLAMA, optimizer={"name": "muon"}, layout={"tp": 2, "pp": 2}, zero={"stage": 1},
        train={"global_batch": 12},
    )  # fmt: skip
    job = job_of(config, 12)
    each = [stage_calls(replace(job, rank=rank), job.layout.coordinate(rank)["pp"]) for rank in range(12)]
    assert all_ranks(job) == by_line(call for calls in each for call in calls)
    sent = [by_line(calls)["optimizer", "dp", "all_to_all"].wire_bytes for calls in each]  # type: ignore[index]
    assert all(sent) and len(set(sent)) > 1, "ranks of a stage own different matrices"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"layout": {"tp": 4, "tp_grid": [2, 2]}, "train": {"micro_batch": 2}}, "on a grid yet: use adamw"),
    ({"optimizer": {"name": "muon", "muon": {"momentum": 1.0}}}, r"momentum=1.0 must be in \[0, 1\)"),
    ({"optimizer": {"name": "muon", "muon": {"iterations": 0}}}, "iterations=0 must be greater than zero"),
]


@pytest.mark.parametrize("sections, said", BAD)
def test_mistakes_are_one_sentence(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check(small_config(**{"optimizer": {"name": "muon"}, **sections}), 4)
