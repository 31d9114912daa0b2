"""Offloading the inputs of recomputed blocks to host memory. They are copied out while their block computes, and back
one block ahead of its backward, on two streams of the device beside the computation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.device import accelerator, pin


class HostCopy:
    """A tensor in host memory, or on its way there or back. `before` was copied just before it and is fetched next."""

    def __init__(self, memory: HostActivations, x: Tensor, before: HostCopy | None) -> None:
        self.memory, self.shape, self.dtype, self.nbytes, self.before = memory, x.shape, x.dtype, x.nbytes, before
        # There is no buffer on `meta`, where tensors have no values.
        self.buffer: Tensor | None = None
        # The tensor on the device and the event of its copy, once the copy back has begun.
        self.arriving: tuple[Tensor, Any] | None = None

    def fetch(self) -> Tensor:
        return self.memory.fetch(self)

    def prefetch(self) -> None:
        """Begin to copy the tensor to the device."""
        if self.arriving is None:
            self.arriving = self.memory.copy_in(self)


class HostActivations:
    """This rank's host memory for the inputs of recomputed blocks. Its buffers are pinned and reused.

    A tensor that is being copied out keeps its device memory until the next block begins, whose computation waits for
    the copy. So only the input of the current block is on the device, however far ahead the host has launched. On
    `meta` nothing is copied, and tensors are allocated and freed as on a device.
    """

    def __init__(self, device: torch.device, module: Any = None) -> None:
        """Create the streams. `module` provides them, by default torch's module for the device."""
        self.device = device
        self.module = module or accelerator(device)
        streams: list[Any] = [self.module.Stream(device) if self.module else None for _ in range(2)]
        self._out, self._in = streams
        self._free: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        self._leaving: tuple[Tensor, Any] | None = None
        # The bytes in host memory now, and their peak.
        self.bytes = self.most_bytes = 0

    def keep(self, x: Tensor, before: HostCopy | None) -> HostCopy:
        """Begin to copy x to the host. The caller drops its reference to x."""
        self.release()
        copy = HostCopy(self, x, before)
        self.bytes += copy.nbytes
        self.most_bytes = max(self.most_bytes, self.bytes)
        x, left = x.detach(), None
        if self.module is not None:
            copy.buffer = self._buffer(x)
            # The computation so far produced x, and waited for the last copy out of this buffer.
            self._out.wait_stream(self.module.current_stream(self.device))
            with self.module.stream(self._out):
                copy.buffer.copy_(x, non_blocking=True)
                left = self._out.record_event()
        self._leaving = (x, left)
        return copy

    def release(self) -> None:
        """Make the device wait for the tensor that is being copied out, and release its memory."""
        if self._leaving is not None and self.module is not None:
            self.module.current_stream(self.device).wait_event(self._leaving[1])
        self._leaving = None

    def fetch(self, copy: HostCopy) -> Tensor:
        """Return the tensor on the device, and begin to copy the one that will be fetched next."""
        copy.prefetch()
        assert copy.arriving is not None
        (x, arrived), copy.arriving = copy.arriving, None
        self.bytes -= copy.nbytes
        if self.module is not None:
            assert copy.buffer is not None
            self.module.current_stream(self.device).wait_event(arrived)
            # The stream now waits for the copy, and `keep` makes later copies into this buffer wait for the stream.
            self._free.setdefault((copy.shape, copy.dtype), []).append(copy.buffer)
            copy.buffer = None
        if copy.before is not None:
            copy.before.prefetch()
        return x

    def copy_in(self, copy: HostCopy) -> tuple[Tensor, Any]:
        self.release()
        x = torch.empty(copy.shape, dtype=copy.dtype, device=self.device)
        if self.module is None:
            return x, None
        assert copy.buffer is not None, "an offloaded tensor is fetched only once"
        # The computation so far has waited for the copy to the host, and may still use the memory that x was given.
        self._in.wait_stream(self.module.current_stream(self.device))
        with self.module.stream(self._in):
            x.copy_(copy.buffer, non_blocking=True)
            return x, self._in.record_event()

    def _buffer(self, x: Tensor) -> Tensor:
        free = self._free.get((x.shape, x.dtype))
        if free:
            return free.pop()
        buffer = torch.empty(x.shape, dtype=x.dtype)
        pin(buffer, self.device)
        return buffer
