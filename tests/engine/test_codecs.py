"""Numbers in a compressed message: they take as many bytes as planned, and their errors are within one step of a
code.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from meshwright.config.comm import REDUCE_KINDS, ReduceConfig
from meshwright.engine.sharding.compression.exchange import codec_of
from meshwright.engine.sharding.compression.sizes import chosen_elements, message_bytes

BLOCK = 32
CODED = [kind for kind in REDUCE_KINDS if kind not in ("plain", "powersgd")]
SPARSE = ("topk", "threshold")
WIDTHS = [16, 48, 320]  # Less than a block, one and a half blocks, and ten blocks.


def config_of(kind: str, **keys: object) -> ReduceConfig:
    keys |= {"block": BLOCK} if kind in ("fp8", "int8", "int4", "onebit", "topk") else {}
    return ReduceConfig(kind=kind, **({"ratio": 0.1} | keys if kind in SPARSE else keys))  # type: ignore[arg-type]


def numbers(pieces: int, width: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return numbers of many magnitudes, including zeros and a block of zeros only."""
    x = torch.randn(pieces, width, dtype=dtype, generator=torch.Generator().manual_seed(width))
    x = x * 10.0 ** torch.linspace(-6, 3, width, dtype=dtype)
    x[:, ::7] = 0
    x[0, :BLOCK] = 0
    return x


def uniform(x: Tensor, seed: int = 0) -> Tensor:
    return torch.rand(x.shape, generator=torch.Generator().manual_seed(seed))


def through(kind: str, x: Tensor, noise: Tensor | None = None) -> Tensor:
    codec = codec_of(config_of(kind))
    message = codec.encode(x, noise)
    assert message.dtype == torch.uint8
    assert message.shape == (x.shape[0], message_bytes(config_of(kind), x.shape[1], x.element_size()))
    return codec.decode(message, x.shape[1], x.dtype)


def steps(kind: str, x: Tensor) -> Tensor:
    """Return the distance between neighbouring codes at each element."""
    scale = torch.cat([part.abs().amax(1, keepdim=True).expand_as(part) for part in x.split(BLOCK, 1)], 1)
    if kind in ("int8", "int4"):
        return scale / {"int8": 127, "int4": 7}[kind]
    bits, least = {"bf16": (7, 0.0), "fp8": (3, 2.0**-6)}[kind]
    unit = scale / 448 if kind == "fp8" else torch.ones_like(x)
    size = (x.abs() / torch.where(unit == 0, 1, unit)).clamp(min=max(least, 1e-300))
    return 2.0 ** (size.log2().floor() - bits) * unit


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["bf16", "fp8", "int8", "int4"])
def test_rounding_is_within_a_step_and_right_on_average(kind: str, width: int) -> None:
    x = numbers(3, width)
    step = steps(kind, x) * (1 + 1e-5)  # Scales are float32.
    assert (through(kind, x) - x).abs().le(step / 2 + 1e-30).all()
    assert torch.equal(through(kind, x)[x == 0], x[x == 0]), "zero arrives as zero"
    draws = torch.stack([through(kind, x, uniform(x, seed)) for seed in range(300)])
    assert (draws - x).abs().le(step + 1e-30).all()
    assert torch.equal(draws[:, x == 0], torch.zeros(300, int((x == 0).sum()), dtype=x.dtype))
    assert ((draws.mean(0) - x).abs() <= 0.5 * step * 5 / math.sqrt(300) + 1e-5 * x.abs() + 1e-30).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_signs_have_the_mean_size_of_their_block(width: int) -> None:
    x = numbers(2, width)
    found = through("onebit", x)
    for had, got in zip(x.split(BLOCK, 1), found.split(BLOCK, 1), strict=True):
        torch.testing.assert_close(got.abs(), had.abs().mean(1, keepdim=True).expand_as(got), rtol=1e-6, atol=1e-30)
        assert torch.equal(got >= 0, (had >= 0) | (had.abs().amax(1, keepdim=True) == 0))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_largest_elements_arrive_as_they_are(dtype: torch.dtype, width: int) -> None:
    x = numbers(3, width, dtype)
    for kind, block in (("topk", BLOCK), ("threshold", width)):
        found = through(kind, x)
        for some, sent in zip(x.split(block, 1), found.split(block, 1), strict=True):
            count = math.ceil(0.1 * min(block, width))
            top = some.abs().sort(1, descending=True).values[:, count - 1 : count]
            assert torch.equal(sent, torch.where(some.abs() >= top, some, 0))


def test_places_in_large_blocks_take_two_bytes() -> None:
    x = torch.randn(2, 2048, generator=torch.Generator().manual_seed(5))
    config = ReduceConfig(kind="topk", ratio=0.01, block=1024)
    message = codec_of(config).encode(x, None)
    assert message.shape[1] == message_bytes(config, 2048, 4) == 2 * 11 * (2 + 4)
    found = codec_of(config).decode(message, 2048, x.dtype)
    assert torch.equal(found[found != 0], x[found != 0]) and int((found != 0).sum()) == 44
    assert found[:, 1024:].abs().amax() > 0


def test_about_as_many_reach_a_threshold_that_a_sample_gives() -> None:
    x = torch.randn(2, 1 << 16, generator=torch.Generator().manual_seed(5))
    found, count = through("threshold", x), chosen_elements(config_of("threshold"), 1 << 16)
    for sent in (found != 0).sum(1).tolist():
        assert 0.8 * count <= sent <= count
    assert found[found != 0].abs().min() > 1.5, "the largest tenth of normal numbers is above 1.64"


@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_does_not_become_finite(kind: str, wrong: float) -> None:
    x = numbers(2, 320, torch.float32)
    x[1, 301] = wrong
    for noise in (None, uniform(x)):
        found = through(kind, x, noise)
        assert found[0].isfinite().all()
        assert not found[1].isfinite().all()
