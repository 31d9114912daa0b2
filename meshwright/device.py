"""All code that depends on the kind of device: which device a rank uses, its back end, precisions, clock and memory.

`meta` is the device of a dry run: tensors have shapes but no memory, nothing is computed, and all other code runs.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import re
import resource
import time
import warnings
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.device_kinds import AUTO, DEVICE_KINDS, accelerators
from meshwright.errors import UserError
from meshwright.plugins import load_object

# The dtype of weights and activations in each precision. Under fp8 only the matrix products use 8 bits.
PRECISION_DTYPES = {
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16,
}  # fmt: skip


class DeviceKind:
    """Everything that depends on one kind of device, by default without separate memory and streams.

    The flags are the abilities of torch and our kernels there. Without one, a slower path computes the same.
    """

    runs_triton = False  # our kernels (`kernels/`) run
    has_scaled_products = False  # torch multiplies 8-bit numbers with scales
    has_wide_products = False  # torch's products take 16-bit numbers and return float32
    has_grouped_products = False  # torch multiplies the rows of several experts in one call
    has_flash_attention = False  # torch's attention on 16-bit numbers, also for documents, returns the log-sums

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def type(self) -> str:
        """The type of its `torch.device`."""
        return self.name

    @property
    def module(self) -> Any:
        """torch's module for this kind (such as `torch.cuda`), or None if it has no streams."""
        return None

    def is_available(self) -> bool:
        return True

    def why_not(self, precision: str, index: int) -> str:
        """Return why this device can't train in a precision, and the fix; or an empty string."""
        return ""

    def group_options(self) -> Any:
        """Return new options of this kind's process groups, with the members of NCCL's, or None if it has none."""
        return None

    def pin_in_place(self, tensor: Tensor, device: torch.device) -> None:
        """Pin host memory, so that the device can copy from and to it without the host."""


class Host(DeviceKind):
    """The CPU."""

    @property
    def type(self) -> str:
        return "cpu"


class Meta(DeviceKind):
    """The device of a dry run."""


class Accelerator(DeviceKind):
    """A device with separate memory and streams, which `torch.<name>` controls as `torch.cuda` does."""

    @property
    def module(self) -> Any:
        return getattr(torch, self.name)

    def is_available(self) -> bool:
        module = getattr(torch, self.name, None)
        return module is not None and bool(module.is_available())


class Cuda(Accelerator):
    runs_triton = True
    has_scaled_products = True
    has_wide_products = True
    has_grouped_products = True
    has_flash_attention = True

    def why_not(self, precision: str, index: int) -> str:
        newest = {"fp8": ((8, 9), "bf16"), "bf16": ((8, 0), "fp16 or fp32")}
        # Asking creates a context on the device, so only these precisions do.
        if precision not in newest:
            return ""
        needed, fix = newest[precision]
        old = torch.cuda.get_device_capability(index) < needed
        return f"is not supported by this GPU: use {fix}" if old else ""

    def group_options(self) -> Any:
        return torch.distributed.ProcessGroupNCCL.Options()

    def pin_in_place(self, tensor: Tensor, device: torch.device) -> None:
        library, address = torch.cuda.cudart(), tensor.data_ptr()
        error = int(library.cudaHostRegister(address, tensor.nbytes, 0))
        if error:
            # CUDA reports a failed call again at the next launch. This launch takes that report.
            with suppress(RuntimeError):
                torch.zeros(1, device=device)
            message = f"{tensor.nbytes >> 20} MiB of host memory can't be pinned (CUDA error {error}): copies will wait"
            warnings.warn(message, stacklevel=3)
        else:
            weakref.finalize(tensor.untyped_storage(), library.cudaHostUnregister, address)


class Npu(Accelerator):
    def why_not(self, precision: str, index: int) -> str:
        fixes = {"fp64": "fp32, bf16 or fp16", "fp8": "bf16"}
        return f"is not supported on {self.name}: use {fixes[precision]}" if precision in fixes else ""


# The kinds that this process has used. Compiled code reads this table, so it is a plain dict.
_KINDS: dict[str, DeviceKind] = {kind.name: kind for kind in (Host("cpu"), Meta("meta"), Cuda("cuda"), Npu("npu"))}


def kind_named(name: str) -> DeviceKind:
    """Return a kind of device by its name in `DEVICE_KINDS`."""
    found = _KINDS.get(name)
    if found is None:
        found = _KINDS[name] = load_object(DEVICE_KINDS.entry(name).kind)(name)
    return found


def kind_of(device: torch.device) -> DeviceKind:
    return kind_named(device.type)


def _accelerator_kind() -> str | None:
    """Return the kind of accelerator on this machine, or None."""
    return next((name for name in accelerators() if kind_named(name).is_available()), None)


def accelerator_count() -> int:
    """Return the number of accelerators on this machine."""
    name = _accelerator_kind()
    return 0 if name is None else int(kind_named(name).module.device_count())


def current_index() -> int:
    """Return the index of the accelerator that this process uses."""
    name = _accelerator_kind()
    return 0 if name is None else int(kind_named(name).module.current_device())


@dataclass(frozen=True)
class Device:
    """One device of this machine, with everything that depends on its kind."""

    kind: str
    index: int = 0

    @property
    def is_cpu(self) -> bool:
        return is_host(self.torch)

    @property
    def is_meta(self) -> bool:
        """True in a dry run, where nothing is computed."""
        return is_meta(self.torch)

    @staticmethod
    def find(wanted: str = "auto") -> Device:
        """Return the first device of the wanted kind. `auto` prefers an accelerator to the CPU."""
        kind = (_accelerator_kind() or "cpu") if wanted == AUTO else wanted
        if not kind_named(kind).is_available():
            raise UserError(f"run.device={kind}, but torch finds no {kind} device here: set run.device=cpu or auto")
        return Device(kind)

    @staticmethod
    def choose(wanted: str = "auto", local_rank: int = 0) -> Device:
        """Return the device of a local rank, made current. If there are more ranks than devices, ranks share them."""
        kind = Device.find(wanted).kind
        if kind_named(kind).module is None:
            return Device(kind)
        device = Device(kind, local_rank % kind_named(kind).module.device_count())
        device.make_current()
        return device

    def make_current(self) -> None:
        """Make this device current for the calling thread. Every thread must do so before it queries the device.

        A new thread starts on the machine's first device. A query there creates a context of a few hundred MiB on it,
        and can block behind a hanging collective.
        """
        if self.module is not None:
            self.module.set_device(self.index)

    def sensors(self) -> dict[str, float]:
        """Return the used shares of an accelerator's memory and time, its temperature in degrees Celsius and its power
        in watts, as far as the system tells them."""
        module, found = self.module, {}
        if module is None:
            return {}
        # Each of these needs a driver library that may be missing, and then raises that library's errors.
        with suppress(Exception):
            free, total = module.mem_get_info(self.index)
            found["device_memory"] = 1.0 - free / total
        for name, ask, unit in (("device_busy", "utilization", 100.0), ("device_celsius", "temperature", 1.0),
                                ("device_watts", "power_draw", 1000.0)):  # fmt: skip
            with suppress(Exception):
                found[name] = float(getattr(module, ask)(self.index)) / unit
        return found

    @property
    def torch(self) -> torch.device:
        type_ = kind_named(self.kind).type
        return torch.device(type_, self.index) if DEVICE_KINDS[self.kind].is_accelerator else torch.device(type_)

    @property
    def module(self) -> Any:
        """torch's module for this kind of device (such as `torch.cuda`), or None if the kind has no streams."""
        return kind_named(self.kind).module

    def backend(self, wanted: str = "auto") -> str:
        return DEVICE_KINDS[self.kind].backend if wanted == AUTO else wanted

    def check_sharing(self, backend: str, ranks: int, as_rank: bool = True) -> None:
        """Raise UserError if ranks would share a device, which NCCL and HCCL refuse.

        A rank (`as_rank`) accepts a single visible device: launchers can show each rank a different one. If the ranks
        share it after all, the back end raises.
        """
        if self.module is None or backend not in {entry.backend for entry in accelerators().values()}:
            return
        devices = self.module.device_count()
        if ranks > devices and not (as_rank and devices == 1):
            raise UserError(
                f"{ranks} ranks on this machine, but it has {devices} {self.kind} devices: "
                f"start {devices} ranks, or set run.device=cpu or comm.backend=gloo"
            )

    def check_backend(self, backend: str) -> None:
        if self.is_cpu and backend in {entry.backend for entry in accelerators().values()}:
            raise UserError(f"comm.backend={backend} needs an accelerator, and there is none: use comm.backend=auto")

    def check_precision(self, precision: str) -> None:
        if why := kind_named(self.kind).why_not(precision, self.index):
            raise UserError(f"train.precision={precision} {why}")

    @property
    def name(self) -> str:
        return self.kind if self.module is None else str(self.module.get_device_name(self.index))

    def memory_bytes(self) -> int:
        """Return the size of an accelerator's memory in bytes."""
        return int(self.module.get_device_properties(self.index).total_memory)

    def units(self) -> int:
        """Return the number of multiprocessors, over which a matrix product's tiles are distributed; 1 on a CPU."""
        if self.module is None:
            return 1
        return int(getattr(self.module.get_device_properties(self.index), "multi_processor_count", 32))

    def empty_cache(self) -> None:
        """Return the memory in torch's cache that no tensor uses to the device."""
        if self.module is not None:
            # Tensors in reference cycles hold their memory until they are collected.
            gc.collect()
            self.module.empty_cache()

    def synchronize(self) -> None:
        if self.module is not None:
            self.module.synchronize()

    def work_seconds(self) -> float:
        """Return the seconds that this process has worked so far; only differences have a meaning.

        On a CPU this is processor time, which does not grow while other processes use the cores. On an accelerator it
        is elapsed time, since the process has the accelerator to itself.
        """
        self.synchronize()
        return time.process_time() if self.is_cpu else time.perf_counter()

    def pin(self, x: Tensor) -> Tensor:
        """Return a copy in pinned host memory for `upload_pinned`. Any thread may call this."""
        if self.module is None:
            return x
        with self.module.device(self.index):
            return x.pin_memory()

    def upload(self, x: Tensor) -> Tensor:
        return upload(x, self.torch)

    def upload_pinned(self, x: Tensor) -> Tensor:
        """Return a copy on the device of a tensor that `pin` returned: the whole tensor, never a view of it."""
        return x.to(self.torch, non_blocking=True)

    def download(self, x: Tensor) -> Download:
        return Download(self, x)

    def peak_bytes(self) -> int | None:
        """Return the peak bytes of tensors on this device since `reset_peak`, or None where torch does not count."""
        return None if self.module is None else int(self.module.max_memory_allocated())

    def stream_timer(self) -> StreamTimer | None:
        """Return a timer of this device's streams, or None where the host itself computes."""
        return None if self.module is None else StreamTimer(self)

    def reset_peak(self) -> None:
        if self.module is not None:
            self.module.reset_peak_memory_stats()


class Download:
    """A copy to the host that is in flight. `read` waits for an event recorded right after the copy, so it does not
    wait for work that was launched later. A `meta` tensor has no values and reads as ones."""

    def __init__(self, device: Device, x: torch.Tensor) -> None:
        self._event = None
        self._copy = torch.ones(x.shape, dtype=x.dtype) if x.is_meta else x
        if device.module is not None:
            self._copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self._copy.copy_(x, non_blocking=True)
            self._event = torch.Event(device.torch)
            self._event.record()

    def read(self) -> list[Any]:
        if self._event is not None:
            self._event.synchronize()
        return self._copy.tolist()


class Clock:
    """Marks points in the device's stream and says when the device reached them, in seconds of the host's clock."""

    def __init__(self, device: Device) -> None:
        self._device = device
        device.synchronize()
        self._begin, self._first = time.time(), self.mark()

    def mark(self) -> Any:
        if self._device.module is None:
            return time.time()
        event = torch.Event(self._device.torch, enable_timing=True)
        event.record()
        return event

    def read(self, mark: Any) -> float:
        """Return the time at which the device reached a mark; all marked work must be done."""
        if self._device.module is None:
            return float(mark)
        return self._begin + float(self._first.elapsed_time(mark)) / 1e3


class StreamTimer:
    """Times the work of a device's stream between two marks. Marks are recorded on the stream and read later, so the
    host never waits for them."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._spare: list[Any] = []

    def mark(self) -> Any:
        """Record a mark in the current stream, behind all work launched so far."""
        event = self._spare.pop() if self._spare else torch.Event(self._device.torch, enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float | None:
        """Return the seconds between two marks of one stream, or None if the device has not reached both."""
        if not (begin.query() and end.query()):
            return None
        return float(begin.elapsed_time(end)) / 1e3

    def forget(self, marks: Iterable[Any]) -> None:
        """Take marks back for reuse: creating an event costs more than recording one."""
        self._spare += marks


class SideStream:
    """A context whose work is launched on a separate stream, beside the computation; leaving it waits for that work.

    Construct it in the thread that launched the computation, because the new stream must be ordered after that thread's
    stream. Enter it in the thread that copies, because torch keeps the current stream per thread. On a CPU it does
    nothing.
    """

    def __init__(self, device: Device) -> None:
        self.module = device.module
        if self.module is not None:
            self.stream = self.module.Stream(device.torch)
            self.stream.wait_stream(self.module.current_stream(device.torch))

    def __enter__(self) -> SideStream:
        if self.module is not None:
            self._inside = self.module.stream(self.stream)
            self._inside.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self.module is not None:
            self._inside.__exit__(*error)
            self.stream.synchronize()


def pin(tensor: torch.Tensor, device: torch.device) -> None:
    """Pin host memory in place, so that an accelerator can copy from and to it without the host.

    torch's own allocator of pinned memory rounds up to a power of two, which can double the memory of a large state.
    """
    if tensor.numel():
        kind_of(device).pin_in_place(tensor, device)


@cache
def scaled_rows_are_wide(device: torch.device) -> bool:
    """Return whether torch's fp8 product with row scales can return float32, as cuBLAS can on Hopper from CUDA 12.9."""
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return torch.cuda.get_device_capability(device) == (9, 0) and cuda >= (12, 9)


def cudnn_attends(q: Tensor) -> bool:
    """Return whether cuDNN's attention is the fastest for these queries [batch, heads, rows, width].

    On Hopper and later it is faster by far, except for few rows. It refuses a single query with a single key.
    """
    suits = q.is_cuda and q.shape[-1] <= 128 and q.shape[2] >= 64
    return suits and _capability(q.device) >= (9, 0)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def upload(x: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a host tensor on a device. The host does not wait for the copy.

    The tensor is staged in pinned memory first, even if it is pinned already. torch keeps the source of a pending copy
    only if the tensor's address is the start of a block of torch's allocator. A NumPy view into a pinned tensor is
    pinned as well, but torch does not know its block: it would hand the block to the next tensor before the device has
    read it.
    """
    if accelerator(device) is None:
        return x.to(device)
    staged = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return staged.copy_(x).to(device, non_blocking=True)


def accelerator(device: torch.device) -> Any:
    """Return torch's module for a device's kind (such as `torch.cuda`), or None if the kind has no streams."""
    return kind_of(device).module


def group_options(backend: str) -> Any:
    """Return new options of a process group of a back end, or None if it has none that matter here."""
    names = [name for name, entry in DEVICE_KINDS.items() if entry.backend == backend]
    return kind_named(names[0]).group_options() if names else None


def is_host(device: torch.device) -> bool:
    return device.type == "cpu"


def is_meta(device: torch.device) -> bool:
    return device.type == "meta"


def generator(device: torch.device) -> torch.Generator:
    return torch.Generator("cpu" if is_meta(device) else device)


def limit_threads(local_world: int) -> None:
    """Limit torch to a rank's share of the cores, unless the user has set OMP_NUM_THREADS."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores_of_rank(local_world)))


def cores_of_rank(local_world: int) -> int:
    """Return the number of cores that each of `local_world` ranks on this machine has to itself.

    It is 0 if there are more ranks than cores. Slurm binds each task to its own cores. Other launchers let the ranks
    share all usable cores, which containers and schedulers may limit to fewer than the machine has.
    """
    if not hasattr(os, "sched_getaffinity"):
        return (os.cpu_count() or 1) // local_world
    usable = len(os.sched_getaffinity(0))
    has_own = os.environ.get("SLURM_CPUS_PER_TASK") == str(usable) and "SLURM_PROCID" in os.environ
    return usable if has_own else usable // local_world


def return_freed_memory() -> None:
    """Make malloc return large freed blocks to the system at once.

    By default, glibc raises its threshold with each large block and keeps freed blocks for later, which can double the
    memory of a run that offloads to disk. Other C libraries don't, and have no such setting.
    """
    setting = getattr(ctypes.CDLL(None), "mallopt", None)
    if setting is not None:
        mmap_threshold = -3  # M_MMAP_THRESHOLD in malloc.h
        setting(mmap_threshold, 2**20)


def host_memory_bytes(free: bool = True) -> float:
    """Return the bytes of host memory that this process may still allocate: the least of free memory and all limits.

    Without `free`, memory that is in use counts as well, so that all processes of a machine get the same number."""
    bounds = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    for path, pattern, unit in (("/proc/meminfo", r"MemAvailable:\s+(\d+)", 1024),
                                ("/sys/fs/cgroup/memory.max", r"(\d+)", 1)):  # fmt: skip
        with suppress(OSError):
            text = Path(path).read_text(encoding="utf-8") if free or "meminfo" not in path else ""
            if match := re.search(pattern, text):
                bounds.append(float(match.group(1)) * unit)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return min(*bounds, math.inf if limit == resource.RLIM_INFINITY else float(limit))


def check_machine(kind: str, backend: str, precision: str, ranks: int) -> None:
    """Raise UserError for settings that would make ranks fail on this machine, before a launcher starts them."""
    name = (_accelerator_kind() or "cpu") if kind == AUTO else kind
    if not DEVICE_KINDS[name].is_accelerator:
        if ranks > 1:
            Device(name).check_backend(backend)
        return
    device = Device.find(kind)
    device.check_precision(precision)
    device.check_sharing(device.backend(backend), ranks, as_rank=False)
