"""The fused paths equal their plain definitions on a CPU. tests/gpu runs the same cases on the kernels."""

from __future__ import annotations

import pytest
import torch

from tests.nn.fused_cases import BOUNDS, CASES, Where, fp8_keeps_what_is_not_finite, fp8_products

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("name", list(CASES))
def test_a_fused_path_is_its_definition(name: str, dtype: torch.dtype) -> None:
    assert CASES[name](Where(CPU, dtype)) <= BOUNDS[dtype]


@pytest.mark.parametrize("kind", ["fp8", "fp8-row"])
def test_fp8_products_are_near_the_true_ones(kind: str) -> None:
    assert fp8_products(Where(CPU, torch.bfloat16), kind) == 0.0


@pytest.mark.parametrize("kind", ["fp8", "fp8-row"])
def test_what_is_not_finite_stays_so_in_fp8(kind: str) -> None:
    assert fp8_keeps_what_is_not_finite(Where(CPU, torch.bfloat16), kind)
