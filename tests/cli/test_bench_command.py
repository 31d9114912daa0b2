"""Tests of `meshwright bench step` on a CPU: its JSON, its counts of parameters and FLOPs, and its errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshwright.bench.models import BENCH_MODELS, bench_config, flops, parameters
from meshwright.cli.main import main
from meshwright.spec.layout import Layout
from meshwright.spec.model.description import describe, split_layers
from meshwright.spec.model.part import coordinate_of

KEYS = {"step_ms", "tokens_per_s", "tflops", "mfu", "peak_gib", "floor_ms"}


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["bench", "step", "--model", "tiny", "--device", "cpu", "--steps", "1", "--json", *words]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.parametrize("words", [[], ["--precision", "fp8"], ["--tp", "2"], ["--pp", "2", "--micro-batches", "2"]])
def test_one_document_with_the_promised_keys(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    result = bench(capsys, "--micro-batch", "1", *words)
    assert set(result) >= KEYS
    assert result["step_ms"] > 0 and result["floor_ms"] > 0 and result["peak_gib"] is None
    assert result["floor"]["products_ms"] > 0 and all(loss > 0 for loss in result["losses"] if "--pp" not in words)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--model", "4b"], "unknown model '4b'"),
        (["--model", "tiny", "--steps", "0"], "--steps 0 must be at least 1"),
        (["--model", "tiny", "--device", "cpu", "--tp", "3"], "tp=3 does not divide heads=4"),
    ],
)
def test_mistakes(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert sentence in error and "Traceback" not in error


@pytest.mark.parametrize("model", list(BENCH_MODELS))
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2}])
def test_the_counted_parameters_are_the_models(model: str, layout: dict[str, int]) -> None:
    config = bench_config(model, layout=layout)
    ranks = Layout(config.layout.tp * config.layout.pp, tp=config.layout.tp, pp=config.layout.pp)
    stage = split_layers(config.model.layers, config.layout.pp, ())[0]
    records = describe(config.model).records(coordinate_of(ranks, 0, False), stage)
    assert parameters(config) == sum(record.numel for record in records.values())


def test_flops_of_a_model_by_hand() -> None:
    """The 3b model has 3.21B weights in matrix products, and 28 layers of causal attention over 4096 tokens.

    Causal attention computes half of the scores.
    """
    config = bench_config("3b")
    weights = 28 * (5120 * 3072 + 3072 * 3072 + 16384 * 3072 + 3072 * 8192) + 128256 * 3072
    assert flops(config, 10) == 10 * (6 * weights + 6 * 28 * 3072 * 4096)
    assert parameters(config) == 3_606_752_256
    assert bench_config("3b", "fp8").train.products == "fp8" and config.train.products == ""
    assert bench_config("3b", "fp8", train={"fp8_scale": "row"}).train.products == "fp8-row"


@pytest.mark.parametrize(
    "words, advice",
    [("--seq 32m --micro-batch 1", "--seq 16777216"), ("--seq 8m --micro-batch 4", "--micro-batch 2")],
)
def test_too_many_tokens_get_advice_that_helps(words: str, advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", *words.split()]) == 2
    assert f"use {advice} at most" in capsys.readouterr().err
