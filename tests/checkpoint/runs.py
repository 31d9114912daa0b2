"""Runs of `pretrain` on ranks that a test may kill.

A test kills a rank from outside at any moment, or plants a crash: the rank then kills itself at one of its calls that
change the file system (in the middle of a save, of a rename, of a line).
"""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.record import checkpoint_format as fmt
from meshwright.record.verify import verify_checkpoint
from tests.support.oracle import made_for, small_config
from tests.support.ranks import _SERVER, _child
from tests.support.waiting import HANG_S, until

Sections = dict[str, dict[str, Any]]

TIMES = ("step_time_s", "tokens_per_s", "phases", "time", "tflops", "mfu", "exposed_s", "ranks", "memory")
# The functions of `os` that change the file system and at which a rank may kill itself.
CHANGES = ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir")


@dataclass(frozen=True)
class Crash:
    """A planted crash: `rank` kills itself at its n-th change of the file system, with n = `call`.

    `when` is "before", "after" or "half" (of the file that is being written). With "last validation" the rank instead
    kills itself when it is about to validate the last step, after the checkpoint of that step is committed.
    """

    rank: int
    call: int
    when: str


def tiny(folder: Path, **sections: dict[str, Any]) -> Sections:
    """Return the config of a run: a model of a few hundred parameters, with dropout, and a checkpoint at every step."""
    base: Sections = {
        "model": {"layers": 2, "hidden": 16, "heads": 2, "vocab": 31, "seq": 8, "dropout": 0.1},
        "train": {"precision": "fp32", "global_batch": 8, "micro_batch": 1, "steps": 8},
        "optimizer": {"lr": 1e-2},
        "lr": {"warmup": 2},
        "checkpoint": {"every": 1, "keep": 2},
        "run": {"dir": str(folder), "tensorboard": False, "device": "cpu", "eval_every": 4, "eval_samples": 8},
    }
    for name, keys in sections.items():
        base[name] = base.get(name, {}) | keys
    return base


def train(rank: int, world: int, sections: Sections, crash: Crash | None, source: str | None) -> tuple[int, int]:
    """Train a whole run on one rank, as the command does. Return the last step and the number of samples consumed."""
    from meshwright.engine.datasets import datasets_of
    from meshwright.engine.providers import forward_step, model_provider
    from meshwright.run.pretrain import pretrain

    if crash is not None and crash.rank == rank:
        _plant(crash)
    config = small_config(**sections)
    made = made_for(config)
    files = "data" in sections
    trainer = pretrain(
        config, model_provider, lambda ctx, n: datasets_of(config) if files else (made, made, None), forward_step,
        source=source,
    )  # fmt: skip
    return trainer.step_number, trainer.consumed


def _plant(crash: Crash) -> None:
    """Patch this process so that it kills itself as `crash` says."""
    import meshwright.checkpoint.tensor_file as tensor_file
    import meshwright.record.run_folder as run_folder

    count = 0

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if crash.when == "last validation":
        _plant_in_validation(die)
        return

    def counted(call: Callable[..., Any], half: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Wrap a function that changes the file system. `half` does half of its work."""

        def changed(*args: Any, **more: Any) -> Any:
            nonlocal count
            count += 1
            dies_now = count == crash.call
            if dies_now and crash.when == "half" and half is not None:
                half(*args, **more)
            if dies_now and crash.when != "after":
                die()
            try:
                return call(*args, **more)
            finally:
                if dies_now:
                    die()

        return changed

    real_save, real_write = tensor_file.write_tensors, run_folder.RunFolder._write

    def half_save(path: Path, *contents: Any) -> None:
        real_save(path, *contents)
        os.truncate(path, path.stat().st_size // 2)

    def half_write(folder: Any, file: Any, line: dict[str, Any], *charted: Any) -> None:
        file.write(json.dumps(line)[: len(json.dumps(line)) // 2])
        file.flush()

    for name in CHANGES:
        setattr(os, name, counted(getattr(os, name)))
    tensor_file.write_tensors = counted(real_save, half_save)
    run_folder.RunFolder._write = counted(real_write, half_write)


def _plant_in_validation(die: Callable[[], None]) -> None:
    """Patch the validation of the last step: wait for the step's checkpoint, then die."""
    from meshwright.engine.step import Trainer

    real = Trainer.validate

    def validate(trainer: Trainer) -> Any:
        config = trainer.ctx.config
        if trainer.step_number < config.train.steps:
            return real(trainer)
        until(lambda: trainer.step_number in saved(Path(config.run.dir)))
        die()

    Trainer.validate = validate  # type: ignore[method-assign]


class Attempt:
    """A set of rank processes that train `sections` until they finish or one of them dies."""

    def __init__(self, world: int, sections: Sections, crash: Crash | None = None, source: str | None = None) -> None:
        self.world, self.run = world, Path(sections["run"]["dir"])
        self._folder = tempfile.mkdtemp()
        self._pipes, self.ranks = [], []
        for rank in range(world):
            ours, theirs = _SERVER.Pipe(duplex=False)
            args = (train, rank, world, self._folder, (sections, crash, source), theirs)
            process = _SERVER.Process(target=_child, args=args, daemon=True)
            process.start()
            # Close our copy of the writing end: otherwise the death of the rank would not give an EOFError here.
            theirs.close()
            self._pipes.append(ours)
            self.ranks.append(process)

    def kill(self, rank: int) -> None:
        os.kill(self.ranks[rank].pid, signal.SIGKILL)

    def until(self, ready: Callable[[], bool], deadline: float = HANG_S) -> bool:
        """Wait until `ready()` is true. Return False if a rank finished or died first."""
        end = time.monotonic() + deadline
        while not ready():
            assert time.monotonic() < end, "the ranks make no progress"
            # A rank sends nothing before its result or error. A dead rank's pipe is readable as well.
            if any(pipe.poll() for pipe in self._pipes):
                return False
            time.sleep(0.002)
        return True

    def finish(self, deadline: float = HANG_S) -> list[Any] | None:
        """Return the results of all ranks, or None if one of them was killed. No rank is left running."""
        results: dict[int, Any] = {}
        end = time.monotonic() + deadline
        try:
            while len(results) < self.world:
                waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in results}
                ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
                assert ready, "the ranks make no progress"
                pipe: Any
                for pipe in ready:
                    try:
                        kind, value = pipe.recv()
                    except EOFError:
                        return None
                    if kind == "error":
                        # A rank also raises when another one dies in the middle of a collective.
                        if self._was_killed():
                            return None
                        raise AssertionError(value)
                    results[waiting[pipe]] = value
            return [results[rank] for rank in range(self.world)]
        finally:
            self.stop()

    def _was_killed(self) -> bool:
        """Return whether a rank was killed. Other ranks may notice its death before this process does."""
        # Only a failing test waits this long.
        end = time.monotonic() + 20.0
        while time.monotonic() < end:
            if any(process.exitcode == -signal.SIGKILL for process in self.ranks):
                return True
            time.sleep(0.01)
        return False

    def stop(self) -> None:
        for process in self.ranks:
            if process.is_alive():
                process.kill()
            process.join()
        shutil.rmtree(self._folder, ignore_errors=True)


def complete(world: int, sections: Sections, source: str | None = None) -> Path:
    """Train to the end and return the run's folder."""
    attempt = Attempt(world, sections, source=source)
    assert attempt.finish() is not None
    return attempt.run


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file whose writer may have been killed in the middle of a line."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def timeless(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file without the values that depend on the speed of the machine."""
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines(path)]


def steps(run: Path) -> list[int]:
    return [line["step"] for line in whole_lines(run / "metrics.jsonl")]


def saved(run: Path) -> list[int]:
    return [step for step, _ in fmt.list_checkpoints(run / "checkpoints")]


def ended(run: Path, last: int) -> bool:
    """Return whether a run is complete: its last step is saved and validated."""
    return last in saved(run) and last in [line["step"] for line in whole_lines(run / "validation.jsonl")]


def newest(run: Path) -> Path:
    return fmt.list_checkpoints(run / "checkpoints")[-1][1]


def tensors(path: Path) -> dict[str, np.ndarray]:
    """Return every tensor of a checkpoint, assembled from its blocks. All checksums are verified."""
    from meshwright.checkpoint.load import Reader

    reader = Reader(path)
    verify_checkpoint(path, reader.index)
    whole, covered = {}, {}
    for name, tensor in reader.index.tensors.items():
        whole[name] = np.zeros(tensor["shape"], dtype=tensor["dtype"])
        covered[name] = np.zeros(tensor["shape"], dtype=np.int64)
    for block in reader.index.blocks:
        at = tuple(slice(a, a + n) for a, n in zip(block.start, block.shape, strict=True))
        whole[block.tensor][at] = reader.block(block).numpy()
        covered[block.tensor][at] += 1
    assert all((count == 1).all() for count in covered.values()), "each element is written once"
    return whole


def assert_same(run: Path, reference: Path) -> None:
    """Assert that two finished runs are bit-identical.

    The metrics must agree apart from times, and the last checkpoints in all tensors and counters.
    """
    for name in ("metrics.jsonl", "validation.jsonl"):
        assert timeless(run / name) == timeless(reference / name), name
    ours, theirs = newest(run), newest(reference)
    assert ours.name == theirs.name
    a, b = fmt.read_index(ours), fmt.read_index(theirs)
    assert (a.step, a.consumed, a.state) == (b.step, b.consumed, b.state)
    mine, other = tensors(ours), tensors(theirs)
    assert mine.keys() == other.keys()
    for name, values in mine.items():
        assert values.dtype == other[name].dtype and values.tobytes() == other[name].tobytes(), name
