"""The formula of the gradient's scale gives the same results for tensors of a device as for floats of the host."""

from __future__ import annotations

import math

import pytest
import torch

from meshwright.engine.optim.scaling import gradient_scaling


@pytest.mark.parametrize("count", [0.0, 1.0, 37.0])
@pytest.mark.parametrize("squares", [0.0, 1e-30, 4.0, 1e12, math.inf, math.nan])
@pytest.mark.parametrize("clip", [0.0, 0.5, 1e9])
def test_floats_and_tensors(count: float, squares: float, clip: float) -> None:
    weight = 0.25
    host = gradient_scaling(count, squares, weight, clip)
    sums = (torch.tensor(x, dtype=torch.float64) for x in (count, squares))
    device = gradient_scaling(*sums, weight, clip)  # type: ignore[call-arg]
    for a, b in zip(host, device, strict=True):
        assert float(a) == pytest.approx(float(b), rel=1e-15, nan_ok=True)
    learns = count > 0 or squares != 0
    assert (host.counts, host.updates) == (learns, learns and math.isfinite(squares))
    if host.updates:
        norm = math.sqrt(squares) / (weight * (count or 1.0))
        assert host.norm == pytest.approx(norm)
        clipped = min(norm, clip) if clip else norm
        assert math.sqrt(squares) / host.divisor == pytest.approx(clipped)
