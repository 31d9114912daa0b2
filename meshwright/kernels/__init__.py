"""Triton kernels, on CUDA only, for passes that neither torch nor its compiler runs at memory bandwidth.

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
    """Whether the kernels can take these tensors: on CUDA, and no wider than the float32 that kernels compute in."""
    return all(x.is_cuda and x.element_size() < 8 for x in tensors) and triton_works()
