"""Rates for precisions that a device lacks, and numbers that a cluster file must not contain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.cli.main import main
from meshwright.errors import UserError
from meshwright.plan.cluster import FOLDER, cluster_from, load_cluster


def test_a_precision_without_a_rate_runs_in_a_wider_one() -> None:
    device = load_cluster("v100-32g").device
    fp32 = replace(device, peak={"fp16": 125.0, "fp32": 15.7, "fp64": 7.8})
    # Training refuses bf16 on such a device too.
    with pytest.raises(UserError, match="no rate for bf16"):
        fp32.rate("bf16")
    assert replace(device, peak={"fp16": 125.0, "fp64": 7.8}).rate("fp32") == 7.8e12
    with pytest.raises(UserError, match="no rate for fp32: choose train.precision from bf16, fp16"):
        replace(device, peak={"bf16": 312.0, "fp16": 312.0}).rate("fp32")


@pytest.mark.parametrize(
    ("cluster", "precision"),
    [("ascend-910-32g", "fp64"), ("ascend-910-32g", "fp8"), ("a100-80g-dgx", "fp8"), ("v100-32g", "fp8")],
)
@pytest.mark.parametrize("command", ["cost", "simulate", "plan"])
def test_what_a_device_cannot_run_is_not_planned(
    command: str, cluster: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    words = ["gpt2-1.5b", "--cluster", cluster, "--devices", "8", "train.global_batch=64"]
    assert main([command, *words, f"train.precision={precision}"]) == 2
    text = capsys.readouterr().err
    has = ", ".join(load_cluster(cluster).device.peak)
    assert f"no rate for {precision}: choose train.precision from {has}, or" in text and text.count("\n") == 1


NUMBERS: list[tuple[str, str, Any, str]] = [
    ("network", "node_gb_s", float("nan"), "must be a number above zero, and a finite one"),
    ("network", "node_gb_s", float("inf"), "must be a number above zero, and a finite one"),
    ("network", "node_gb_s", 10**400, "must be a number above zero, and a finite one"),
    ("network", "node_gb_s", True, "must be a number above zero, and a finite one"),
    ("device", "units", 0.5, "must be a whole number of at least 1"),
    ("device", "units", float("inf"), "must be a number above zero, and a finite one"),
    ("node", "devices", 0.5, "must be a whole number of at least 1"),
    ("node", "devices", 8.7, "must be a whole number of at least 1"),
]


@pytest.mark.parametrize(("section", "field", "value", "sentence"), NUMBERS, ids=range(len(NUMBERS)))
def test_a_number_that_a_cluster_cannot_have(section: str, field: str, value: Any, sentence: str) -> None:
    raw = yaml.safe_load((FOLDER / "h100-80g-dgx.yaml").read_text(encoding="utf-8"))
    with pytest.raises(UserError, match=rf"^mine.yaml: {section}\.{field}=.*{sentence}$"):
        cluster_from({**raw, section: {**raw[section], field: value}}, "mine.yaml")


def test_a_whole_number_may_be_written_as_a_fraction() -> None:
    raw = yaml.safe_load((FOLDER / "h100-80g-dgx.yaml").read_text(encoding="utf-8"))
    assert cluster_from({**raw, "node": {**raw["node"], "devices": 8.0}}, "mine.yaml").node.devices == 8
