"""The `meshwright` command. It imports only the module of the command that is called, so that a command without torch
starts quickly, and it reports a user's mistakes in one sentence."""

from __future__ import annotations

import argparse
import importlib
import keyword
import os
import shlex
import sys

import meshwright
from meshwright.disk import mistake_of
from meshwright.errors import UserError, begin_line, nearest
from meshwright.plugins import load_plugins

GROUPS = {
    "train and use a model": (
        "init", "doctor", "check", "train", "tune", "submit", "status", "watch", "generate", "chat", "serve", "eval",
    ),
    "data": ("data",),
    "plan and study": (
        "plan", "recipes", "clusters", "cost", "memory", "simulate", "scaling", "dryrun",
        "layout", "schedule", "config", "bench", "comm",
    ),
    "checkpoints and Hugging Face": ("inspect", "replay", "import", "export", "merge"),
    "the shell": ("completion",),
}  # fmt: skip
COMMANDS = {
    "init": "write a commented config from a few answers or flags, with a layout that fits",
    "doctor": "examine the machine and the world of ranks before a long run, and name every problem",
    "check": "train a config's small twin on its layout and on one process, and compare every gradient",
    "train": "train a model from a config, on local ranks or as one rank of torchrun or srun",
    "tune": "fine-tune a Hugging Face model on conversations: data, training and evaluation in one command",
    "submit": "write or submit a job for Slurm or Kubernetes that trains until the run is complete",
    "status": "show the state of a run on one screen: progress, goodput, faults, newest checkpoint",
    "watch": "show runs on a live page, or write it as a file to send",
    "generate": "write text with a trained or imported model",
    "chat": "talk to a model in the terminal, through its chat template",
    "serve": "answer completions and chats over HTTP, with OpenAI's interface",
    "eval": "measure a trained model's loss and perplexity on token files, or its results on lm-eval's tasks",
    "inspect": "list the contents of a checkpoint and verify every checksum",
    "replay": "compute a past step of a run again, on any layout, and compare it with the record",
    "import": "turn a Hugging Face folder into a checkpoint",
    "export": "write a run's or a checkpoint's weights as a Hugging Face folder",
    "merge": "add a run's adapters to their base model and write the result as a Hugging Face folder",
    "config": "show a config with all values resolved, or check it against a world size",
    "recipes": "list known training runs that can be started by name, with published and predicted figures",
    "clusters": "list the clusters that the planner knows, show one with its sources, or copy one to change it",
    "layout": "draw the ranks of a layout, and list every group of them",
    "schedule": "print, draw and simulate a pipeline schedule",
    "data": "turn text into token files",
    "bench": "measure a training step on this device and compare it with the least time it could take",
    "comm": "measure collectives on the groups of a layout, or what each way to communicate less saves of a step",
    "plan": "search the layouts of a model on a cluster and write the best one as a config",
    "simulate": "simulate one step of every pipeline rank, as a drawing or a trace, also with slow parts",
    "dryrun": "run a step of single ranks of any cluster, without the cluster, and compare it with the plan",
    "memory": "count the bytes of a rank by kind, for any world size",
    "scaling": "show how throughput grows with devices, by kind of parallelism",
    "cost": "predict time, communication and memory of a training step on a cluster",
    "completion": "print a script that completes commands, options and config keys in bash, zsh or fish",
}
# The commands that take key=value words, which may come before or after an option.
MIXED = {
    "comm", "check", "doctor", "layout",
    "train", "tune", "submit", "replay", "eval", "config", "plan", "simulate", "dryrun", "memory", "scaling", "cost",
}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """An argparse parser that reports a mistake in one sentence instead of the usage block."""

    def error(self, message: str) -> None:  # type: ignore[override]
        # argparse lists these words among the missing arguments although they are optional.
        message = message.replace(", key=value", "")
        raise UserError(f"{message} (see `{self.prog} --help`)")


# Columns of the help.
WIDTH = 80


def _row(name: str) -> str:
    """Return a command and its description, in lines of at most WIDTH columns."""
    lines, left = [f"  {name:<10}"], " " * 12
    for word in COMMANDS[name].split():
        if len(lines[-1]) + 1 + len(word) > WIDTH:
            lines.append(left)
        lines[-1] += f" {word}"
    return "\n".join(lines)


def usage() -> str:
    """Return the help of `meshwright` itself: all commands by group."""
    grouped = [name for names in GROUPS.values() for name in names]
    groups = {**GROUPS, "others": tuple(name for name in COMMANDS if name not in grouped)}
    rows = "\n\n".join(f"{title}:\n" + "\n".join(map(_row, names)) for title, names in groups.items() if names)
    return (
        "usage: meshwright COMMAND [options]\n\n"
        "Train transformer language models on any mesh of devices.\n\n"
        f"{rows}\n\n"
        "`meshwright COMMAND --help` explains a command and shows an example.\n\n"
        "example:\n  meshwright layout --devices 16 --tp 4 --pp 2"
    )


def run(argv: list[str]) -> int:
    """Run a command and return its exit code. Errors are raised."""
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help", "help", "--version", "version"):
        print(meshwright.__version__ if name.endswith("version") else usage())
        return 0
    if name not in COMMANDS:
        raise UserError(f"unknown command '{name}'{nearest(name, COMMANDS)}: the commands are {', '.join(COMMANDS)}")
    # A module can't be called `import`, so its file is import_.py.
    reserved = "_" if keyword.iskeyword(name) else ""
    # Plugins come first: they may register choices that a command's options list.
    load_plugins()
    module = importlib.import_module(f"meshwright.cli.{name}{reserved}")
    parser = Parser(
        prog=f"meshwright {name}", description=COMMANDS[name][0].upper() + COMMANDS[name][1:] + ".",
        epilog=module.EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    module.add_arguments(parser)
    if not getattr(module, "OWN_JSON", False):
        parser.add_argument("--json", action="store_true", help="print one JSON document")
    parse = parser.parse_intermixed_args if name in MIXED else parser.parse_args
    args = parse(argv[1:])
    args.command = shlex.join(["meshwright", *argv])
    return int(module.run(args) or 0)


def main(argv: list[str] | None = None) -> int:
    """Run a command and return the exit code: 2 for a user's mistake, 130 for Ctrl-C, else the command's own."""
    try:
        code = run(sys.argv[1:] if argv is None else argv)
        # A full disk must show up here: an error in the interpreter's own flush at exit would be no sentence.
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"meshwright: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        begin_line()
        print("meshwright: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe, such as `head`, has seen enough.
        _write_no_more()
        return 0
    except OSError as error:
        mistake = mistake_of(error)
        if mistake is None:
            raise
        print(f"meshwright: {mistake}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:
            _write_no_more()
        return 2


def _write_no_more() -> None:
    """Send the rest of the output to the null device, because it can't be written where it should go. The interpreter
    would fail on it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
