"""Tests of everyday handling of runs: two runs at once, a killed launcher, Ctrl-C, a closed terminal; and the messages.

The promises of an everyday run, and the tests that check them (a test without a file is in this one):

| promise | tests |
|---|---|
| a run folder has one owner, under every launcher | `test_a_second_run_in_the_same_folder_is_refused` |
| also if many runs start at once | `tests/record/test_run_owner.py::test_of_many_that_start_at_once_one_owns_the_folder` |
| the next run takes over from a dead owner | `tests/record/test_run_owner.py::test_a_dead_owner_is_followed_with_a_sentence` |
| ranks have names and end with their launcher | `test_ranks_have_names_and_end_when_their_launcher_is_killed` |
| ranks end with the process they were forked from | `test_ranks_end_with_the_process_that_they_were_forked_from` |
| Ctrl-C, SIGHUP and a time limit save the run | `test_what_is_trained_is_saved_however_a_run_is_stopped` |
| SIGTERM saves the run | `tests/checkpoint/test_commands.py::test_eight_ranks_asked_to_stop` |
| a second Ctrl-C names the lost steps | `test_a_second_ctrl_c_ends_at_once_and_says_what_is_lost` |
| the default is a save every 15 minutes, adapted to its cost | `tests/launch/test_elastic.py::test_auto_saves_as_young_and_daly_say` |
| the first line comes at once; a wait for ranks is reported | `test_the_first_line_comes_at_once_and_missing_ranks_are_waited_for_aloud` |
| the first line comes before slow imports | `tests/cli/test_first_steps.py::test_a_run_speaks_before_it_loads_what_it_may_not_need` |
| a run says at which step it continues and stopped | `test_ranks_have_names_and_end_when_their_launcher_is_killed` |
| a restart says which rank ended, why, and how many restarts are left | `tests/checkpoint/test_commands.py::test_restarts` |
| only the first of several nodes prints | `tests/cli/test_train_command.py::test_the_same_losses_under_torchrun_and_in_one_process` |
| the tokenizer stays with the run when it moves | `tests/checkpoint/test_companions.py::test_text_goes_in_and_out_wherever_the_run_is` |
| imported files stay with the model; data of another tokenizer are refused | `tests/checkpoint/test_companions.py::test_what_was_imported_stays_with_the_model` |
| `--eod 2` is an id, not text | `tests/data/test_tokenizers.py::test_an_end_token_must_be_found` |
| memory is checked before ranks start | `tests/cli/test_fits.py::test_what_can_not_fit_is_refused_and_what_may_not_is_told` |
| the suggested settings fit | `tests/cli/test_fits.py::test_what_is_named_fits` |
| running out of memory gives one sentence | `tests/cli/test_fits.py::test_running_out_of_memory_is_one_sentence` |
| users' own models: have the configured precision | `tests/run/test_pretrain.py::test_the_precision_is_that_of_an_own_model_too` |
| users' own models: ranks that would all compute the same are refused | `tests/run/test_pretrain.py::test_ranks_that_would_all_compute_the_same_are_refused` |
| users' own models: weights are gathered whole | `tests/run/test_pretrain.py::test_the_weights_of_an_own_model_are_gathered_whole` |
| plans: usual precision | `tests/plan/test_defaults.py::test_a_config_that_names_no_precision_is_planned_in_the_usual_one` |
| plans: some memory stays free, equal rows are shown once | `tests/plan/test_defaults.py::test_some_memory_stays_free`, `test_rows_that_look_the_same_are_shown_once` |
| plans: a config.json is a model | `tests/plan/test_defaults.py::test_a_config_json_is_a_model` |
| plans: hints by meaning, a missing batch size is asked for | `tests/plan/test_defaults.py::test_hints_go_by_meaning`, `test_cost_asks_for_a_batch` |
| the validation split is drawn from all over the inputs | `tests/data/test_stream.py::test_a_split_is_drawn_from_all_over_a_file` |
| validation by source uses the same samples | `tests/run/test_sources.py::test_validation_by_source_is_of_the_same_samples` |
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
    """One of two runs that start at once is refused, though both may find the folder free before they start ranks."""
    begun = [begin(start, launcher) for _ in range(2)]
    waiting.until(lambda: any(process.poll() is not None for process in begun), why="both train")
    refused = next(process for process in begun if process.poll() is not None)
    trains = next(process for process in begun if process is not refused)
    code, output = ended(refused)
    assert code != 0 and output.count("belongs to a run that is still training (process") == 1, output
    assert code == 2 or launcher == "torchrun"
    until(lambda: len(steps(folder / "run")) >= 3, trains)
    code, output = ended(start("--nproc", "2"))
    assert code == 2 and "still training" in output and "Traceback" not in output
    os.killpg(trains.pid, signal.SIGTERM)
    code, output = ended(trains)
    # torchrun never exits with code 0 after SIGTERM.
    assert code == 0 or launcher == "torchrun", output
    done = steps(folder / "run")
    assert done == list(range(1, len(done) + 1)) and saved(folder / "run")[-1] == done[-1]


def named(run: str) -> dict[int, str]:
    """Return the processes that `ps` shows as ranks of a run: their names by process id."""
    listing = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    words = [line.split() for line in listing.splitlines()]
    return {int(pid): " ".join(name) for pid, *name in words if name[:2] == ["meshwright", "rank"] and name[-1] == run}


@pytest.mark.skipif(sys.platform != "linux", reason="the names of processes")
@pytest.mark.parametrize("launcher", ["meshwright", pytest.param("torchrun", marks=pytest.mark.wide)])
def test_ranks_have_names_and_end_when_their_launcher_is_killed(launcher: str, folder: Path, start: Any) -> None:
    """Ranks end when their launcher is killed, and the next run continues.

    Until then a second run is refused. The next run names the process that it takes over from and the step that it
    continues from. One Ctrl-C saves it.
    """
    name = f"own-run-{os.getpid()}"
    process = begin(start, launcher, f"run.dir={name}", "checkpoint.every=0.5s")
    run = folder / name
    until(lambda: saved(run), process)
    code, said = ended(start("--nproc", "2", f"run.dir={name}"))
    assert code == 2 and f"run.dir={name} belongs to a run that is still training (process" in said, said
    assert sorted(named(name).values()) == [f"meshwright rank {rank}/2 {name}" for rank in (0, 1)]
    # The kernel's name of a rank is one word: Slurm's linuxproc plugin can't signal a process with a space in its name.
    assert all(" " not in Path(f"/proc/{pid}/comm").read_text().strip() for pid in named(name))
    os.kill(process.pid, signal.SIGKILL)
    waiting.until(lambda: not named(name), why="ranks outlived their launcher")
    code, said = ended(process)
    reached, done = saved(run)[-1], steps(run)[-1]

    process = start("--nproc", "1", f"run.dir={name}", "checkpoint.every=auto")
    until(lambda: steps(run)[-1:] > [done + 2], process)
    os.killpg(process.pid, signal.SIGINT)
    code, said = ended(process)
    # On a busy machine the first step takes long enough for a message about it.
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
    """It ends during a long step and saves nothing."""
    process = start("--nproc", str(ranks), "checkpoint.every=0", "train.global_batch=800")
    until(lambda: len(steps(folder / "run")) >= 1, process)
    os.killpg(process.pid, signal.SIGINT)
    # The second Ctrl-C of a person comes later than a signal that the launcher passes on to its ranks.
    time.sleep(1.0)
    os.killpg(process.pid, signal.SIGINT)
    code, output = ended(process)
    done = steps(folder / "run")[-1]
    assert code == 130, output
    lost = "step 1 is lost" if done == 1 else f"steps 1 to {done} are lost"
    assert f"stopped at once at step {done} of 100000" in output and lost in output, output
    assert "death signal" not in output, output
    assert "Traceback" not in output and saved(folder / "run") == []


@pytest.mark.wide
@pytest.mark.parametrize(("ranks", "number"), [(1, "SIGHUP"), (2, "SIGHUP"), (2, "SIGINT"), (2, "limit")])
def test_what_is_trained_is_saved_however_a_run_is_stopped(ranks: int, number: str, folder: Path, start: Any) -> None:
    words = ["run.time_limit=3s"] if number == "limit" else []
    process = start("--nproc", str(ranks), "checkpoint.every=auto", *words)
    if number != "limit":
        until(lambda: len(steps(folder / "run")) >= 3, process)
        # A terminal signals all processes of the group.
        os.killpg(process.pid, signal.Signals[number])
    code, output = ended(process)
    done = steps(folder / "run")
    assert code == 0 and saved(folder / "run") == [done[-1]], output
    assert output.count("saves after this step") == 1 and f"stopped at step {done[-1]} of 100000" in output, output


@pytest.mark.wide
def test_a_run_that_ignores_hangups_goes_on(folder: Path, start: Any) -> None:
    """A run that starts with SIGHUP ignored, as under nohup, continues after a hangup."""
    ignore = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    process = start("--nproc", "2", "train.steps=60", "checkpoint.every=0", preexec_fn=ignore)
    until(lambda: len(steps(folder / "run")) >= 3, process)
    os.killpg(process.pid, signal.SIGHUP)
    code, output = ended(process)
    assert code == 0 and "finished 60 steps" in output, output


@pytest.mark.wide
def test_the_first_line_comes_at_once_and_missing_ranks_are_waited_for_aloud(folder: Path, start: Any) -> None:
    """A rank that another launcher started alone prints its first line, and then how many ranks are missing."""
    port = str(reserved_port())
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": "0"}
    process = start(env=env)
    assert process.stderr.readline() == f"starts {folder / 'run'} with 2 ranks, 100,000 steps\n"
    assert process.stderr.readline().startswith(f"waiting for 1 of 2 ranks at 127.0.0.1:{port}, ")
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == -signal.SIGINT


def forked_from(launcher: int) -> int:
    """Return the id of the process that a launcher's ranks are forked from."""
    command = ["ps", "-o", "pid=,args=", "--ppid", str(launcher)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True)
    return next(int(line.split()[0]) for line in listing.stdout.splitlines() if "forkserver" in line)


@pytest.mark.wide
@pytest.mark.skipif(sys.platform != "linux", reason="ranks end with their parent where the kernel sees to it")
def test_ranks_end_with_the_process_that_they_were_forked_from(folder: Path, start: Any) -> None:
    """All ranks end when the process that they were forked from is killed.

    A restart forks its ranks from a new process. With no restart left the command ends. TMPDIR is a path that is too
    long for a socket, which must not matter.
    """
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
    code, output = ended(process)
    assert code == 1 and "Traceback" not in output, output
    assert output.count("or the process that it was forked from was killed") == 2, output
    done = steps(folder / name)
    assert done == list(range(1, len(done) + 1)), "each step once"
    assert not list(deep.glob("meshwright-*")), "temporary files are left behind"
