"""Tests of plugins: modules from outside the package that a config names.

tests/docs/test_commands.py executes docs/plugins.md as a whole.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from meshwright.cli.main import main
from meshwright.config.load import config_from
from meshwright.config.rules import first_broken_rule
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
    with mock.patch.dict(NORMS), mock.patch.dict(KINDS):
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
