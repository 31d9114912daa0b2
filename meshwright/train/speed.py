"""How fast a run computes: its model's FLOP/s, and their share of what the devices could do (MFU). No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Speed:
    """What it takes to turn seconds into FLOP/s. The FLOPs are the model's: forward and backward of whole sequences,
    full attention, nothing that is computed again. `peak` is the dense rate of one device; None: not known."""

    flops_per_sample: float
    peak: float | None

    def of(self, samples: int, seconds: float, world: int) -> tuple[float, float | None]:
        """Model TFLOP/s of all ranks together, and the MFU."""
        rate = self.flops_per_sample * samples / seconds
        return rate / 1e12, rate / (self.peak * world) if self.peak else None
