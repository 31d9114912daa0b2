"""`meshwright.plan` and `meshwright.memory`: the figures of the commands, as values, tables and drawings."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright
from meshwright.cli.main import main
from meshwright.config.load import load_config
from meshwright.errors import UserError
from meshwright.library import planning
from tests.support.waiting import HANG_S

MODEL = {"layers": 4, "hidden": 64, "heads": 4, "vocab": 512, "seq": 64}
CONFIG = {"model": MODEL, "train": {"global_batch": 16}}
ON = {"cluster": "h100-80g-dgx", "devices": 4}


def test_a_plan_has_the_figures_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planning.plan(CONFIG, "layout.tp=2", **ON, top=3)
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(CONFIG))
    words = ["--cluster", "h100-80g-dgx", "--devices", "4", "--top", "3", "layout.tp=2", "--json"]
    assert main(["plan", str(file), *words]) == 0
    theirs = json.loads(capsys.readouterr().out)
    assert [one.layout for one in found.layouts] == [one["layout"] for one in theirs["candidates"]]
    assert found.best.step_s == theirs["best"]["step_time_s"] and found.best.mfu == theirs["best"]["mfu"]
    assert found.best.memory_gib == theirs["best"]["memory_gib"]
    assert found.published is None
    assert sum(found.best.parts_s.values()) == pytest.approx(found.best.step_s)

    assert found.config.layout.tp == 2 and found.config.model.hidden == 64
    found.save(tmp_path / "best.yaml")
    assert load_config(tmp_path / "best.yaml") == found.config
    again = planning.memory(found.config, **ON)
    assert again.device_gib == pytest.approx(found.best.memory_gib)

    text, page = repr(found), found._repr_html_()
    assert text.startswith("config on 4 x H100") and found.best.cells[0] in text and found.reasons[0] in text
    assert "<table>" in page and "<div" in page and "compute" in page
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.devices = 8  # type: ignore[misc]


def test_memory_adds_up_and_says_if_it_fits() -> None:
    use = planning.memory("llama3-8b", "zero.stage=3", devices=8, global_batch=8, cluster="h100-80g-dgx")
    assert use.fits and use.capacity_gib > 70
    assert sum(use.parts_gib.values()) == pytest.approx(use.device_gib, abs=1e-6)
    assert "fits" in use.title() and "activations" in repr(use)
    whole = planning.memory("llama3-8b", "zero.stage=0", devices=8, global_batch=8, cluster="h100-80g-dgx")
    assert not whole.fits and "DOES NOT FIT" in repr(whole) and whole.most_bytes["optimizer"] > use.most_bytes["peak"]
    assert "activations" in use._repr_html_() and "<div" in use._repr_html_()
    with pytest.raises(UserError, match="there is no config file and no preset 'llama3-8c'"):
        planning.memory("llama3-8c", devices=8)


def test_the_package_names_everything_without_torch() -> None:
    """`meshwright.plan` is a folder and a function. It can be called before and after a module of the folder is
    imported."""
    assert set(meshwright.__all__) == set(meshwright._HOMES) and set(meshwright.__all__) <= set(dir(meshwright))
    source = (
        "import inspect, sys, meshwright\n"
        f"first = meshwright.plan({CONFIG!r}, cluster='h100-80g-dgx', devices=2, top=1)\n"
        "import meshwright.plan.cluster\n"
        f"assert meshwright.plan({CONFIG!r}, cluster='h100-80g-dgx', devices=2, top=1) == first\n"
        "assert 'global_batch' in inspect.signature(meshwright.plan).parameters\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr


def test_every_name_explains_itself() -> None:
    for name in meshwright.__all__:
        assert inspect.getdoc(getattr(planning, name, None) or getattr(meshwright, name)), name
