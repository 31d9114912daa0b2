"""The parts that move and multiply experts' rows equal their plain definitions on a CPU, and the whole mixture in bf16
is near float64. tests/gpu runs the same on the kernels.
"""

from __future__ import annotations

import pytest
import torch

from meshwright.device import Device
from tests.nn.expert_runs import in_bf16
from tests.nn.fused_cases import BOUNDS, Where
from tests.nn.grouped_cases import CASES

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("name", list(CASES))
def test_it_is_its_definition(name: str, dtype: torch.dtype) -> None:
    assert CASES[name](Where(CPU, dtype)) <= BOUNDS[dtype]


@pytest.mark.parametrize("sinks", [False, True], ids=["autograd", "sinks"])
@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_bf16_is_near_float64(mlp: str, sinks: bool) -> None:
    keys = {"top_k": 3, "router": "sigmoid", "scale": 2.5, "groups": 4, "groups_used": 2, "shared": 1, "aux_loss": 0.1}
    found = in_bf16(Device("cpu"), mlp, keys, sinks)
    assert max(found.errors.values()) <= found.BOUND, found.errors
    assert 0 < found.others <= found.FEW
