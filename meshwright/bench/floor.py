"""A lower bound for the time of a step on this device, measured in this process.

It is the sum of every matrix product alone, attention alone, and the optimizer's bytes at the speed of a copy. The same
work is also timed back to back, as a step runs it: under such a load a card at its power limit lowers its clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright.bench.models import job_of_bench, parameters, products
from meshwright.bench.timing import copy_gb_s, draw, median_ms, times_ms
from meshwright.config.sections import Config
from meshwright.device import Device
from meshwright.dryrun.stand_ins import documents_of
from meshwright.nn.attention.context import ContextRows
from meshwright.nn.attention.documents import Documents, document_attention
from meshwright.nn.attention.pieces import RowPositions, kernel, kernel_backward
from meshwright.nn.experts.grouped import grouped_product, grouped_weight_grad
from meshwright.spec.layout.rows import ORDERS
from meshwright.spec.model.part import Product

# Bytes per parameter: the update reads the fp32 master, gradient and two moments, and writes the master and moments.
# The bf16 weight is one half of its master, so it adds nothing.
OPTIMIZER_BYTES = 28
LARGE_SIZE = 8192
LOAD_S = 0.5  # The seconds of work before timing under load, and while timing.
REST_S = 0.5  # The seconds of rest after which a card's clock has recovered.
# The least time for which each call is repeated. Ten products of a small model end before the clock settles.
MIN_TIMED_MS = 25.0

# Each entry is (calls per micro-batch, call).
Calls = list[tuple[int, Callable[[], Any]]]


@dataclass(frozen=True)
class Floor:
    """The measured lower bounds, in milliseconds per micro-batch, except `optimizer_ms`, which is per step.

    `loaded_ms` times all products and attention back to back, and `products_loaded_ms` only the products. `rested_ms`
    times each call ten times after a rest, i.e. its first milliseconds at a clock that the card can't sustain.
    """

    rested_ms: float
    products_ms: float
    products_loaded_ms: float
    attention_ms: float
    loaded_ms: float
    optimizer_ms: float
    product_tflops: float
    copy_gb_s: float

    def step_ms(self, micro_batches: int, loaded: bool = False) -> float:
        """Return the lower bound for a step, with the products alone or `loaded`, i.e. back to back."""
        per_micro_batch = (self.products_loaded_ms if loaded else self.products_ms) + self.attention_ms
        return micro_batches * per_micro_batch + self.optimizer_ms


def measure(config: Config, device: Device, dtype: torch.dtype) -> Floor:
    """Measure the lower bounds for a config on this device."""
    rate = product_rate(device, dtype)
    elements = 1 << (30 if not device.is_cpu else 22)
    speed = copy_gb_s(device, elements, lambda copy: median_ms(device, copy) / 1e3)
    multiplied = product_calls(products(config), device, dtype)
    layers = sum(len(stage.layers) for stage in job_of_bench(config).chunks[0])
    attended = [(layers, attention_call(config, device, dtype))]
    optimizer = parameters(config) * OPTIMIZER_BYTES / speed / 1e6
    products_ms, attention_ms = alone(device, multiplied), alone(device, attended)
    rested = products_ms + attention_ms
    if not device.is_cpu:
        rested = sum(alone(device, [call], least_ms=0.0) for call in multiplied + attended)
    products_loaded = under_load(device, multiplied)
    loaded = under_load(device, multiplied + attended)
    return Floor(rested, products_ms, products_loaded, attention_ms, loaded, optimizer, rate, speed)


def product_rate(device: Device, dtype: torch.dtype) -> float:
    """Return the TFLOP/s of a large square product."""
    side = LARGE_SIZE if not device.is_cpu else 512
    a, b = draw(device, dtype, side, side), draw(device, dtype, side, side)
    return 2 * side**3 / median_ms(device, lambda: a @ b) / 1e9


def product_calls(wanted: list[Product], device: Device, dtype: torch.dtype) -> Calls:
    """Return all products of a micro-batch, each with both gradients. All experts get equally many rows."""
    calls: Calls = []
    for p in wanted:
        x, y = draw(device, dtype, p.m, p.k), draw(device, dtype, p.m, p.n)
        if not p.groups:
            w = draw(device, dtype, p.n, p.k)
            three = (lambda x=x, w=w: x @ w.t(), lambda y=y, w=w: y @ w, lambda x=x, y=y: y.t() @ x)
            calls += [(p.count, call) for call in three]
            continue
        w = draw(device, dtype, p.groups, p.n, p.k)
        ends = (torch.arange(1, p.groups + 1, device=device.torch) * p.m // p.groups).to(torch.int32)
        calls += [
            (p.count, partial(grouped_product, x, w, ends)),
            (p.count, partial(grouped_product, y, w, ends, transposed=True)),
            (p.count, partial(grouped_weight_grad, y, x, ends)),
        ]
    return calls


def attention_call(config: Config, device: Device, dtype: torch.dtype) -> Callable[[], Any]:
    """Return a call of one layer's attention, forward and backward, by the fastest back end of the device.

    If ranks share sequences, it is one rank's share of the work: the kernels of its tiles, without communication.
    """
    model, tp, cp, batch = config.model, config.layout.tp, config.layout.cp, config.train.micro_batch
    if grid := config.layout.grid:  # A grid distributes sequences over one axis and heads over the other.
        tp = grid.size(grid.inner.features)
        batch = batch // grid.rows(grid.inner)
    heads, kv = model.heads // tp, max(1, model.kv_heads // tp)
    if cp > 1 and not config.context_plan.inner:
        return partial(_run_all, _tiles(config, device, dtype, heads, kv))
    if cp > 1:
        heads, kv = heads // cp, max(1, kv // cp)
    q, k, v = (draw(device, dtype, batch, n, model.seq, model.head_dim).requires_grad_() for n in (heads, kv, kv))
    grad = torch.randn_like(q)
    if config.data.reset_attention:
        within = Documents.of(documents_of(model.seq)[None].repeat(batch, 0), device.torch)
        return lambda: torch.autograd.grad(document_attention(q, k, v, within), (q, k, v), grad)

    def both(backend: SDPBackend | None = None) -> None:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv != heads)
            torch.autograd.grad(y, (q, k, v), grad)

    calls: list[Callable[[], None]] = [both]
    if not device.is_cpu:
        calls += [partial(both, backend) for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)]
    times = []
    for call in calls:
        try:
            times.append(median_ms(device, call))
        except RuntimeError:  # This device or this version of torch lacks the back end.
            times.append(float("inf"))
    return calls[times.index(min(times))]


def _tiles(config: Config, device: Device, dtype: torch.dtype, heads: int, kv: int) -> list[Callable[[], Any]]:
    """Return the attention kernels of the first context-parallel rank: forward and backward of each tile."""
    m, cp, batch = config.model, config.layout.cp, config.train.micro_batch
    order = ORDERS[config.context.order](m.seq, cp, [m.seq]).order
    given = ContextRows(RowPositions(order[None].repeat(batch, 0)), device.torch)
    ring = config.context_plan.passes
    sights = [given.sight(0, to, cp) for to in range(cp)] if ring else [given.sight_of(0, cp)]
    q, grad = (draw(device, dtype, batch, heads, m.seq // cp, m.head_dim) for _ in range(2))
    k, v = (draw(device, dtype, batch, kv, m.seq // (cp if ring else 1), m.head_dim) for _ in range(2))
    calls: list[Callable[[], Any]] = []
    for _, tile in (tile for sight in sights for tile in sight.split):
        at, to = (..., slice(tile.top, tile.bottom), slice(None)), (..., slice(tile.left, tile.right), slice(None))
        out, sums = kernel(q[at], k[to], v[to], tile.causal)
        calls.append(partial(kernel, q[at], k[to], v[to], tile.causal))
        calls.append(partial(kernel_backward, grad[at], q[at], k[to], v[to], out, sums, tile.causal))
    return calls


def _run_all(calls: list[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def alone(device: Device, calls: Calls, least_ms: float = MIN_TIMED_MS) -> float:
    """Return the milliseconds per micro-batch of all calls, each timed by itself. The device rests before the first."""
    if not device.is_cpu:
        device.synchronize()
        time.sleep(REST_S)

    def repeated(call: Callable[[], Any]) -> float:
        once = median_ms(device, call, repeats=2, warm=1)
        return median_ms(device, call, repeats=max(10, int(least_ms / max(once, 0.01))))

    return sum(count * repeated(call) for count, call in calls)


def under_load(device: Device, calls: Calls) -> float:
    """Return the milliseconds per micro-batch of all calls back to back, after the device has run them for a while."""

    def back_to_back() -> None:
        for count, call in calls:
            for _ in range(count):
                call()

    once = times_ms(device, back_to_back, 1)[0]
    if device.is_cpu:
        return once
    rounds = max(1, int(1e3 * LOAD_S / once))
    return median_ms(device, back_to_back, repeats=rounds, warm=rounds)
