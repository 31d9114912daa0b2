"""What a rank does in a step, with the times at which its device did it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from meshwright.device import Clock, Device
from meshwright.pipeline.trace import Span


class Recorder:
    """Spans of one pipeline rank, on the tracks of a simulated step."""

    def __init__(self, rank: int, device: Device) -> None:
        self.rank, self.device = rank, device
        self.clock = Clock(device)
        self._marks: list[tuple[str, str, Any, Any, dict[str, Any]]] = []

    @contextmanager
    def span(self, track: str, name: str, **args: Any) -> Iterator[None]:
        begin = self.clock.mark()
        yield
        self._marks.append((track, name, begin, self.clock.mark(), args))

    def spans(self) -> list[Span]:
        """All that was recorded, in seconds of this machine's clock."""
        self.device.synchronize()
        read = self.clock.read
        return [Span(self.rank, track, name, read(a), read(b), args) for track, name, a, b, args in self._marks]
