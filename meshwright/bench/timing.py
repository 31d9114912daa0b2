"""Times on a device, and where a step's time goes by kind of kernel."""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from meshwright.device import Device

# A kernel belongs to the first kind whose pattern is in its name.
KINDS = {
    "attention": r"flash|fmha|sdpa|cudnn|mha|efficient_attention",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|splitK",
    "optimizer": r"_adamw|FusedOptimizer|multi_tensor|LpNorm|NormTwoOps",
}


def median_ms(device: Device, work: Callable[[], Any], repeats: int = 10, warm: int = 3) -> float:
    for _ in range(warm):
        work()
    return statistics.median(once_ms(device, work) for _ in range(repeats))


def once_ms(device: Device, work: Callable[[], Any]) -> float:
    if device.kind == "cpu":
        begin = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - begin)
    first, last = (torch.Event(device.torch, enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last))


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.I)), "memory-bound")


def by_kind(
    device: Device, work: Callable[[], Any], parts: int
) -> tuple[dict[str, float], list[tuple[str, float, float]]]:
    """Milliseconds of one of `parts` equal parts of `work` by kind, with `idle` for the time in which no kernel ran;
    and every kernel's name, calls and milliseconds, the longest first. Empty on a CPU."""
    if device.kind == "cpu":
        return {}, []
    device.synchronize()
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA]) as profile:
        work()
        device.synchronize()
    spans, kinds, calls, times = [], Counter[str](), Counter[str](), Counter[str]()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CPU:
            continue
        ms = (event.time_range.end - event.time_range.start) / 1e3
        spans.append((event.time_range.start, event.time_range.end))
        kinds[kind_of(event.name)] += ms
        calls[event.name] += 1
        times[event.name] += ms
    spans.sort()
    reached, idle = (spans[0][0], 0.0) if spans else (0.0, 0.0)
    for begin, end in spans:
        idle += max(0.0, begin - reached) / 1e3
        reached = max(reached, end)
    kinds["idle"] = idle
    kernels = [(name, calls[name] / parts, ms / parts) for name, ms in times.most_common()]
    return {kind: ms / parts for kind, ms in kinds.items()}, kernels
