"""Checkpoints that megatron-core and DeepSpeed wrote themselves, on CPUs.

Both are installed beside torch with `pip install --no-deps --target DIR megatron-core deepspeed hjson py-cpuinfo psutil
msgpack ninja pydantic pydantic-core annotated-types typing-inspection einops`, and found with DIR on PYTHONPATH.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.cli.main import main
from tests.checkpoint.runs import tensors
from tests.interop.hf_models import run_models
from tests.interop.real_megatron import IDS, VOCAB

pytestmark = pytest.mark.wide
HERE = Path(__file__).parent
CLOSE = 1e-5
# Seconds. The first start of DeepSpeed compiles its operators.
LONG = 1200

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


def run_peer(script: str, *words: object) -> None:
    done = subprocess.run(
        [sys.executable, HERE / script, *map(str, words)], capture_output=True, text=True, timeout=LONG
    )
    assert done.returncode == 0, done.stderr[-3000:]


def imported(source: Path, to: Path, *words: str) -> Path:
    assert main(["import", str(source), "--to", str(to), *words, "--json"]) == 0
    return to


def our_logits(checkpoint: Path) -> np.ndarray:
    (ours,) = run_models(0, 1, [str(checkpoint)], IDS, {})
    return ours[..., :VOCAB]


@needs_megatron
@pytest.mark.parametrize(("kind", "tp"), [("llama", 2), ("gpt", 1)])
def test_megatron_core_and_we_compute_the_same(kind: str, tp: int, tmp_path: Path) -> None:
    run_peer("real_megatron.py", tmp_path, kind, tp, 1)
    wanted = torch.load(tmp_path / "logits.pt", weights_only=True).numpy()
    for form in ("classic", "dist"):
        found = our_logits(imported(tmp_path / form, tmp_path / f"ours-{form}"))
        assert np.abs(found - wanted).max() <= CLOSE * np.abs(wanted).max(), form


@needs_megatron
def test_stages_are_put_together(tmp_path: Path) -> None:
    """The classic format numbers the layers within a stage, and the distributed one through the model."""
    run_peer("real_megatron.py", tmp_path, "gpt", 1, 2)
    classic, whole = (tensors(imported(tmp_path / form, tmp_path / f"ours-{form}")) for form in ("classic", "dist"))
    assert classic.keys() == whole.keys() and len(classic) > 40
    assert all(np.array_equal(classic[name], whole[name]) for name in classic)


@needs_megatron
@pytest.mark.parametrize(("kind", "tp"), [("llama", 2), ("gpt", 1)])
def test_megatron_core_loads_what_we_export(kind: str, tp: int, tmp_path: Path) -> None:
    run_peer("real_megatron.py", tmp_path, kind, 1, 1)
    wanted = torch.load(tmp_path / "logits.pt", weights_only=True).numpy()
    ours = imported(tmp_path / "classic", tmp_path / "ours")
    assert main(["export", str(ours), "--to", str(tmp_path / "out"), "--format", "megatron", "--tp", str(tp)]) == 0
    shutil.copytree(tmp_path / "out" / "release", tmp_path / "again" / "classic")
    run_peer("real_megatron.py", tmp_path / "again", f"load-{kind}", tp, 1)
    found = torch.load(tmp_path / "again" / "logits.pt", weights_only=True).numpy()[..., :VOCAB]
    assert np.abs(found - wanted).max() <= CLOSE * np.abs(wanted).max()


@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_collects_the_same_weights(stage: int, tmp_path: Path) -> None:
    run_peer("real_deepspeed.py", tmp_path / "theirs", stage)
    ours = tensors(imported(tmp_path / "theirs", tmp_path / "ours"))
    wanted = torch.load(tmp_path / "theirs" / "weights.pt", weights_only=True)
    q, k, v = (wanted[f"model.layers.1.self_attn.{each}_proj.weight"] for each in "qkv")
    assert np.array_equal(ours["param/layers.1.attention.qkv.weight"], torch.cat([q, k, v]).numpy())
    assert np.array_equal(ours["param/head.weight"], wanted["lm_head.weight"].numpy())
    count = sum(tensor.numel() for tensor in wanted.values())
    assert sum(values.size for values in ours.values()) == count
