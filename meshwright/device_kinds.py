"""The kinds of devices that `run.device` can name, with the facts that configs, launchers and job files need. No torch.

A plugin registers its kind in `DEVICE_KINDS`. All else that depends on a device is in `device.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.plugins import Registry

AUTO = "auto"


@dataclass(frozen=True)
class DeviceEntry:
    """One kind of device, by the type of its `torch.device`.

    `kind` is the path `package.module:Class` of a subclass of `meshwright.device.DeviceKind`, or of `Accelerator`.
    """

    kind: str
    backend: str  # the back end of torch.distributed
    is_accelerator: bool = True  # it has separate memory and streams
    runs: bool = True  # `run.device` may name it
    has_fp8: bool = True  # torch has its 8-bit floating-point numbers
    resource: str = ""  # the name of one such device in a Kubernetes job


# `auto` prefers the accelerators in this order.
DEVICE_KINDS = Registry("run.device", {
    "cpu": DeviceEntry("meshwright.device:Host", "gloo", is_accelerator=False),
    "cuda": DeviceEntry("meshwright.device:Cuda", "nccl", resource="nvidia.com/gpu"),
    "npu": DeviceEntry("meshwright.device:Npu", "hccl", has_fp8=False, resource="huawei.com/Ascend910"),
    "meta": DeviceEntry("meshwright.device:Meta", "fake", is_accelerator=False, runs=False),
})  # fmt: skip


def device_names() -> tuple[str, ...]:
    """Return the values of `run.device`."""
    return AUTO, *(name for name, entry in DEVICE_KINDS.items() if entry.runs)


def backend_names() -> tuple[str, ...]:
    """Return the values of `comm.backend`."""
    return AUTO, *dict.fromkeys(entry.backend for entry in DEVICE_KINDS.values() if entry.runs)


def accelerators() -> dict[str, DeviceEntry]:
    return {name: entry for name, entry in DEVICE_KINDS.items() if entry.is_accelerator}


def resource_of(wanted: str) -> str:
    """Return the name of a device in a Kubernetes job; for `auto`, that of the first accelerator."""
    return (accelerators() | DEVICE_KINDS).get(wanted, next(iter(accelerators().values()))).resource
