"""Time work on a device, and break down a step's time by kind of kernel."""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from meshwright.device import Device

# A kernel belongs to the first kind whose pattern matches its name.
KERNEL_KINDS = {
    "attention": r"flash|fmha|sdpa|cudnn|mha|efficient_attention",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|splitK",
    "optimizer": r"_adamw|FusedOptimizer|multi_tensor|LpNorm|NormTwoOps",
}


def median_ms(device: Device, work: Callable[[], Any], repeats: int = 10, warm: int = 3) -> float:
    for _ in range(warm):
        work()
    return statistics.median(times_ms(device, work, repeats))


def draw(device: Device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return a random tensor. Zeros would not do, because their products run faster."""
    return torch.randn(*shape, device=device.torch).to(dtype)


def copy_gb_s(device: Device, elements: int, seconds: Callable[[Callable[[], Any]], float]) -> float:
    """Return the GB/s of a copy that `seconds` times, counting bytes read and written."""
    x = torch.ones(elements, dtype=torch.float32, device=device.torch)
    y = torch.empty_like(x)
    return 2 * x.nbytes / seconds(lambda: y.copy_(x)) / 1e9


def times_ms(device: Device, work: Callable[[], Any], repeats: int) -> list[float]:
    """Return the milliseconds of each of `repeats` calls. The host does not wait for the device in between, so launch
    time counts only for the first call."""
    if device.is_cpu:
        marks = [time.perf_counter()]
        for _ in range(repeats):
            work()
            marks.append(time.perf_counter())
        return [1e3 * (end - begin) for begin, end in pairwise(marks)]
    events = [torch.Event(device.torch, enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    events[-1].synchronize()
    return [float(begin.elapsed_time(end)) for begin, end in pairwise(events)]


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KERNEL_KINDS.items() if re.search(pattern, kernel, re.I)), "memory-bound")


def by_kind(
    device: Device, work: Callable[[], Any], parts: int
) -> tuple[dict[str, float], list[tuple[str, float, float]]]:
    """Return the times of `work` by kind of kernel, divided by `parts`, the number of equal parts that it consists of.

    The first result is milliseconds by kind, with `idle` for the time in which no kernel ran. The second is (name,
    calls, milliseconds) of every kernel, the longest first. Both are empty on a CPU.
    """
    if device.is_cpu:
        return {}, []
    device.synchronize()
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA]) as profile:
        work()
        device.synchronize()
    spans: list[tuple[float, float]] = []
    kinds, times = defaultdict[str, float](float), defaultdict[str, float](float)
    calls = Counter[str]()
    for event in profile.events():
        if event.device_type.name == "CPU":
            continue
        ms = (event.time_range.end - event.time_range.start) / 1e3
        spans.append((event.time_range.start, event.time_range.end))
        kinds[kind_of(event.name)] += ms
        calls[event.name] += 1
        times[event.name] += ms
    # Kernels of several streams may overlap, so idle time is measured from the end of the latest kernel so far.
    spans.sort()
    reached, idle = (spans[0][0], 0.0) if spans else (0.0, 0.0)
    for begin, end in spans:
        idle += max(0.0, begin - reached) / 1e3
        reached = max(reached, end)
    kinds["idle"] = idle
    kernels = [(name, calls[name] / parts, ms / parts) for name, ms in sorted(times.items(), key=lambda item: -item[1])]
    return {kind: ms / parts for kind, ms in kinds.items()}, kernels
