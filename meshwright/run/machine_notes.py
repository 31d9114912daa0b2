"""Writes the load of the machine and of the device of the writing rank into the run's folder, every ten seconds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress

from meshwright.device import Device
from meshwright.engine.hooks import Hook
from meshwright.engine.step import StepResult
from meshwright.record.machine import MACHINE_FILE, MachineLoad
from meshwright.record.run_folder import RunFolder

EVERY_S = 10.0


class MachineNotes(Hook):
    """Appends a line to machine.jsonl after a step if ten seconds have passed since the last one."""

    def __init__(self, folder: RunFolder | None, device: Device, clock: Callable[[], float] = time.time) -> None:
        self.folder, self.device, self.clock = folder, device, clock
        self.load = MachineLoad()
        self.last = clock()
        if folder:
            self.load.read(self.last)

    def after(self, result: StepResult, last: bool) -> None:
        now = self.clock()
        if self.folder is None or not (last or now - self.last >= EVERY_S):
            return
        self.last = now
        line = {"step": result.step, "time": now, **self.load.read(now), **self.device.sensors()}
        # These figures are not worth the end of a run, for example on a full disk.
        with suppress(OSError), (self.folder.path / MACHINE_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
