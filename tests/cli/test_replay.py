"""A replay of a past step gives the recorded numbers bit for bit and changes no file of the run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.cli.main import main
from meshwright.cli.replay import judge
from meshwright.config.load import to_yaml
from meshwright.engine import providers as gpt
from tests.checkpoint.runs import tiny
from tests.cli.test_bad_input import sentence
from tests.faults.planted import Fault, plant
from tests.support.oracle import small_config
from tests.support.token_files import write_documents


def make_run(folder: Path, steps: int = 6, every: int = 2, faults: Any = None, **model: Any) -> Path:
    """Train a run whose learning rate depends on the step, with a checkpoint at every `every`-th step."""
    write_documents(folder / "tokens", list(np.random.default_rng(0).integers(0, 31, (50, 100))))
    data = {"prefixes": [str(folder / "tokens")], "split": [0.8, 0.2, 0]}
    often = {"every": every, "keep": 0}
    sections = tiny(folder / "run", data=data, train={"steps": steps}, checkpoint=often, model=model)
    sections["faults"] = faults or {}
    (folder / "config.yaml").write_text(to_yaml(small_config(**sections)))
    assert main(["train", str(folder / "config.yaml")]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("replay"))


def files(run: Path) -> dict[str, tuple[int, int]]:
    """Return the size and the modification time of every file of a run."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(run.rglob("*"))}


def replayed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["replay", *words, "--json"])
    return code, dict(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize(("step", "begin"), [(4, 2), (3, 2), (2, 0), (6, 4)])
def test_a_step_is_reproduced_bit_for_bit(run: Path, step: int, begin: int, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(run)
    code, result = replayed(capsys, str(run), "--step", str(step))
    assert (code, result["exact"], result["from"], result["step"]) == (0, True, begin, step)
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[step - 1])
    for name in ("loss", "grad_norm"):
        assert result[name] == {"recorded": line[name], "replayed": line[name], "difference": 0.0}
    assert files(run) == before, "a replay only reads the run"


def test_the_last_bit_counts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, text = run / "metrics.jsonl", (run / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    lines[2]["loss"] = math.nextafter(lines[2]["loss"], 9.0)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        code, result = replayed(capsys, str(run), "--step", "3")
        assert (code, result["reproduced"], result["first_different"]) == (1, False, 3)
        assert replayed(capsys, str(run), "--step", "4")[1]["first_different"] == 3
        assert main(["replay", str(run), "--step", "3"]) == 1
        assert "NOT reproduced bit for bit" in capsys.readouterr().out
    finally:
        path.write_text(text)


def test_another_order_of_sums_is_told_from_another_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, result = replayed(capsys, str(run), "--step", "4", "train.micro_batch=2")
    assert (code, result["exact"]) == (1, False), "dropout depends on the micro-batch"
    code, result = replayed(capsys, str(run), "--step", "4", "optimizer.eps=1e-7")
    assert code == 0 and not result["exact"] and result["allowed"] == 1e-4
    assert replayed(capsys, str(run), "--step", "4", "train.seed=77")[0] == 1


@pytest.mark.parametrize(("fault", "action"), [
    pytest.param(Fault(4, times=3), {"action": "rollback"}, id="rollback"),
    pytest.param(Fault(11, factor=1e4, backward=True, times=99), {"spike": "act"}, marks=pytest.mark.wide, id="skip"),
])  # fmt: skip
def test_a_replay_goes_the_way_of_the_run(
    fault: Fault, action: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A replay repeats the decisions of a run that rolled back and left out a batch, or skipped an update.

    The checkpoint that it starts from is older than these decisions.
    """
    real = gpt.model_provider

    def provider(ctx: Any, stage: Any) -> Any:
        module = real(ctx, stage)
        plant(ctx, module, fault)
        return module

    with monkeypatch.context() as patched:
        patched.setattr(gpt, "model_provider", provider)
        run = make_run(tmp_path, steps=12, every=10 if "spike" in action else 2, faults=action | {"window": 8})
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["skipped"]] == ([11] if "spike" in action else [])
    assert (lines[-1]["consumed"] == 11 * lines[-1]["global_batch"]) == ("spike" in action), "a batch was left out"
    for step in (4, 12) if "action" in action else (12,):
        code, result = replayed(capsys, str(run), "--step", str(step))
        # The faulty step itself differs, because the fault is not planted in the replay.
        differs = 11 if "spike" in action else None
        assert (code, result["exact"], result["first_different"]) == (0, True, differs)


@pytest.mark.wide
@pytest.mark.parametrize("layout", ["layout.tp=2", "layout.pp=2", "zero.stage=1"])
def test_on_another_layout(layout: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, dropout=0.0)
    code, result = replayed(capfd, str(run), "--step", "4", "--nproc", "2", layout)
    assert (code, result["exact"], result["ranks"]) == (0, False, 2) and result["loss"]["difference"] < 1e-5
    code, result = replayed(capfd, str(run), "--step", "4", "--nproc", "2", layout, "train.seed=5")
    assert code == 1


def test_judgement_of_numbers_that_are_not_finite() -> None:
    lines = {1: {"loss": 2.0, "grad_norm": None}}
    assert judge(lines, [{"step": 1, "loss": 2.0, "grad_norm": math.inf}], 0.0)["reproduced"]
    assert not judge(lines, [{"step": 1, "loss": 2.0, "grad_norm": 1.0}], 0.1)["reproduced"]
    assert not judge({1: {"loss": 2.0, "grad_norm": 1.0}}, [{"step": 1, "loss": math.nan, "grad_norm": 1.0}], 1.0)[
        "reproduced"
    ]


def test_mistakes(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "it has steps 1 to 6" in sentence(capsys, ["replay", str(run), "--step", "7"])
    assert "holds no run" in sentence(capsys, ["replay", str(tmp_path), "--step", "1"])
    assert "--nproc 0 must be at least 1" in sentence(capsys, ["replay", str(run), "--step", "1", "--nproc", "0"])
