"""Where faults are noted: a line in the run's events, a line on the display, and how many each rank had."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from meshwright.errors import UserError, notice
from meshwright.record.run_notes import write_event

# Kinds of events. bad_step: due to the data or the model; fault: laid to a rank, if one can be named; slow: a rank is.
BAD_STEP, ROLLBACK, FAULT, SLOW = KINDS = ("bad_step", "rollback", "fault", "slow")


class FaultNotes:
    """What all ranks know; the one that `writes` writes it. `over` is what ends the run, once a step is recorded."""

    def __init__(self, folder: str | Path, most: int, writes: bool) -> None:
        self.folder, self.most, self.writes = folder, most, writes
        self.by_rank: Counter[int] = Counter()
        self.over: UserError | None = None

    def add(self, kind: str, text: str, step: int, **more: Any) -> None:
        """Notes something of one of KINDS."""
        assert kind in KINDS
        if self.writes:
            write_event(self.folder, kind, text, step, **more)
            notice(f"meshwright: step {step}: {text}")

    def fault(self, text: str, step: int, rank: int | None, **more: Any) -> None:
        """Notes a fault, and counts it if it can be laid to one rank."""
        self.add(FAULT, text, step, rank=rank, **more)
        if rank is None:
            return
        self.by_rank[rank] += 1
        if self.by_rank[rank] >= self.most:
            self.over = UserError(
                f"rank {rank} had {self.by_rank[rank]} faults, the last in step {step}: {text}; take its machine out "
                "of the run, or raise faults.max_faults"
            )
