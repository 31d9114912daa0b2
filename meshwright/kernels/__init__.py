"""Kernels of our own for what neither torch nor its compiler does at the speed of memory: Triton, on CUDA alone.

Every function here has a plain definition where it is used, which runs wherever Triton doesn't; the tests compare the
two. Triton is imported with the first call, so that a machine without it never notices.
"""

from __future__ import annotations

import warnings
from functools import cache

from torch import Tensor


@cache
def triton_works() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        warnings.warn("Triton is not installed: the loss and the optimizer take their slower paths", stacklevel=2)
        return False
    return True


def kernels_take(*tensors: Tensor) -> bool:
    """Whether kernels can take these: on CUDA, and nothing wider than the float32 they compute in."""
    return all(x.is_cuda and x.element_size() < 8 for x in tensors) and triton_works()
