"""The planned peak of long sequences equals that of a dry run, which also counts the memory that an accelerator's
kernels allocate.
"""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.device import Device
from meshwright.dryrun.run_rank import run_rank
from meshwright.plan.job import checked_job
from meshwright.plan.rank import planned_rank
from meshwright.spec.model import gpt
from tests.support.oracle import small_config

SHAPE = {
    "layers": 6, "hidden": 256, "heads": 8, "kv_heads": 2, "ffn": 512, "vocab": 64, "seq": 16384, "norm": "rmsnorm",
    "mlp": "swiglu", "position": "rope", "bias": False, "tied_embeddings": False,
}  # fmt: skip
TRAIN = {"precision": "bf16", "grad_dtype": "bf16", "micro_batch": 1, "global_batch": 1}


def peaks(recompute: dict[str, Any], **model: Any) -> tuple[float, float]:
    """Return the planned peak and that of a dry run, in units of one [tokens, hidden] tensor."""
    config = small_config(
        model=SHAPE | model, train=TRAIN, recompute=recompute, optimizer={"state_dtype": "bf16"}, run={"device": "cuda"}
    )
    stream = config.model.seq * config.model.hidden * 2
    ran, said = run_rank(config, 1, 0, Device("meta")), planned_rank(checked_job(config, 1), 0)
    return said.most["peak"] / stream, ran.most["peak"] / stream


LONG = {"mode": "full", "offload": True, "pieces": 16}


@pytest.mark.parametrize(
    ("recompute", "model"),
    [
        (LONG, {}),
        pytest.param(LONG, {"kv_heads": 8}, marks=pytest.mark.wide),
        pytest.param(LONG | {"offload": False}, {}, marks=pytest.mark.wide),
        pytest.param(LONG | {"pieces": 4, "mode": "every:2"}, {}, marks=pytest.mark.wide),
    ],
)
def test_the_peak_is_that_of_a_dry_run(recompute: dict[str, Any], model: dict[str, Any]) -> None:
    """Only a few [tokens, hidden] tensors remain on the device, so a single forgotten one would show."""
    planned, ran = peaks(recompute, **model)
    assert planned == pytest.approx(ran, rel=0.03)


@pytest.mark.wide
@pytest.mark.parametrize("mode", ["none", "full"])
def test_whole_mlps_are_never_planned_too_small(mode: str) -> None:
    planned, ran = peaks({"mode": mode})
    assert planned >= 0.99 * ran


def test_a_kernels_workspace_is_the_largest_temporary() -> None:
    """Checked by hand: float32 for the gradient of the queries (two 16-bit tensors) and a float32 per row and head. If
    queries share keys, the gradients of keys and values also take a 16-bit tensor each over all query heads.
    """
    tokens, heads, width = 1000, 8, 128
    stream = tokens * heads * width * 2
    extra = tokens * heads * 4
    assert gpt.kernel_workspace(tokens, heads, 8, width, 2) == 2 * stream + extra
    assert gpt.kernel_workspace(tokens, heads, 2, width, 2) == 4 * stream + extra
