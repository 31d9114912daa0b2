"""Tests of plugins: modules from outside the package that a config names.

tests/docs/test_commands.py executes docs/plugins.md as a whole.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from meshwright.cli.main import main
from meshwright.config.comm import REDUCE_KINDS
from meshwright.config.load import config_from
from meshwright.config.lr import LR_SCHEDULES
from meshwright.config.rules import first_broken_rule
from meshwright.config.step_schedules import learning_rate
from meshwright.device import Device
from meshwright.device_kinds import DEVICE_KINDS, resource_of
from meshwright.engine.sharding.compression.make import gradient_sums
from meshwright.errors import UserError
from meshwright.plugins import load_plugins, loaded_plugins
from meshwright.spec.layout.norms import NORMS, NormKind
from meshwright.spec.model.description import model_of
from meshwright.spec.model.gpt import NormPart
from meshwright.spec.model.part import SINGLE_RANK
from tests.docs.pages import ROOT
from tests.support.oracle import small_config
from tests.support.waiting import HANG_S

PLUGIN = """
from meshwright.spec.layout.norms import NORMS, NormKind
from meshwright.spec.schedule.kinds import KINDS, Kind, gpipe

NORMS.register("scalenorm", NormKind("nowhere:ScaleNorm", supports=frozenset(), elementwise=False))
KINDS.register("mine", Kind(gpipe, chunks=(1,)))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on Python's path. Its modules and their registered entries are removed after the test."""
    from meshwright.spec.schedule.kinds import KINDS

    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    registries = (NORMS, KINDS, LR_SCHEDULES, REDUCE_KINDS, DEVICE_KINDS)
    with contextlib.ExitStack() as stack:
        for registry in registries:
            stack.enter_context(mock.patch.dict(registry))
        yield tmp_path
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def test_a_config_names_what_a_plugin_brings(folder: Path) -> None:
    (folder / "plugin_a.py").write_text(PLUGIN)
    sections = {"model": {"norm": "scalenorm"}, "pipeline": {"schedule": "mine"}}
    with pytest.raises(UserError, match="model.norm=scalenorm is not one of layernorm, rmsnorm"):
        small_config(**sections)
    config = small_config(**sections, run={"plugins": ["plugin_a"]})
    norms = [record.shape for name, record in model_of(config).records(SINGLE_RANK).items() if "norm1.weight" in name]
    assert norms == [(1,)] * 4 and config.pipeline.schedule == "mine" and "plugin_a" in loaded_plugins()
    # Loading a plugin again changes nothing.
    load_plugins(["plugin_a"])


def test_a_plugin_brings_a_schedule_of_the_learning_rate(folder: Path) -> None:
    text = "from meshwright.config.lr import LR_SCHEDULES, LRSchedule\n"
    text += "LR_SCHEDULES.register('steps', LRSchedule(lambda peak, low, share: peak if share < 0.5 else low))\n"
    (folder / "plugin_c.py").write_text(text)
    sections = {"lr": {"schedule": "steps", "min": 1e-5}, "train": {"steps": 8}, "optimizer": {"lr": 1e-3}}
    with pytest.raises(UserError, match="lr.schedule=steps is not one of cosine, linear, constant, wsd"):
        small_config(**sections)
    config = small_config(**sections, run={"plugins": ["plugin_c"]})
    assert [learning_rate(config, step) for step in range(1, 9)] == [1e-3] * 3 + [1e-5] * 5


def test_a_plugin_brings_a_compression_that_is_planned(folder: Path) -> None:
    text = "from meshwright.config.comm import REDUCE_KINDS, ReduceKind\n"
    text += "REDUCE_KINDS.register('halves', ReduceKind('nowhere:Halves', lambda c, n, size: 2 * n, ('block',)))\n"
    (folder / "plugin_d.py").write_text(text)
    with pytest.raises(UserError, match="comm.reduce.kind=halves is not one of plain, bf16"):
        small_config(comm={"reduce": {"kind": "halves"}})
    config = small_config(comm={"reduce": {"kind": "halves", "block": 32}}, run={"plugins": ["plugin_d"]})
    plan = gradient_sums(config, 1).plan
    assert plan.calls("all_reduce", 1024, 4, 2) == [("all_to_all", 2048), ("all_gather", 2048)] and plan.align == 32
    with pytest.raises(UserError, match="comm.reduce.rank has no effect with comm.reduce.kind=halves"):
        small_config(comm={"reduce": {"kind": "halves", "rank": 2}})


def test_a_plugin_brings_a_reducer_with_its_plan(folder: Path) -> None:
    (folder / "plugin_f.py").write_text(
        "from meshwright.config.comm import REDUCE_KINDS, ReduceKind\n"
        "from meshwright.engine.sharding.reducers import PlainReducer\n"
        "REDUCE_KINDS.register('twice', ReduceKind(reducer='plugin_f:made', plan='plugin_f:Twice'))\n"
        "class Twice(PlainReducer):\n"
        "    def __init__(self, config):\n"
        "        self.config = config\n"
        "    def calls(self, op, elements, element_bytes, ranks, records=(), on_node=1):\n"
        "        return [(op, elements * element_bytes)] * 2\n"
        "def made(asked):\n"
        "    return Twice(asked.reduce)\n"
    )
    asked = gradient_sums(small_config(comm={"reduce": {"kind": "twice"}}, run={"plugins": ["plugin_f"]}), 1)
    for reducer in (asked.plan, asked.make()):
        assert type(reducer).__name__ == "Twice"
        assert reducer.calls("all_reduce", 8, 4, 2) == [("all_reduce", 32)] * 2


def test_a_plugin_brings_a_kind_of_device(folder: Path) -> None:
    (folder / "plugin_e.py").write_text(
        "from meshwright.device import Host\n"
        "from meshwright.device_kinds import DEVICE_KINDS, DeviceEntry\n"
        "DEVICE_KINDS.register('toy', DeviceEntry('plugin_e:Toy', 'gloo', is_accelerator=False))\n"
        "class Toy(Host):\n"
        "    def why_not(self, precision, index):\n"
        "        return 'is too slow: use fp32' if precision == 'fp64' else ''\n"
    )
    with pytest.raises(UserError, match="run.device=toy is not one of auto, cpu, cuda, npu"):
        small_config(run={"device": "toy"})
    config = small_config(run={"device": "toy", "plugins": ["plugin_e"]})
    device = Device.choose(config.run.device)
    assert (device.kind, device.torch.type, device.is_cpu, device.backend()) == ("toy", "cpu", True, "gloo")
    assert config.run.on_cpu and resource_of("toy") == ""
    with pytest.raises(UserError, match="train.precision=fp64 is too slow: use fp32"):
        device.check_precision("fp64")
    with pytest.raises(UserError, match="comm.backend=nccl needs an accelerator"):
        device.check_backend("nccl")


def test_unknown_norms_are_refused_wherever_they_appear() -> None:
    with pytest.raises(UserError, match="model.norm=rmsnrm is not one of .*did you mean 'rmsnorm'"):
        NormPart("rmsnrm", 8, 1e-5)
    with pytest.raises(UserError, match="model.norm=rmsnorm already: choose another name"):
        NORMS.register("rmsnorm", NormKind("a:B", frozenset()))


def test_a_norm_states_what_it_supports(folder: Path) -> None:
    (folder / "plugin_b.py").write_text(PLUGIN)
    run, model = {"plugins": ["plugin_b"]}, {"norm": "scalenorm"}
    layout, train = {"tp": 4, "tp_grid": [2, 2]}, {"micro_batch": 2, "precision": "fp32"}
    message = first_broken_rule(small_config(model=model, layout=layout, train=train, run=run), 4)
    assert message is not None and "layout.tp_grid=[2, 2] can't be combined with model.norm=scalenorm" in message
    assert first_broken_rule(small_config(layout=layout, train=train), 4) is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, r"run.plugins=plugin_c can't be imported, since Python finds no module 'plugin_c': install it, or add"),
        ("import no_such_thing", r"ModuleNotFoundError: No module named 'no_such_thing', at .*_c.py:1\): install"),
        ("x = 1\nraise RuntimeError('no')", r"RuntimeError: no, at .*plugin_c.py:2\): correct it"),
        ("def f(:", r"SyntaxError"),
        ("raise SystemExit(3)", r"SystemExit: 3"),
    ],
)
def test_a_plugin_that_fails_is_one_sentence(folder: Path, text: str | None, sentence: str) -> None:
    if text is not None:
        (folder / "plugin_c.py").write_text(text)
    with pytest.raises(UserError, match=sentence):
        small_config(run={"plugins": ["plugin_c"]})


def test_a_missing_plugin_ends_a_command_with_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("run: {plugins: [no_such_plugin]}\n")
    assert main(["config", "show", str(tmp_path / "c.yaml")]) == 2
    assert "run.plugins=no_such_plugin can't be imported" in capsys.readouterr().err
    assert main(["schedule", "--plugins", "no_such_plugin", "--pp", "2", "--micro-batches", "2"]) == 2


def test_installed_plugins_are_loaded_by_every_command_without_torch(tmp_path: Path) -> None:
    """A plugin with an entry point, as pip installs it, is loaded without being named in `run.plugins`."""
    (tmp_path / "installed_plugin.py").write_text(PLUGIN)
    about = tmp_path / "installed_plugin-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: installed-plugin\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[meshwright.plugins]\nmine = installed_plugin\n")
    source = (
        "import sys\nfrom meshwright.cli.main import main\n"
        "code = main(['schedule', '--kind', 'mine', '--pp', '2', '--micro-batches', '2'])\n"
        "assert 'torch' not in sys.modules\nsys.exit(code)"
    )
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", source], env=env, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0 and "verified" in done.stdout, done.stderr


def test_values_of_the_key_are_checked() -> None:
    with pytest.raises(UserError, match="run.plugins must be a word"):
        config_from({"run": {"plugins": [3]}})
