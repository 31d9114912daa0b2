"""Runs as people handle them: two at once, a launcher that is killed, Ctrl-C, a closed terminal; and what they say.

What an everyday run promises, and the tests that hold it (those without a file are in this one):

| promise | tests |
|---|---|
| one run has one owner, under every launcher | `test_a_second_run_in_the_same_folder_is_refused` |
| of many that start at once too | `tests/record/test_run_owner.py::test_of_many_that_start_at_once_one_owns_the_folder` |
| a dead owner is followed | `tests/record/test_run_owner.py::test_a_dead_owner_is_followed_with_a_sentence` |
| ranks have names and end with a launcher | `test_ranks_have_names_and_end_when_their_launcher_is_killed` |
| and with the process they were forked from | `test_ranks_end_with_the_process_that_they_were_forked_from` |
| Ctrl-C, SIGHUP and a time limit save | `test_what_is_trained_is_saved_however_a_run_is_stopped` |
| SIGTERM saves | `tests/checkpoint/test_commands.py::test_eight_ranks_asked_to_stop` |
| a second Ctrl-C says what is lost | `test_a_second_ctrl_c_ends_at_once_and_says_what_is_lost` |
| by default a save every 15 minutes, by its cost | `tests/launch/test_elastic.py::test_auto_saves_as_young_and_daly_say` |
| the first line comes at once; waiting is said | `test_the_first_line_comes_at_once_and_missing_ranks_are_waited_for_aloud` |
| and before what takes long is loaded | `tests/cli/test_first_steps.py::test_a_run_speaks_before_it_loads_what_it_may_not_need` |
| where a run goes on, where it stopped | `test_ranks_have_names_and_end_when_their_launcher_is_killed` |
| restarts: which rank, why, how often | `tests/checkpoint/test_commands.py::test_restarts` |
| of several nodes the first speaks | `tests/cli/test_train_command.py::test_the_same_losses_under_torchrun_and_in_one_process` |
| the tokenizer is with the run wherever it is | `tests/checkpoint/test_companions.py::test_text_goes_in_and_out_wherever_the_run_is` |
| what came with a model stays; foreign data | `tests/checkpoint/test_companions.py::test_what_was_imported_stays_with_the_model` |
| `--eod 2` is no text | `tests/data/test_tokenizers.py::test_an_end_token_must_be_found` |
| memory is compared before ranks start | `tests/cli/test_fits.py::test_what_can_not_fit_is_refused_and_what_may_not_is_told` |
| what is named fits | `tests/cli/test_fits.py::test_what_is_named_fits` |
| out of memory is a sentence | `tests/cli/test_fits.py::test_running_out_of_memory_is_one_sentence` |
| own models have the precision | `tests/run/test_pretrain.py::test_the_precision_is_that_of_an_own_model_too` |
| are not computed twice | `tests/run/test_pretrain.py::test_ranks_that_would_all_compute_the_same_are_refused` |
| are gathered whole | `tests/run/test_pretrain.py::test_the_weights_of_an_own_model_are_gathered_whole` |
| plans: usual precision | `tests/plan/test_defaults.py::test_a_config_that_names_no_precision_is_planned_in_the_usual_one` |
| plans: margin, no twins | `tests/plan/test_defaults.py::test_some_memory_stays_free`, `test_rows_that_look_the_same_are_shown_once` |
| plans: config.json | `tests/plan/test_defaults.py::test_a_config_json_is_a_model` |
| plans: hints, a batch is asked for | `tests/plan/test_defaults.py::test_hints_go_by_meaning`, `test_cost_asks_for_a_batch` |
| the split is drawn from all inputs | `tests/data/test_stream.py::test_a_split_is_drawn_from_all_over_a_file` |
| validation by source | `tests/run/test_sources.py::test_validation_by_source_is_of_the_same_samples` |
"""  # noqa: E501 (a table)

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import saved, steps
from tests.support import waiting
from tests.support.commands import ended, torchrun
from tests.support.ports import reserved_port
from tests.support.waiting import until


def begin(start: Any, launcher: str, *words: str) -> subprocess.Popen[str]:
    if launcher == "torchrun":
        return start(*words, launcher=torchrun(2))  # type: ignore[no-any-return]
    return start(*words, "--nproc", "2" if launcher == "meshwright" else "1")  # type: ignore[no-any-return]


@pytest.mark.wide
@pytest.mark.parametrize("launcher", ["alone", "meshwright", "torchrun"])
def test_a_second_run_in_the_same_folder_is_refused(launcher: str, folder: Path, start: Any) -> None:
    """Also one that finds the folder free before it starts its ranks, since both start at once."""
    begun = [begin(start, launcher) for _ in range(2)]
    waiting.until(lambda: any(process.poll() is not None for process in begun), why="both train")
    refused = next(process for process in begun if process.poll() is not None)
    trains = next(process for process in begun if process is not refused)
    code, said = ended(refused)
    assert code != 0 and said.count("belongs to a run that is still training (process") == 1, said
    assert code == 2 or launcher == "torchrun"
    until(lambda: len(steps(folder / "run")) >= 3, trains)
    code, said = ended(start("--nproc", "2"))
    assert code == 2 and "still training" in said and "Traceback" not in said
    os.killpg(trains.pid, signal.SIGTERM)
    code, said = ended(trains)
    assert code == 0 or launcher == "torchrun", said  # whose own exit code is never 0 then
    done = steps(folder / "run")
    assert done == list(range(1, len(done) + 1)) and saved(folder / "run")[-1] == done[-1]


def named(run: str) -> dict[int, str]:
    """The processes that are called ranks of a run, as `ps` shows them."""
    told = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    words = [line.split() for line in told.splitlines()]
    return {int(pid): " ".join(name) for pid, *name in words if name[:2] == ["meshwright", "rank"] and name[-1] == run}


@pytest.mark.skipif(sys.platform != "linux", reason="the names of processes")
@pytest.mark.parametrize("launcher", ["meshwright", pytest.param("torchrun", marks=pytest.mark.wide)])
def test_ranks_have_names_and_end_when_their_launcher_is_killed(launcher: str, folder: Path, start: Any) -> None:
    """Nobody else trains beside them. The run that is started next says whose place it takes and where it goes on; one
    Ctrl-C, and it is saved."""
    name = f"own-run-{os.getpid()}"
    process = begin(start, launcher, f"run.dir={name}", "checkpoint.every=0.5s")
    run = folder / name
    until(lambda: saved(run), process)
    code, said = ended(start("--nproc", "2", f"run.dir={name}"))
    assert code == 2 and f"run.dir={name} belongs to a run that is still training (process" in said, said
    assert sorted(named(name).values()) == [f"meshwright rank {rank}/2 {name}" for rank in (0, 1)]
    # One word to the kernel: Slurm's linuxproc plugin does not find a process with a space in its name to signal it.
    assert all(" " not in Path(f"/proc/{pid}/comm").read_text().strip() for pid in named(name))
    os.kill(process.pid, signal.SIGKILL)
    waiting.until(lambda: not named(name), why="ranks outlived their launcher")
    code, said = ended(process)
    reached, done = saved(run)[-1], steps(run)[-1]

    process = start("--nproc", "1", f"run.dir={name}", "checkpoint.every=auto")
    until(lambda: steps(run)[-1:] > [done + 2], process)
    os.killpg(process.pid, signal.SIGINT)
    code, said = ended(process)
    # A busy machine computes the first step so long that it is said.
    others = ("step", "validation", "meshwright ", "    ", "computing the first step")
    told = [line for line in said.splitlines() if not line.startswith(others)]
    last = steps(run)[-1]
    assert code == 0 and len(told) == 5, said
    assert told[0] == f"continues {name}, up to step 100000"
    assert told[1].startswith(f"{name} was left by a run that is gone (process ")
    assert told[2] == f"continues {name} from step {reached} of 100000, checkpoint verified"
    assert told[3].startswith("asked to stop: saves after this step (Ctrl-C again stops at once")
    assert told[4].startswith(f"stopped at step {last} of 100000, {last - reached} steps in ")
    assert "run the same command" in told[4]
    assert saved(run)[-1] == last


@pytest.mark.wide
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_ctrl_c_ends_at_once_and_says_what_is_lost(ranks: int, folder: Path, start: Any) -> None:
    """Though a step takes long, and with nothing saved since."""
    process = start("--nproc", str(ranks), "checkpoint.every=0", "train.global_batch=800")
    until(lambda: len(steps(folder / "run")) >= 1, process)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(1.0)  # a terminal's second Ctrl-C: later than one that is passed on
    os.killpg(process.pid, signal.SIGINT)
    code, said = ended(process)
    done = steps(folder / "run")[-1]
    assert code == 130, said
    lost = "step 1 is lost" if done == 1 else f"steps 1 to {done} are lost"
    assert f"stopped at once at step {done} of 100000" in said and lost in said and "death signal" not in said, said
    assert "Traceback" not in said and saved(folder / "run") == []


@pytest.mark.wide
@pytest.mark.parametrize(("ranks", "number"), [(1, "SIGHUP"), (2, "SIGHUP"), (2, "SIGINT"), (2, "limit")])
def test_what_is_trained_is_saved_however_a_run_is_stopped(ranks: int, number: str, folder: Path, start: Any) -> None:
    words = ["run.time_limit=3s"] if number == "limit" else []
    process = start("--nproc", str(ranks), "checkpoint.every=auto", *words)
    if number != "limit":
        until(lambda: len(steps(folder / "run")) >= 3, process)
        os.killpg(process.pid, signal.Signals[number])  # as a terminal does
    code, said = ended(process)
    done = steps(folder / "run")
    assert code == 0 and saved(folder / "run") == [done[-1]], said
    assert said.count("saves after this step") == 1 and f"stopped at step {done[-1]} of 100000" in said, said


@pytest.mark.wide
def test_a_run_that_ignores_hangups_goes_on(folder: Path, start: Any) -> None:
    """As with nohup."""
    ignore = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    process = start("--nproc", "2", "train.steps=60", "checkpoint.every=0", preexec_fn=ignore)
    until(lambda: len(steps(folder / "run")) >= 3, process)
    os.killpg(process.pid, signal.SIGHUP)
    code, said = ended(process)
    assert code == 0 and "finished 60 steps" in said, said


@pytest.mark.wide
def test_the_first_line_comes_at_once_and_missing_ranks_are_waited_for_aloud(folder: Path, start: Any) -> None:
    """A rank that another launcher started alone."""
    port = str(reserved_port())
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": "0"}
    process = start(env=env)
    assert process.stderr.readline() == f"starts {folder / 'run'} with 2 ranks, 100,000 steps\n"
    assert process.stderr.readline().startswith(f"waiting for 1 of 2 ranks at 127.0.0.1:{port}, ")
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == -signal.SIGINT


def forked_from(launcher: int) -> int:
    """The process from which a launcher's ranks are forked."""
    command = ["ps", "-o", "pid=,args=", "--ppid", str(launcher)]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    return next(int(line.split()[0]) for line in told.stdout.splitlines() if "forkserver" in line)


@pytest.mark.wide
@pytest.mark.skipif(sys.platform != "linux", reason="ranks end with their parent where the kernel sees to it")
def test_ranks_end_with_the_process_that_they_were_forked_from(folder: Path, start: Any) -> None:
    """All of them at once. A restart goes on with another one; without, all is over soon. The folder for temporary
    files is too deep for the path of a socket."""
    name = f"own-run-{os.getpid()}"
    deep = folder / ("deep" * 40)
    deep.mkdir()
    words = ("--nproc", "2", f"run.dir={name}", "checkpoint.every=2", "--restarts", "1")
    process = start(*words, env={"TMPDIR": str(deep)})
    for done in (4, 8):
        until(lambda done=done: steps(folder / name)[-1:] > [done], process)
        ranks = set(named(name))
        os.kill(forked_from(process.pid), signal.SIGKILL)
        waiting.until(
            lambda ranks=ranks: not ranks & set(named(name)),  # type: ignore[misc]
            why="ranks outlived the process that they were forked from",
        )
    code, said = ended(process)
    assert code == 1 and "Traceback" not in said, said
    assert said.count("or the process that it was forked from was killed") == 2, said
    done = steps(folder / name)
    assert done == list(range(1, len(done) + 1)), "each step once"
    assert not list(deep.glob("meshwright-*")), "nothing is left behind"
