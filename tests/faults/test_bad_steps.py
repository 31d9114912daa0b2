"""Bad steps planted on one of two ranks: the verdict, the named rank and layer, the action taken, and later losses."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from meshwright.cli.main import main
from meshwright.config.faults import FaultsConfig
from meshwright.engine.losses import Normalisation, StepSums, UpdateGate
from meshwright.engine.optim.flat import FlatOptimizer
from meshwright.engine.result import StepResult
from meshwright.faults.bad_steps import BadSteps, FaultPlace, Window
from meshwright.record.run_folder import read_run
from meshwright.record.run_notes import KINDS, FaultNotes
from meshwright.watch.run_page import summary
from tests.faults.planted import Fault, events, lines, numbers, run
from tests.support.ranks import run_ranks

SAVES = {"checkpoint": {"every": 2, "keep": 0}}
NAN, SPIKE = Fault(6, 1), Fault(10, 1, factor=1e4, backward=True)
CASES: dict[str, tuple[Fault | None, dict[str, Any]]] = {
    "clean": (None, {}),
    "forward": (NAN, {}),
    "backward": (Fault(6, 1, "blocks.2.attention", backward=True), {}),
    "loss": (Fault(10, 1, "head.norm", factor=40.0, whole=True), {}),
    "spike": (SPIKE, {}),
    "batch": (Fault(6, 1, times=99), {}),
    "genuine": (Fault(10, -1, factor=1e4, backward=True, times=99), {}),
    "growing": (Fault(10, 1, factor=1e4, backward=True, times=99, growth=1.2), {}),
    "act": (Fault(10, -1, factor=1e4, backward=True, times=99), {"faults": {"window": 8, "spike": "act"}}),
    "rollback": (Fault(6, 1, times=3), {"faults": {"window": 8, "action": "rollback"}} | SAVES),
    "stop": (Fault(6, 1, times=99), {"faults": {"window": 8, "action": "stop"}} | SAVES),
    "broken": (Fault(0, 1, times=999), {"faults": {"window": 8, "replay": "elsewhere"}}),
    "again": (Fault(0, 1), {"faults": {"window": 8, "max_faults": 2}} | SAVES),
}
PASSING = {
    "forward": ("the loss is not finite", "first in the forward of layers.1 on rank 1"),
    "backward": ("the gradient is not finite", "first in the backward of layers.2 on rank 1"),
    "loss": ("the loss, ", "first in the forward of head on rank 1"),
    "spike": ("the gradient's norm, ", "first in the backward of layers.1 on rank 1"),
}
QUICK = ("clean", "forward", "spike", "batch", "rollback")


def story(rank: int, world: int, folder: str, cases: dict[str, Any]) -> dict[str, Any]:
    ends = {}
    for name, (fault, sections) in cases.items():
        with contextlib.redirect_stderr(io.StringIO()) as said:
            end = run(Path(folder) / name, fault, **sections)
        ends[name] = (end if isinstance(end, str) else (end.step_number, end.consumed), said.getvalue())
    return ends


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Run the quick cases in one world. Returns the folder of the runs and each rank's results."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, run_ranks(2, story, str(folder), {name: CASES[name] for name in QUICK})


def check_passing(folder: Path, ends: Any, names: Sequence[str]) -> None:
    """Check a fault that disappears when its step is computed again.

    It is attributed to the hardware, and the run continues as if nothing had happened.
    """
    for name in names:
        why, where = PASSING[name]
        (event,) = events(folder / name, "fault")
        assert event["text"].startswith(why) and where in event["text"] and event["rank"] == 1, event
        assert event["text"] in ends[name][1], "shown on the display"
        assert numbers(folder / name) == numbers(folder / "clean"), name


def test_a_fault_that_is_gone_is_laid_to_a_rank_and_leaves_no_trace(told: Any) -> None:
    folder, (ends, others) = told
    assert {name: end for name, (end, _) in ends.items()} == {name: end for name, (end, _) in others.items()}
    assert not events(folder / "clean", *KINDS) and not any(said for _, said in others.values())
    check_passing(folder, ends, ["forward", "spike"])


def check_skipped(folder: Path) -> None:
    (event,) = events(folder / "batch", "bad_step")
    assert "first in the forward of layers.1.mlp on rank 1" in event["text"]
    assert event["text"].endswith("in samples 42 to 43; skipped") and event["step"] == 6
    found, clean = numbers(folder / "batch"), numbers(folder / "clean")
    assert found[:5] == clean[:5] and [line["step"] for line in found if line["skipped"]] == [6]


def test_a_bad_batch_is_skipped_and_its_first_bad_tensor_named(told: Any) -> None:
    check_skipped(told[0])


def check_rollback(folder: Path, ends: Any) -> None:
    (event,) = events(folder / "rollback", "rollback")
    assert (event["step"], event["lost"]) == (6, 1) and "went back to step 4" in event["text"]
    found, clean = numbers(folder / "rollback"), numbers(folder / "clean")
    assert [line["step"] for line in found] == list(range(1, 13)), "each step once"
    assert found[:4] == clean[:4] and found[4] != clean[4], "the samples after the batch"
    assert ends["rollback"][0] == (12, 48 + 8 * 8)


def test_a_rollback_goes_on_past_the_batch(told: Any) -> None:
    folder, (ends, _) = told
    check_rollback(folder, ends)


def test_status_and_summary_show_it(told: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = told
    assert main(["status", str(folder / "forward")]) == 0
    said = capsys.readouterr().out
    assert "faults      rank 1: 1 fault, the last at step 6: the loss is not finite; computed again" in said
    assert main(["status", str(folder / "batch")]) == 0
    said = capsys.readouterr().out
    assert "bad steps   1, due to the data or the model and not to a device; the last at step 6: the loss" in said
    summary(folder / "forward")
    assert "step 6: the loss is not finite; computed again" in " ".join(capsys.readouterr().out.split())


@pytest.mark.wide
def test_every_way_in_which_a_bad_step_ends(tmp_path: Path) -> None:
    cases = {name: case for name, case in CASES.items() if name not in QUICK[2:]}
    ends, others = run_ranks(2, story, str(tmp_path), cases)
    assert {name: end for name, (end, _) in ends.items()} == {name: end for name, (end, _) in others.items()}
    check_passing(tmp_path, ends, ["forward", "backward", "loss"])
    (event,) = events(tmp_path / "genuine", "bad_step")
    assert "the data or the model; the update was made all the same" in event["text"] and ends["genuine"][0] == (12, 96)
    assert not any(line["skipped"] for line in numbers(tmp_path / "genuine"))
    (event,) = events(tmp_path / "growing", "fault")
    assert "stands out too, but differently" in event["text"] and event["rank"] == 1
    assert not any(line["skipped"] for line in numbers(tmp_path / "growing"))
    (event,) = events(tmp_path / "act", "bad_step")
    assert event["text"].endswith("skipped") and [n["step"] for n in numbers(tmp_path / "act") if n["skipped"]] == [10]
    assert "step 6: the loss is not finite" in ends["stop"][0] and "layers.1.mlp on rank 1" in ends["stop"][0]
    assert read_run(tmp_path / "stop").steps[-1]["step"] == 5
    assert sorted(path.name for path in (tmp_path / "stop" / "checkpoints").glob("step-*"))[-1].endswith("5")
    assert "rank 1" in ends["broken"][0] and "its hardware is broken" in ends["broken"][0]
    assert ends["again"][0].startswith("rank 1 had 2 faults, the last in step 6")
    assert [line["step"] for line in lines(tmp_path / "again")] == list(range(1, 7))


@pytest.mark.wide
@pytest.mark.parametrize(
    ("layout", "zero", "who"),
    [({"tp": 2}, 0, "one of ranks 0, 1"), ({"pp": 2}, 1, "rank 1"), ({}, 3, "rank 1")],
    ids=["tp", "pp", "zero3"],
)
def test_on_other_layouts(tmp_path: Path, layout: dict[str, int], zero: int, who: str) -> None:
    """Ranks that sum a layer's gradient cannot be distinguished. With stages, the rank that holds the layer is
    named.
    """
    sections = {"model": {"layers": 4}, "layout": layout, "zero": {"stage": zero}}
    cases = {"clean": (None, sections), "forward": (Fault(6, 1, "blocks.3.mlp"), sections)}
    cases["backward"] = (Fault(6, 1, "blocks.3.attention", backward=True), sections)
    run_ranks(2, story, str(tmp_path), cases)
    for name in ("forward", "backward"):
        (event,) = events(tmp_path / name, "fault")
        assert f"the {name} of layers.3 on {who if name == 'backward' else 'rank 1'}" in event["text"]
        assert numbers(tmp_path / name) == numbers(tmp_path / "clean")


def story_ahead(rank: int, world: int, folder: str, cases: dict[str, Any]) -> dict[str, Any]:
    """Run the cases with a loop that launches a step before it has read the one before it, as on an accelerator."""

    def step_on_device(self: FlatOptimizer, lr: float, scaling: Any) -> None:
        if bool(scaling.updates):
            with patch.object(FlatOptimizer, "on_device", False):  # a CPU has no kernel for the step on the device
                self.step(lr, float(scaling.divisor))

    with patch.object(FlatOptimizer, "on_device", True), patch.object(FlatOptimizer, "step_on_device", step_on_device):
        return story(rank, world, folder, cases)


@pytest.mark.wide
def test_where_steps_run_ahead(tmp_path: Path) -> None:
    """The step after a bad one has already been launched when the verdict is known. It is dropped without a trace."""
    ends = run_ranks(2, story_ahead, str(tmp_path), {name: CASES[name] for name in (*QUICK, "loss", "again")})[0]
    assert not events(tmp_path / "clean", *KINDS)
    check_passing(tmp_path, ends, ["forward", "spike", "loss"])
    check_skipped(tmp_path)
    check_rollback(tmp_path, ends)
    # The planted fault of step 6 occurred when that step was launched after the bad one, and was dropped with it.
    assert ends["again"][0].startswith("rank 1 had 2 faults, the last in step 7")
    assert [line["step"] for line in lines(tmp_path / "again")] == list(range(1, 8))
    saved = sorted(path.name for path in (tmp_path / "again" / "checkpoints").glob("step-*"))
    assert saved[-1].endswith("7"), "and no step that has no line"


@pytest.mark.wide
def test_a_run_that_goes_on_knows_its_last_steps(tmp_path: Path) -> None:
    """A spike in the second step after a resume stands out as it would have in an uninterrupted run."""
    sections = {"checkpoint": {"every": 8}}
    run(tmp_path / "run", None, train={"steps": 8}, **sections)
    run(tmp_path / "run", Fault(10, 0, factor=1e4, backward=True), **sections)
    (event,) = events(tmp_path / "run", "fault")
    assert event["step"] == 10


def test_spikes_stand_out_of_the_window() -> None:
    window = Window(FaultsConfig())
    for number in range(100):
        assert (window.bounds()[0] < 1e9) == (number >= 8)
        window.add(3.0 + 0.1 * (number % 5 - 2), 1.0 + 0.2 * (number % 3))
    loss, norm = window.bounds()
    assert 3.6 < loss < 5.0 and 10.0 < norm < 20.0


def machine(folder: Path) -> BadSteps:
    """Return the state machine of bad steps after twenty good steps, with a stand-in for the trainer."""
    config = FaultsConfig()
    trainer: Any = SimpleNamespace(gate=UpdateGate(1), marks=None, train_batches=None, take_back=lambda result: None)
    bad = object.__new__(BadSteps)
    bad.config, bad.trainer, bad.window, bad.notes = config, trainer, Window(config), FaultNotes(folder, 9, True)
    bad.replays = bad.holds_spikes = True
    bad.reached = bad.went_back = 0
    bad._samples = lambda result, place=None: ""  # type: ignore[method-assign]
    bad._place = lambda found: FaultPlace()  # type: ignore[method-assign]
    for number in range(20):
        bad.window.add(3.0, 5.0 + number % 3)
    return bad


def test_a_step_is_judged_by_the_bounds_that_held_it(tmp_path: Path) -> None:
    """The window has moved on by the time of the verdict if steps run ahead. A step that gives the same numbers when
    it is computed again is then no fault.
    """
    bad = machine(tmp_path)
    norm = bad.window.bounds()[1] - 0.1  # below the current bound, and above the bound at its launch
    result = StepResult(30, 3.0, norm, 1e-3, None, True, 8, 8, held=True, bounds=(9.0, norm - 0.1))
    assert bad.settle(result, lambda: replace(result, held=False, skipped=False)).skipped is False
    (event,) = events(tmp_path, "bad_step")
    assert "the same when it is computed again" in event["text"] and not events(tmp_path, "fault")


@pytest.mark.parametrize(("bound", "again", "kind"), [
    (90.0, 99.95, "bad_step"),  # kernels that add in varying order may differ by this much
    (99.98, 99.95, "bad_step"), (90.0, 6.0, "fault"), (20.0, 40.0, "fault"),
])  # fmt: skip
def test_what_is_another_number_when_it_is_computed_again_is_a_fault(
    tmp_path: Path, bound: float, again: float, kind: str
) -> None:
    """A changed number is a fault even if the new one stands out too. A difference of rounding errors is no fault."""
    bad = machine(tmp_path)
    result = StepResult(30, 3.0, 100.0, 1e-3, None, True, 8, 8, held=True, bounds=(9.0, bound))
    found = bad.settle(result, lambda: replace(result, grad_norm=again, held=False, skipped=False))
    assert found.grad_norm == again and [e["kind"] for e in events(tmp_path, *KINDS)] == [kind]


def test_a_spike_that_grows_when_it_is_computed_again_is_not_trained(tmp_path: Path) -> None:
    bad = machine(tmp_path)
    result = StepResult(30, 3.0, 100.0, 1e-3, None, True, 8, 8, held=True, bounds=(9.0, 20.0))

    def again() -> StepResult:
        assert bad.trainer.gate.norm_bound == 200.0, "what was found before passes, and a little more"
        return replace(result, grad_norm=1e6)

    assert bad.settle(result, again).skipped and len(events(tmp_path, "bad_step")) == 1


def test_an_infinite_loss_is_no_spike() -> None:
    """An infinite loss is left to the code that handles numbers that are not finite, as with a loss scale."""
    gate = UpdateGate(1)
    gate.active, gate.loss_bound = True, 5.0
    for loss, held in ((math.inf, 0.0), (6.0, 1.0), (4.0, 0.0)):
        sums = torch.tensor([8 * loss, 8.0, 1.0], dtype=torch.float64)
        gate.release()
        found = gate.pass_on(StepSums(sums, sums), Normalisation(1.0, None, []))[1]
        assert found is not None and float(found) == held
