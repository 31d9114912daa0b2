"""The least time that a step could take on this device, measured in this process: every matrix product alone, attention
alone, and the optimizer's bytes at the speed of a copy. Beside it, the products back to back, as a step runs them: a
card at its power limit lowers its clock under such a load.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright.bench.models import Product, parameters, products, stage_of
from meshwright.bench.timing import median_ms, once_ms
from meshwright.config.sections import Config
from meshwright.device import Device

OPTIMIZER_BYTES = 28  # fp32 master, gradient and two moments read; master and moments written
BIG = 8192
LOAD_S = 0.5  # seconds of products before and while they are timed under load


@dataclass(frozen=True)
class Floor:
    """Milliseconds of one micro-batch, but `optimizer_ms`, which is once a step."""

    products_ms: float
    products_loaded_ms: float
    attention_ms: float
    optimizer_ms: float
    product_tflops: float
    copy_gb_s: float

    def step_ms(self, micro_batches: int, loaded: bool = False) -> float:
        each = (self.products_loaded_ms if loaded else self.products_ms) + self.attention_ms
        return micro_batches * each + self.optimizer_ms

    def facts(self) -> dict[str, float]:
        return asdict(self)


def measure(config: Config, device: Device, dtype: torch.dtype, pp_rank: int = 0) -> Floor:
    tokens = config.train.micro_batch * config.model.seq
    rate = product_rate(device, dtype)
    speed = copy_speed(device)
    alone, loaded = product_times(products(config, pp_rank), tokens, device, dtype)
    attention = len(stage_of(config, pp_rank).layers) * attention_ms(config, device, dtype)
    optimizer = parameters(config, pp_rank) * OPTIMIZER_BYTES / speed / 1e6
    return Floor(alone, loaded, attention, optimizer, rate, speed)


def draw(device: Device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Random, since products of zeros run faster."""
    return torch.randn(*shape, device=device.torch).to(dtype)


def product_rate(device: Device, dtype: torch.dtype) -> float:
    side = BIG if device.kind != "cpu" else 512
    a, b = draw(device, dtype, side, side), draw(device, dtype, side, side)
    return 2 * side**3 / median_ms(device, lambda: a @ b) / 1e9


def copy_speed(device: Device) -> float:
    """GB/s, read and written."""
    x = torch.empty(1 << (30 if device.kind != "cpu" else 22), dtype=torch.float32, device=device.torch)
    y = torch.empty_like(x)
    return 2 * x.numel() * x.element_size() / median_ms(device, lambda: y.copy_(x)) / 1e6


def product_times(wanted: list[Product], tokens: int, device: Device, dtype: torch.dtype) -> tuple[float, float]:
    """All products of a micro-batch with both gradients: each timed alone, and all of them back to back."""
    alone, calls = 0.0, []
    for p in wanted:
        x, y, w = (draw(device, dtype, *shape) for shape in ((tokens, p.k), (tokens, p.n), (p.n, p.k)))
        three = (lambda x=x, w=w: x @ w.t(), lambda y=y, w=w: y @ w, lambda x=x, y=y: y.t() @ x)
        alone += p.count * sum(median_ms(device, call) for call in three)
        calls.append((p.count, three))

    def back_to_back() -> None:
        for count, three in calls:
            for call in three:
                for _ in range(count):
                    call()

    if device.kind == "cpu":
        return alone, once_ms(device, back_to_back)
    for _ in range(max(1, int(1e3 * LOAD_S / alone))):
        back_to_back()
    return alone, median_ms(device, back_to_back, repeats=max(1, int(1e3 * LOAD_S / alone)), warm=0)


def attention_ms(config: Config, device: Device, dtype: torch.dtype) -> float:
    """Forward and backward of one layer, by the fastest of the device's ways."""
    m, tp, batch = config.model, config.layout.tp, config.train.micro_batch
    heads, kv = m.heads // tp, max(1, m.kv_heads // tp)
    q, k, v = (draw(device, dtype, batch, n, m.seq, m.head_dim).requires_grad_() for n in (heads, kv, kv))
    grad = torch.randn_like(q)

    def both() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv != heads).backward(grad)

    times = [median_ms(device, both)]
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION) if device.kind != "cpu" else ():
        try:
            with sdpa_kernel(backend):
                times.append(median_ms(device, both))
        except RuntimeError:  # this device or torch lacks it
            continue
    return min(times)
