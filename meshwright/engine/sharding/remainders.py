"""fp32 masters of bf16 weights in two more bytes each: the weight is one half of its master, a remainder the other.

With m the bits of a master as an int32, the weight's bits are w = (m + 0x8000) >> 16, and the remainder is the int16
m - (w << 16). So (w << 16) + remainder is m again, bit for bit.

The weight is the nearest bf16 value. Ties, one value in 65,536, are rounded away from zero, while torch rounds them to
even: that rounds 65,537 values to some weights, which 16 bits can't tell apart. Values above the largest bf16 value
round to infinity, and their masters stay finite. For some NaNs, m + 0x8000 would carry into the sign, so the weight of
every NaN is set to one fixed NaN; the master then stays a NaN, but with other bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshwright.kernels import kernels_take

NAN = 0x7FC0  # the bits of a bf16 NaN


def join(weights: Tensor, remainders: Tensor) -> Tensor:
    """Return the float32 values of bf16 weights and their remainders, in a new tensor."""
    if kernels_take(weights) and weights.is_contiguous() and remainders.is_contiguous():
        from meshwright.kernels.adamw import copy_pairs

        values = torch.empty(weights.shape, dtype=torch.float32, device=weights.device)
        copy_pairs(values, weights, remainders, join=True)
        return values
    # float() shifts the bits of a bf16 value to the left by 16.
    return weights.float().view(torch.int32).add_(remainders).view(torch.float32)


def halve(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bf16 weights of float32 values, and their remainders."""
    values = values.contiguous()
    if kernels_take(values):
        from meshwright.kernels.adamw import copy_pairs

        weights, remainders = (torch.empty_like(values, dtype=dtype) for dtype in (torch.bfloat16, torch.int16))
        copy_pairs(values, weights, remainders, join=False)
        return weights, remainders
    bits = values.view(torch.int32)
    high = (bits + 0x8000) >> 16
    weights = torch.where(values.isnan(), NAN, high).to(torch.int16).view(torch.bfloat16)
    return weights, bits.sub(high, alpha=2**16).to(torch.int16)


@dataclass(frozen=True, eq=False)
class PairedTensor:
    """float32 values that are stored as bf16 weights and remainders. It can be sliced and assigned to like a tensor."""

    weights: Tensor
    remainders: Tensor
    dtype: ClassVar[torch.dtype] = torch.float32

    @property
    def shape(self) -> torch.Size:
        return self.weights.shape

    @property
    def device(self) -> torch.device:
        return self.weights.device

    def numel(self) -> int:
        return self.weights.numel()

    def element_size(self) -> int:
        return self.dtype.itemsize

    def both(self, change: Callable[[Tensor], Tensor]) -> PairedTensor:
        """Return the pair after applying `change` to both tensors."""
        return PairedTensor(change(self.weights), change(self.remainders))

    def __getitem__(self, at: Any) -> PairedTensor:
        return self.both(lambda half: half[at])

    def __setitem__(self, at: Any, values: Tensor) -> None:
        self.weights[at], self.remainders[at] = halve(values.to(self.device))

    def zero_(self) -> None:
        self.both(Tensor.zero_)

    def join(self) -> Tensor:
        """Return the values in a new tensor."""
        return join(self.weights, self.remainders)


Values = Tensor | PairedTensor


def as_tensor(values: Values) -> Tensor:
    """Return the values as a tensor: unchanged if they are one, else joined in a new tensor."""
    return values.join() if isinstance(values, PairedTensor) else values


def tensors_of(values: Values) -> tuple[Tensor, ...]:
    """Return the tensors in which the values are stored."""
    return (values.weights, values.remainders) if isinstance(values, PairedTensor) else (values,)
