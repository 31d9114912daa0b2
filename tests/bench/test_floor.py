"""The floor of a step's time includes every matrix product of the step."""

from __future__ import annotations

import pytest
import torch

from meshwright.bench.floor import attention_call, product_calls
from meshwright.bench.models import bench_config, products
from meshwright.device import Device


@pytest.mark.parametrize("model", ["tiny", "tiny-experts"])
def test_every_product_is_timed_forward_and_both_gradients(model: str) -> None:
    """The timed calls compute each product's output and the gradients of its input and weights."""
    wanted = products(bench_config(model, "fp32", micro_batch=1))
    calls = product_calls(wanted, Device("cpu"), torch.float32)
    sizes = [call().numel() for _, call in calls]
    expected = [size for p in wanted for size in (p.m * p.n, p.m * p.k, max(1, p.groups) * p.n * p.k)]
    assert sizes == expected and all(sizes)
    assert [count for count, _ in calls] == [p.count for p in wanted for _ in range(3)]


@pytest.mark.parametrize("context", [{}, {"kind": "ring"}, {"kind": "gather"}, {"kind": "ulysses"}], ids=str)
def test_attention_of_a_share_is_timed(context: dict[str, str]) -> None:
    config = bench_config(
        "tiny", "fp32", micro_batch=1, layout={"cp": 2 if context else 1}, context=context,
        data={"prefixes": ["made"], "reset_attention": not context},
    )  # fmt: skip
    attention_call(config, Device("cpu"), torch.float32)()
