"""`meshwright.layers`: a module of a user's own with tensor-parallel layers, in `wrap`, against one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright
from meshwright.check.oracle import EXACT, WholeTensors, gather_global, parameters, relative, true_gradients, worst
from meshwright.errors import UserError
from meshwright.layers import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelCrossEntropy,
    ParallelMLP,
    RowParallelLinear,
    TensorRegion,
    VocabParallelEmbedding,
)
from meshwright.nn.own_layers import ParallelLayer
from tests.support.ranks import RankFailed, run_ranks

VOCAB, HIDDEN, SEQ, SAMPLES, STEPS = 24, 16, 6, 8, 3
BASE: dict[str, Any] = {
    "train": {"global_batch": SAMPLES, "micro_batch": 2, "precision": "fp64"}, "optimizer": {"lr": 1e-2},
    "run": {"device": "cpu"}, "comm": {"bucket_mib": 0.002},
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, kv_heads: int, activation: str, bias: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = ParallelAttention(HIDDEN, 4, kv_heads, bias=bias)
        self.mlp = ParallelMLP(HIDDEN, 24, activation, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    """A small transformer that uses every layer: both biases apart, gathered outputs and a scattered input."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = VocabParallelEmbedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList([Block(2, "swiglu", False), Block(4, "gelu", True)])
        self.gathered = ColumnParallelLinear(HIDDEN, 8, gather_output=True)
        self.scattered = RowParallelLinear(8, HIDDEN, input_is_parallel=False)
        self.apart = ColumnParallelLinear(HIDDEN, 12, skip_bias_add=True)
        self.back = RowParallelLinear(12, HIDDEN, skip_bias_add=True)
        self.region = TensorRegion()
        self.shift = nn.Parameter(torch.linspace(-1, 1, HIDDEN))
        self.head = ColumnParallelLinear(HIDDEN, VOCAB, bias=False)
        self.loss = ParallelCrossEntropy()
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.shift
        for block in self.blocks:
            x = block(x)
        x = x + self.scattered(torch.tanh(self.gathered(x)))
        y, bias = self.apart(x)
        y, late = self.back(torch.relu(y + bias))
        # Doubling the sum of every rank's part of the features is the identity, written with three mappings.
        x = x + self.region.gather(self.region.scatter(y + late))
        return self.head(x)


def summed_loss(net: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    losses = net.loss(net(batch["ids"]), batch["labels"])
    return losses.sum(), (batch["labels"] >= 0).sum()


def samples(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (SAMPLES, SEQ + 1), generator=generator)
    # Samples have different numbers of tokens that count, so a wrong divisor shows.
    labels = ids[:, 1:].masked_fill(torch.arange(SEQ) >= torch.arange(SAMPLES)[:, None] % SEQ + 1, -100)
    return {"ids": ids[:, :-1], "labels": labels}


def of_rank(batch: dict[str, Tensor], index: int, count: int) -> dict[str, Tensor]:
    """Return the samples of one data-parallel rank: every `count`-th micro-batch."""
    return {name: x.view(-1, count, 2, SEQ)[:, index].flatten(0, 1) for name, x in batch.items()}


def wrapped(tied: bool = False, **sections: dict[str, Any]) -> Any:
    return meshwright.wrap(Net(tied).double(), {**BASE, **sections}, loss=summed_loss)


def gradients(model: Any, batch: dict[str, Tensor]) -> Any:
    model._given.micro_batches = [{k: v[i : i + 2] for k, v in batch.items()} for i in range(0, len(batch["ids"]), 2)]
    return true_gradients(model.trainer)


def reference(tied: bool) -> tuple[WholeTensors, WholeTensors, list[float]]:
    model = wrapped(tied)
    found = gather_global(gradients(model, samples(0)))
    numbers = [model.step(samples(step)) for step in range(STEPS)]
    return found, gather_global(parameters(model.trainer)), [n.loss for n in numbers] + [n.grad_norm for n in numbers]


def compared(rank: int, world: int, cases: list[tuple[bool, dict[str, Any]]], wanted: Any) -> list[tuple[Any, ...]]:
    results = []
    for tied, sections in cases:
        model = wrapped(tied, **sections)
        mine = partial(of_rank, index=model.trainer.ctx.mesh.samples.index, count=model.trainer.ctx.mesh.samples.size)
        whole, after, numbers = wanted[tied]
        off = worst(gradients(model, mine(samples(0))), whole)
        found = [model.step(mine(samples(step))) for step in range(STEPS)]
        series = relative([n.loss for n in found] + [n.grad_norm for n in found], numbers)
        results.append((off, worst(parameters(model.trainer), after), series))
    return results


CASES: dict[int, list[tuple[bool, dict[str, Any]]]] = {
    2: [(False, {"layout": {"tp": 2}}), (True, {"layout": {"tp": 2}, "zero": {"stage": 3}})],
    4: [(False, {"layout": {"tp": 2}, "zero": {"stage": stage}}) for stage in range(4)],
}


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.wide)])
def test_a_module_with_parallel_layers_equals_one_process(world: int) -> None:
    wanted = {tied: reference(tied) for tied in (False, True)}
    for rank in run_ranks(world, compared, CASES[world], wanted):
        for case, (off, after, series) in zip(CASES[world], rank, strict=True):
            assert off[0] <= EXACT, f"{case}: the gradient of {off[1]} is off by {off[0]:.1e}"
            assert after[0] <= EXACT, f"{case}: {after[1]} is off by {after[0]:.1e} after {STEPS} steps"
            assert series <= EXACT, case


def without_the_sum(rank: int, world: int, wanted: Any) -> float:
    """Plant the classic bug of hand-made layers: ranks do not sum the gradient of their common input."""
    model = wrapped(layout={"tp": 2})
    layer = model.module.blocks[0].mlp.up
    layer.sides = layer.sides._replace(x=("", 1))
    return worst(gradients(model, samples(0)), wanted[0])[0]


def test_the_comparison_finds_a_missing_sum() -> None:
    assert min(run_ranks(2, without_the_sum, reference(False))) > 1e-3


def test_on_one_process_they_are_torch_s_layers() -> None:
    net = Net()
    batch = samples(1)
    logits = net(batch["ids"])
    ours = net.loss(logits, batch["labels"])
    torchs = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    torch.testing.assert_close(ours.flatten(), torchs)
    few = logits[:1].detach().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: net.loss(x, batch["labels"][:1]), (few,))
    x = torch.randn(3, HIDDEN)
    linear = ColumnParallelLinear(HIDDEN, 8)
    torch.testing.assert_close(linear(x), F.linear(x, linear.weight, linear.bias))


def test_autocast_multiplies_in_its_precision() -> None:
    net = Net()
    with torch.autocast("cpu", torch.bfloat16):
        logits = net(samples(0)["ids"])
    assert logits.dtype == torch.bfloat16
    logits.float().sum().backward()
    assert all(value.grad is not None and value.grad.dtype == torch.float32 for value in net.parameters())


def too_many_ranks(rank: int, world: int, net: Any) -> None:
    meshwright.wrap(net, {**BASE, "layout": {"tp": 2}}, loss=summed_loss)


@pytest.mark.parametrize(
    ("net", "sentence"),
    [
        (ParallelAttention(12, 3), "layout.tp=2 does not divide the 3 key-value heads: try layout.tp=1 or 3"),
        (ParallelMLP(8, 5, "relu"), "layout.tp=2 does not divide the 5 that up.weight is cut by"),
    ],
)  # fmt: skip
def test_sizes_that_tp_does_not_divide_are_refused(net: ParallelLayer, sentence: str) -> None:
    with pytest.raises(RankFailed, match=sentence):
        run_ranks(2, too_many_ranks, net)


def test_mistakes_are_refused_when_the_layer_is_made() -> None:
    with pytest.raises(UserError, match="activation='mish' is not known: try swiglu, gelu, relu or silu"):
        ParallelMLP(8, 16, "mish")
    with pytest.raises(UserError, match="use one of them"):
        ColumnParallelLinear(8, 16, gather_output=True, skip_bias_add=True)
    with pytest.raises(UserError, match="must be a multiple of kv_heads=3"):
        ParallelAttention(16, 4, 3)
