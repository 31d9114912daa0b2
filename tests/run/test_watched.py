"""Every command that talks to other ranks has a watchdog, and leaves the world only if all went well."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import meshwright
from meshwright.check import checking
from meshwright.comm.mesh import Mesh
from meshwright.comm.watchdog import EXIT_CODE
from meshwright.config.kinds import MODEL_KINDS
from meshwright.infer import evaluate
from tests.comm.hanging import run_hanging


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_is_used_under_a_watchdog(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    seen: list[str] = []

    class Watch:
        def __enter__(self) -> None:
            seen.append("watch")

        def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
            seen.append(f"end of watch after {error!r}" if error else "end of watch")

    config = SimpleNamespace(
        comm=SimpleNamespace(timeout=7.0, backend="auto"), run=SimpleNamespace(device="cpu"),
        model=SimpleNamespace(kind_facts=MODEL_KINDS["gpt"]),
    )  # fmt: skip
    stand_ins: dict[str, Any] = {
        "open_model": lambda *args: (None, {}), "config_with": lambda found, sections: config,
        "check": lambda *args: None, "enter": lambda *args: ("device", True),
        "build_context": lambda *args: SimpleNamespace(mesh="mesh", config=config), "build_modules": lambda *args: [],
        "load_weights": lambda *args: seen.append("load"), "leave": lambda: seen.append("leave"),
        "watchdog_for": lambda *args: seen.append(str(args)) or Watch(),
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(evaluate, name, stand_in)

    def use(*args: Any) -> str:
        if fails:
            raise ValueError("bad")
        return "result"

    began = [str(("mesh", 7.0, "device", True)), "watch", "load"]
    if fails:
        with pytest.raises(ValueError, match="bad"):
            evaluate.with_model("somewhere", {}, use)
        assert seen == [*began, "end of watch after ValueError('bad')"]
    else:
        assert evaluate.with_model("somewhere", {}, use) == "result"
        assert seen == [*began, "end of watch", "leave"]


def test_a_check_is_watched_on_the_device_that_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog's threads would otherwise ask the first device for the events of another one."""
    comm = SimpleNamespace(timeout=7.0, backend="auto")
    config = SimpleNamespace(comm=comm, run=SimpleNamespace(device="cpu"), train=SimpleNamespace(precision="fp32"))
    seen: list[Any] = []

    def watched(*args: Any) -> Any:
        seen.append(args)
        raise InterruptedError

    stand_ins: dict[str, Any] = {
        "check": lambda *args: None, "enter": lambda *args: ("device", True),
        "build_context": lambda *args, **named: SimpleNamespace(mesh="mesh"), "watchdog_for": watched,
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(checking, name, stand_in)
    with pytest.raises(InterruptedError), checking.trainer_of(config, checking.Providers()):  # type: ignore[arg-type]
        pass
    assert seen == [("mesh", 7.0, "device", True)]


def mean(module: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return module(batch["x"]).sum(), batch["x"].shape[0]


def wrapped(mesh: Mesh, sleeper: int) -> None:
    """Train in a user's own loop, in which one rank never begins its second step."""
    torch.manual_seed(1)
    config = {"train": {"global_batch": 4, "micro_batch": 2}, "comm": {"timeout": 3}, "run": {"device": "cpu"}}
    model = meshwright.wrap(nn.Linear(4, 4), config, loss=mean)
    for step in range(2):
        if step and mesh.rank == sleeper:
            time.sleep(60)
        model.step({"x": torch.ones(2, 4)})
    model.close()


def test_a_loop_of_one_s_own_that_hangs_ends_with_a_sentence(tmp_path: Path) -> None:
    ends = run_hanging(2, wrapped, tmp_path, 1, timeout=25.0)
    said = "".join(end.stderr for end in ends)
    assert [end.code for end in ends] == [EXIT_CODE] * 2, said
    assert "did not end within 3 s on rank 0; rank 1 did not arrive: it is outside any collective" in said


def test_a_loop_of_one_s_own_ends_silently(tmp_path: Path) -> None:
    ends = run_hanging(2, wrapped, tmp_path, -1, timeout=25.0)
    assert [(end.code, end.stderr) for end in ends] == [(0, "")] * 2
