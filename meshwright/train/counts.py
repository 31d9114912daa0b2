"""The small vectors that a step sums over all ranks: what is in them, for the step and for the planner. No torch."""

from __future__ import annotations

# Where a step's time goes, and the phases that its ledger knows.
PHASES = ("data", "forward", "backward", "reduce", "optimizer")

# Summed over the world in float64 before the update.
SUMS = ("loss", "tokens", "gradient squares")

# Summed over the world in int64 after it: for each axis of the mesh these, then the microseconds of each phase, then
# the ranks that were asked to stop.
COUNTS = ("calls", "payload_bytes", "wire_bytes")

WIDE = 8  # bytes of a float64 or an int64


def sums_bytes() -> int:
    return WIDE * len(SUMS)


def counts_bytes(axes: int) -> int:
    return WIDE * (len(COUNTS) * axes + len(PHASES) + 1)
