"""An option has one name and one meaning in every command."""

from __future__ import annotations

import argparse
import importlib
import keyword

import pytest

from meshwright.cli.main import COMMANDS

# These options also take a range of numbers, while the same option of other commands takes one number.
OTHERS = {("scaling", "--devices"), ("train", "--nodes")}


def parser_of(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"meshwright.cli.{name}{'_' if keyword.iskeyword(name) else ''}").add_arguments(parser)
    return parser


def options_of(name: str) -> dict[str, argparse.Action]:
    return {option: action for action in parser_of(name)._actions for option in action.option_strings}


def test_an_option_takes_the_same_kind_of_value_everywhere() -> None:
    kinds: dict[str, dict[str, str]] = {}
    for name in COMMANDS:
        for option, action in options_of(name).items():
            if (name, option) not in OTHERS:
                kind = "flag" if action.nargs == 0 else getattr(action.type, "__name__", "str")
                kinds.setdefault(option, {})[name] = kind
    differ = {option: by_command for option, by_command in kinds.items() if len(set(by_command.values())) > 1}
    assert differ == {}


@pytest.mark.parametrize("name", ["plan", "cost", "simulate", "memory", "dryrun"])
def test_planning_commands_take_the_same_options(name: str) -> None:
    options = options_of(name)
    wanted = {"--devices", "--world", "--global-batch", "--seq"} | ({"--layout"} if name != "plan" else set())
    assert wanted <= set(options)
    assert options["--devices"] is options["--world"]


@pytest.mark.parametrize("name", ["layout", "config"])
def test_devices_and_world_are_one_option(name: str) -> None:
    options = options_of(name)
    assert options["--devices"] is options["--world"]


def test_options_of_the_batch_are_keys(capsys: pytest.CaptureFixture[str]) -> None:
    from meshwright.cli.main import run

    outputs = []
    for words in (["--global-batch", "16", "--seq", "512"], ["train.global_batch=16", "model.seq=512"]):
        run(["memory", "gpt2-124m", "--devices", "4", "--layout", "tp=2", *words])
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    run(["memory", "gpt2-124m", "--devices", "4", "--layout", "tp=2", "train.global_batch=16"])
    assert capsys.readouterr().out != outputs[0]
