"""Meshwright's operators cost the host no more than a dispatch, and produce only shapes where nothing is computed."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.comm.registered import BODIES, operator, pure_operator, shapes_of

SEEN: list[str] = []


@operator("meshwright_test::note", mutates={"x"})
def note(x: Tensor, word: str) -> None:
    SEEN.append(word)
    x.add_(1)


@pure_operator("meshwright_test::double")
def double(x: Tensor) -> Tensor:
    return 2 * x


@shapes_of(double)
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def python_calls(call: Any) -> int:
    """Return the number of Python functions that are called inside `call`, itself included."""
    found = []
    sys.setprofile(lambda frame, event, arg: found.append(frame.f_code.co_name) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(found)


@torch.no_grad()
def test_a_call_is_a_dispatch_and_the_body() -> None:
    """torch.library.custom_op would call some twenty functions around a body."""
    x = torch.zeros(3)
    note(x, "warm")
    assert python_calls(lambda: note(x, "again")) <= 4
    assert x.tolist() == [2.0] * 3 and SEEN == ["warm", "again"] and "meshwright_test::note" in BODIES


def test_without_values_only_shapes_are_made() -> None:
    assert double(torch.empty(3, 2, device="meta")).shape == (3, 2)
    before = len(SEEN)
    note(torch.empty(3, device="meta"), "never")
    assert len(SEEN) == before


def test_a_gradient_is_never_lost_silently() -> None:
    with pytest.raises(RuntimeError, match="meshwright_test::double has no gradient"):
        double(torch.ones(2, requires_grad=True))


@pytest.mark.wide
def test_compiled_code_calls_them() -> None:
    def both(x: Tensor) -> Tensor:
        y = double(x)
        note(y, "compiled")
        return y

    before = len(SEEN)
    assert torch.compile(both, fullgraph=True)(torch.ones(2)).tolist() == [3.0, 3.0]
    assert SEEN[before:] == ["compiled"]
