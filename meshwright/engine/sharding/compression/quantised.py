"""Codecs with few bits per number: bf16, fp8, int8, int4 and signs.

A message consists of the codes of a slice and, except for bf16, the scales of its blocks in float32. Zero is always
decoded as zero, except by the sign codec. A block with a number that is not finite is decoded as a block that is not
finite either.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.engine.sharding.compression.sizes import SCALE_BYTES

FP8_EVEN = 2.0**-6  # the smallest normal number of float8_e4m3fn; below it, codes are evenly spaced


class Blocked(Protocol):
    """A section of a config that says how many elements share a scale."""

    @property
    def block(self) -> int: ...


class UpperHalves:
    """The codec of bf16, which needs no scales."""

    fills_gaps = False

    def __init__(self, config: Blocked) -> None:
        del config  # It has no settings.

    def encode(self, x: Tensor, noise: Tensor | None) -> Tensor:
        return round_to(x.float(), torch.bfloat16, 16, noise).view(torch.uint8)

    def decode(self, message: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        return aligned(message).view(torch.bfloat16).to(dtype)


class Scaled:
    """A codec of few bits. `config.block` elements share a scale, which brings the largest of them to `largest`."""

    largest: float
    bits = 8
    fills_gaps = False

    def __init__(self, config: Blocked) -> None:
        self.block = config.block

    def codes(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """Return the codes of scaled numbers."""
        raise NotImplementedError

    def numbers(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the scaled numbers that codes stand for."""
        raise NotImplementedError

    def encode(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """Return the messages [slices, bytes] of `x` [slices, elements].

        Numbers are rounded to the nearest code. With `noise`, uniform in [0, 1), they are rounded up or down at random
        so that they are unbiased.
        """
        scales = (blocks(x.abs(), self.block).amax(-1) / self.largest).float()
        scaled = x / spread(torch.where(scales == 0, 1, scales), self.block, x.shape[1])
        return torch.cat([self.codes(scaled, noise), scales.view(torch.uint8)], dim=1)

    def decode(self, message: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        """Return the numbers [slices, elements] of messages."""
        codes = message[:, : elements * self.bits // 8]
        return self.numbers(codes, dtype) * spread(scales_of(message, codes), self.block, elements)


class Float8(Scaled):
    largest = 448.0

    def codes(self, x: Tensor, noise: Tensor | None) -> Tensor:
        # Of a float32's 23 bits of mantissa, 20 are dropped.
        x = x.clamp(-self.largest, self.largest).float()
        return round_to(x, torch.float8_e4m3fn, 20, noise).view(torch.uint8)

    def numbers(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return aligned(codes).view(torch.float8_e4m3fn).to(dtype)


class Int8(Scaled):
    largest = 127.0

    def codes(self, x: Tensor, noise: Tensor | None) -> Tensor:
        whole = x.round() if noise is None else (x + noise).floor()
        return whole.clamp(-self.largest, self.largest).to(torch.int8).view(torch.uint8)

    def numbers(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return aligned(codes).view(torch.int8).to(dtype)


class Int4(Int8):
    largest = 7.0
    bits = 4

    def codes(self, x: Tensor, noise: Tensor | None) -> Tensor:
        return pack_halves(super().codes(x, noise))

    def numbers(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return unpack_halves(codes).to(dtype)


class SignCodec:
    """The codec of signs: the sign of each element, and the mean absolute value of each block as its scale.

    The mean is the scale with the least squared error. A zero is decoded as plus or minus the mean, so the padding
    between parameters must be set to zero again.
    """

    fills_gaps = True

    def __init__(self, config: Blocked) -> None:
        self.block = config.block

    def encode(self, x: Tensor, noise: Tensor | None) -> Tensor:
        sums = blocks(x.abs(), self.block).sum(-1)
        elements = x.shape[1]
        block = min(self.block, elements)
        count = sums.shape[1]
        sizes = torch.full((count,), block, dtype=x.dtype, device=x.device)
        # The last block may be shorter.
        sizes[-1:].fill_(elements - (count - 1) * block)
        weights = 2 ** torch.arange(8, dtype=torch.uint8, device=x.device)
        codes = ((x >= 0).view(x.shape[0], -1, 8) * weights).sum(-1, dtype=torch.uint8)
        return torch.cat([codes, (sums / sizes).float().view(torch.uint8)], dim=1)

    def decode(self, message: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        codes = message[:, : elements // 8]
        shifts = torch.arange(8, dtype=torch.uint8, device=message.device)
        signs = ((codes[:, :, None] >> shifts) & 1).view(message.shape[0], elements).to(dtype) * 2 - 1
        return signs * spread(scales_of(message, codes), self.block, elements)


def blocks(x: Tensor, block: int) -> Tensor:
    """Return `x` [slices, elements] as [slices, blocks, block], with the last block padded with zeros."""
    block = min(block, x.shape[1])
    count = -(-x.shape[1] // block)
    return F.pad(x, (0, count * block - x.shape[1])).view(x.shape[0], count, block)


def spread(scales: Tensor, block: int, elements: int) -> Tensor:
    """Return the scale of each element, from the scales of blocks."""
    return scales.repeat_interleave(min(block, elements), dim=1)[:, :elements]


def scales_of(message: Tensor, codes: Tensor) -> Tensor:
    scales = message[:, codes.shape[1] :]
    assert scales.shape[1] % SCALE_BYTES == 0
    return aligned(scales).view(torch.float32)


def aligned(part: Tensor) -> Tensor:
    """Return a contiguous copy of a part of messages, whose bytes can be viewed as wider numbers."""
    return part.clone(memory_format=torch.contiguous_format)


def round_to(x: Tensor, dtype: torch.dtype, dropped: int, noise: Tensor | None) -> Tensor:
    """Return float32 numbers in a narrower format, rounded to nearest or, with `noise`, stochastically.

    For the latter, a random number is added to the bits that are then cut off. So a mantissa is rounded up with a
    probability equal to the fraction that is cut off.
    """
    if noise is None:
        return x.to(dtype)
    bits = x.view(torch.int32) + (noise * 2**dropped).to(torch.int32)
    rounded = (bits >> dropped << dropped).view(torch.float32)
    # The codes below the smallest exponent (subnormals) are evenly spaced, so cutting off mantissa bits is wrong there.
    if dtype is torch.float8_e4m3fn:
        rounded = torch.where(x.abs() < FP8_EVEN, (x * (8 / FP8_EVEN) + noise).floor() * (FP8_EVEN / 8), rounded)
    return torch.where(x.isfinite(), rounded, x).to(dtype)


def pack_halves(codes: Tensor) -> Tensor:
    """Return bytes that each hold the lower four bits of two neighbours."""
    pairs = codes.view(codes.shape[0], -1, 2)
    return (pairs[:, :, 0] & 15) | (pairs[:, :, 1] << 4)


def unpack_halves(packed: Tensor) -> Tensor:
    """Return the signed four-bit numbers that `pack_halves` packed."""
    # Shifting an int8 to the right extends its sign.
    both = torch.stack([packed << 4, packed & 240], dim=-1).view(torch.int8) >> 4
    return both.view(packed.shape[0], -1)
