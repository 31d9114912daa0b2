"""Triton kernels, on CUDA only, for passes that neither torch nor its compiler runs at memory bandwidth.

Every function here has a plain definition in torch where it is used, which runs wherever Triton doesn't; the tests
compare the two. Triton is imported on the first call, so Meshwright works on machines without it.
"""

from __future__ import annotations

import warnings
from functools import cache

from torch import Tensor

from meshwright.device import kind_of


@cache
def triton_works() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        warnings.warn("Triton is not installed: the loss and the optimizer take their slower paths", stacklevel=2)
        return False
    return True


def kernels_take(*tensors: Tensor) -> bool:
    """Return whether the kernels take these tensors: on CUDA, and no wider than float32, in which kernels compute."""
    return all(kind_of(x.device).runs_triton and x.element_size() < 8 for x in tensors) and triton_works()
