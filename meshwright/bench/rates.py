"""Measure the compute and memory rates of a rank while all ranks work, since the ranks of a machine share it.

Products, a copy, attention and the optimizer are timed alone. The remainder of a training step (norms, activations, the
loss, the cost of each call) is the time that small reference models take in addition. With the planner's count of their
bytes and kernels, it gives a memory rate and, on a CPU, the microseconds per kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from meshwright.bench.fit import robust
from meshwright.bench.links import time_work
from meshwright.bench.models import LLAMA_ARCHITECTURE
from meshwright.bench.profile import lone_cluster
from meshwright.bench.request import host_bytes
from meshwright.bench.timing import copy_gb_s, draw
from meshwright.comm.mesh import Mesh
from meshwright.config.load import config_from
from meshwright.config.precision import PRECISIONS
from meshwright.config.sections import Config
from meshwright.device import PRECISION_DTYPES, Device
from meshwright.dryrun.stand_ins import RandomTokens, draw_on_device, release
from meshwright.engine.context import build_context
from meshwright.engine.optim.scaling import gradient_scaling
from meshwright.engine.providers import forward_step, model_provider
from meshwright.engine.step import Trainer
from meshwright.plan.cluster import Cluster
from meshwright.plan.compute import ATTENTION_BACKWARD
from meshwright.plan.cost import optimizer_bytes, predict_cost
from meshwright.plan.efficiency import tile_share
from meshwright.plan.job import job_of
from meshwright.plan.stack import COMPILED, states_of
from meshwright.run.pretrain import build_modules
from meshwright.spec.traffic.placement import BUCKET_MIB

# The bytes of gradients that are reduced at once.
BUCKET_BYTES = int(BUCKET_MIB * 2**20)
# The bytes of a collective between computations, and the seconds of compute between two of them.
SMALL_BYTES = 64 * 2**10
SECONDS_BETWEEN = 8e-3
# Waits are timed for longer, because a thread only sometimes fails to get a core at once.
WAIT_TIME_FACTOR = 10
# (tokens, n, k) of the products that are timed on a CPU.
PRODUCTS = ((96, 320, 320), (96, 2560, 640), (160, 640, 2560), (192, 1280, 320), (320, 320, 1280), (384, 4096, 384))
# (layers, hidden, seq, sequences, vocabulary) of the reference models on a CPU, and on an accelerator.
REFERENCE = (
    (2, 64, 32, 1, 256), (2, 128, 256, 4, 512), (2, 192, 160, 2, 3072), (3, 320, 192, 2, 2048), (2, 448, 320, 1, 6144)
)  # fmt: skip
REFERENCE_ACCELERATOR = ((4, 2048, 2048, 4, 32768),)


@dataclass(frozen=True)
class Rates:
    """The rates of one rank while all ranks work: TFLOP/s by precision, GB/s, microseconds, GiB."""

    device: str
    precision: str
    units: int
    peak: dict[str, float]
    product_gb_s: float  # On a CPU, the rate at which a product reads its matrices in addition to its FLOPs; else 0.
    attention_tflops: float  # Counts causal FLOPs, forward and backward.
    copy_gb_s: float  # Counts bytes read and written.
    step_gb_s: float  # The rate of a step's elementwise work, with bytes as the planner counts them.
    kernel_us: float
    optimizer_gb_s: float
    contention: float
    wait_us: float  # The additional time of a collective between computations, compared to back to back.
    step_error: float  # The planner's median relative error on the reference steps with these rates.
    memory_gib: float
    host_gib: float


def measure_rates(mesh: Mesh, device: Device, local_world: int, seconds: float, say: Callable[[str], None]) -> Rates:
    """Measure the rates. All ranks call this together."""
    say(f"measuring products, attention, memory and steps of {device.name}")

    def time(work: Callable[[], Any]) -> float:
        return time_work(mesh.world, device, work, seconds)

    precision = "fp32" if device.is_cpu else "bf16"
    units = device.units()
    peak = {name: product_tflops(device, name, units, time) for name in ("fp32", "bf16", "fp16", "fp64")}
    passing = 0.0
    if units == 1:
        peak[precision], passing = processor_products(precision, time)
    attention = attention_tflops(device, precision, time)
    copy = copy_gb_s(device, 1 << (24 if device.is_cpu else 28), time)
    references = REFERENCE if units == 1 else REFERENCE_ACCELERATOR
    configs = [reference_config(device, precision, shape) for shape in references]
    steps, updates = zip(*(reference_step(config, device, time) for config in configs), strict=True)
    host = host_bytes()
    memory = host / local_world if device.is_cpu else device.memory_bytes()
    rates = Rates(
        device.name, precision, units, peak, passing, attention, copy, copy, 0.0, updates[-1],
        contention(mesh, device, precision, seconds), 1e6 * wait(mesh, device, precision, seconds), 0.0,
        memory / 2**30, host / 2**30,
    )  # fmt: skip
    return fit_steps(rates, configs, steps)


def product_tflops(device: Device, precision: str, units: int, time: Callable[..., float]) -> float:
    """Return the rate of a large product, divided by the share of the peak that the planner expects for its shape."""
    side = 8192
    if device.is_cpu:
        # Many CPUs multiply 16-bit floats very slowly.
        side = 512 if PRECISIONS[precision].is_wide else 128
    a, b = (draw(device, PRECISION_DTYPES[precision], side, side) for _ in range(2))
    return 2 * side**3 / time(lambda: a @ b.t()) / tile_share(side, side, side, 1, units) / 1e12


def processor_products(precision: str, time: Callable[..., float]) -> tuple[float, float]:
    """Return (TFLOP/s, GB/s) of products on a CPU: the rate of their FLOPs, and the rate at which their matrices are
    read in addition. Both are fitted to several shapes, each with both gradients."""
    rows = []
    times = []
    dtype = PRECISION_DTYPES[precision]
    for tokens, n, k in PRODUCTS:
        x, y, w = (torch.randn(*shape).to(dtype) for shape in ((tokens, k), (tokens, n), (n, k)))
        out = torch.empty_like(w)
        calls = (lambda x=x, w=w: x @ w.t(), lambda y=y, w=w: y @ w, lambda x=x, y=y, o=out: torch.mm(y.t(), x, out=o))
        for call, depth in zip(calls, (k, n, tokens), strict=True):
            share = tile_share(tokens * n * k // depth, 1, depth, 1, 1)
            rows.append((2.0 * tokens * n * k / share / 1e12, (x.nbytes + y.nbytes + w.nbytes) / 1e9))
            times.append(time(call))
    coefficients = robust(np.array(rows), np.array(times), np.array(times))
    return 1.0 / float(coefficients[0]), min(1.0 / float(coefficients[1]), 1e4)


def attention_tflops(device: Device, precision: str, time: Callable[..., float]) -> float:
    """Return the TFLOP/s of causal attention, forward and backward."""
    batch, heads, seq, width = (2, 6, 160, 64) if device.is_cpu else (4, 16, 4096, 128)
    dtype = PRECISION_DTYPES[precision]
    q, k, v = (draw(device, dtype, batch, seq, heads, width).requires_grad_() for _ in range(3))
    grad = torch.randn_like(q).transpose(1, 2)

    def both() -> None:
        parts = [x.transpose(1, 2) for x in (q, k, v)]
        out = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        torch.autograd.grad(out, (q, k, v), grad)

    return 2.0 * batch * heads * width * seq * seq * (1 + ATTENTION_BACKWARD) / time(both) / 1e12


def contention(mesh: Mesh, device: Device, precision: str, seconds: float) -> float:
    """Return the time that products lose to a concurrent bucket all_reduce, as a share of its time alone. It is 0 if
    communication takes nothing from compute."""
    group = mesh.samples if not mesh.samples.alone else mesh.world
    bucket = torch.empty(BUCKET_BYTES // 4, device=device.torch).zero_()
    alone = time_work(mesh.world, device, lambda: group.all_reduce(bucket), WAIT_TIME_FACTOR * seconds)
    products = many_products(mesh, device, precision, 2 * alone)

    def overlapped() -> None:
        pending = group.all_reduce(bucket, wait=False)
        products()
        pending.wait()

    both, apart = (time_work(mesh.world, device, work, WAIT_TIME_FACTOR * seconds) for work in (overlapped, products))
    return min(1.0, max(0.0, (both - apart) / alone))


def wait(mesh: Mesh, device: Device, precision: str, seconds: float) -> float:
    """Return the additional seconds of an all_reduce between computations, compared to one right after another."""
    small = torch.empty(SMALL_BYTES // 4, device=device.torch).zero_()
    products = many_products(mesh, device, precision, SECONDS_BETWEEN)
    meet = partial(mesh.world.all_reduce, small)

    def between() -> None:
        products()
        meet()

    budget = WAIT_TIME_FACTOR * seconds
    apart, both, meeting = (time_work(mesh.world, device, work, budget) for work in (products, between, meet))
    return max(0.0, both - apart - meeting)


def many_products(mesh: Mesh, device: Device, precision: str, seconds: float) -> Callable[[], None]:
    """Return a call that computes products for about `seconds`, the same number on every rank."""
    side = 384 if device.is_cpu else 4096
    a, b = (draw(device, PRECISION_DTYPES[precision], side, side) for _ in range(2))
    count = max(1, round(seconds / time_work(mesh.world, device, lambda: a @ b, 0.05)))

    def products() -> None:
        for _ in range(count):
            a @ b

    return products


def reference_config(device: Device, precision: str, shape: tuple[int, ...]) -> Config:
    """Return the config of a reference model. `shape`: (layers, hidden, seq, sequences, vocabulary)."""
    layers, hidden, seq, batch, vocab = shape
    model = {"layers": layers, "hidden": hidden, "heads": hidden // 64, "seq": seq, "vocab": vocab}
    return config_from({
        "model": (LLAMA_ARCHITECTURE if not device.is_cpu else {"tied_embeddings": False}) | model,
        "train": {"precision": precision, "micro_batch": batch, "global_batch": batch, "steps": 10**6},
        "data": {"prefixes": ["made"]}, "run": {"device": device.kind}, "lr": {"schedule": "constant"},
    })  # fmt: skip


def reference_step(config: Config, device: Device, time: Callable[..., float]) -> tuple[float, float]:
    """Return (the seconds of a single rank's forward and backward, the GB/s of the update with the gradient norm)."""
    ctx = build_context(config, 0, 1, device, trains=True)
    data = RandomTokens(config.model.vocab, config.model.seq)
    trainer = Trainer(ctx, build_modules(ctx, model_provider, draw_on_device), forward_step, data)
    both = time(trainer.gradients)
    one = torch.ones((), dtype=torch.float64, device=device.torch)

    def update() -> None:
        trainer.data_parallel.square_sum()
        if trainer.runs_ahead:
            trainer.optimizer.step_on_device(1e-9, gradient_scaling(one, one, 1.0, 0.0))
        else:
            trainer.optimizer.step(1e-9, 1.0)

    elements = sum(buffer.params.numel() for buffer in trainer.data_parallel.buffers)
    rate = elements * optimizer_bytes(states_of(config)) / time(update) / 1e9
    release(trainer)
    device.empty_cache()
    return both, rate


def fit_steps(rates: Rates, configs: Sequence[Config], steps: Sequence[float]) -> Rates:
    """Fit the memory rate and, on a CPU, the microseconds per kernel to the times of the reference steps. Products and
    attention are assumed to take as long as alone."""
    # The planner's times are linear in the two unknowns. Their costs are zero in `free`; in `nothing` all costs are.
    free = replace(rates, step_gb_s=1e12, kernel_us=0.0)
    nothing = replace(free, peak=dict.fromkeys(rates.peak, 1e12), product_gb_s=1e12, attention_tflops=1e12)
    known = np.array([planned_seconds(c, lone_cluster(free)) for c in configs])
    columns = [[planned_seconds(c, lone_cluster(replace(nothing, step_gb_s=1.0))) for c in configs]]
    if rates.units == 1:
        columns.append([planned_seconds(c, lone_cluster(replace(nothing, kernel_us=1.0))) for c in configs])
    rows = np.array(columns).T
    measured = np.array(steps)
    coefficients = robust(rows, np.maximum(measured - known, 0.01 * measured), measured)
    error = float(np.median(np.abs(rows @ coefficients + known - measured) / measured))
    kernel = float(coefficients[1]) if len(coefficients) > 1 else 0.0
    return replace(rates, step_gb_s=min(1 / float(coefficients[0]), 1e4), kernel_us=kernel, step_error=error)


def planned_seconds(config: Config, cluster: Cluster) -> float:
    """Return the planner's forward and backward seconds of a step on one rank."""
    cost = predict_cost(job_of(config, 1, COMPILED), cluster)
    return sum(stage.forward + stage.backward for stage in cost.stages) * cost.job.micro_batches
