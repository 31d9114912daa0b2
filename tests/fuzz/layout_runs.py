"""Runs a case in forks of one warm process and compares its files with those of a reference run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import meshwright.run.pretrain as pretraining
from meshwright.check.made_samples import MadeAnswers
from meshwright.checkpoint.load import Reader
from meshwright.cli.main import main
from meshwright.config.load import config_from, dump_yaml, to_mapping
from meshwright.engine.hooks import Hook
from meshwright.engine.providers import forward_step, model_provider
from meshwright.errors import UserError
from tests.fuzz.layout_cases import SHARING, STEPS, Case, Sections, merged
from tests.support.advice import advised
from tests.support.oracle import made_for

DEADLINE_S = 120.0
COMPILING_S = 600.0  # the deadline where blocks are compiled, since g++ is slow
GRACE_S = 5.0  # how long the other ranks may take to end after one has failed
EXACT = 1e-9  # relative to a tensor's largest element; fp64 runs agree to 1e-12
FLOOR = 1e-13  # absolute: gradients that are zero in theory, such as a key's bias, differ by less
ADVICE = 4  # the most refusals of one case whose advice is followed
STOP_AT = 2  # the last step of an interrupted run


class Outcome(NamedTuple):
    """The end of a run of some ranks: ok, refused (with its sentence), stopped, traceback or hang."""

    how: str
    text: str = ""


class _StopAt(Hook):
    """A hook that asks its own rank to stop while it computes a step, as an operator would."""

    def before(self, step: int) -> None:
        if step == STOP_AT:
            os.kill(os.getpid(), signal.SIGTERM)


def _samples(config: Any) -> Any:
    if config.objective in ("preference", "chat"):
        judged = config.objective == "preference" and config.tune.loss == "kto"
        return MadeAnswers(config.model.vocab, config.model.seq, judged)
    made = {"segments": True} if config.objective == "causal" and config.data.reset_attention else {}
    return made_for(config, **made)


def _train(sections: Sections, stops: bool) -> None:
    config = config_from(sections)
    made = _samples(config)
    hooks = [_StopAt()] if stops and (not dist.is_initialized() or dist.get_rank() == 0) else []
    pretraining.pretrain(config, model_provider, lambda ctx, n: (made, made, None), forward_step, hooks=hooks)


def _rank(rank: int, world: int, folder: Path, body: Any, args: tuple[Any, ...]) -> int:
    """Run one rank in this process, which is a fork, and return its exit code."""
    output = os.open(folder / f"out-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 (open as long as the process lives)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    code, text = 0, ""
    try:
        if world > 1:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        code = body(*args) or 0
    except UserError as error:
        code, text = 2, str(error)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
        text = "" if isinstance(ended.code, int) else str(ended.code)
    except BaseException:
        code, text = 1, traceback.format_exc()
    # Other processes look for the final name, and must never see half a file.
    (folder / f"end-{rank}.tmp").write_text(json.dumps([code, text]))
    os.rename(folder / f"end-{rank}.tmp", folder / f"end-{rank}")
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def run_forks(world: int, folder: Path, body: Any, *args: Any) -> Outcome:
    """Run `body(*args)` on `world` forked ranks, which meet through a file, and return how they ended."""
    compiles = isinstance(args[0], dict) and args[0]["train"].get("compile")
    deadline = COMPILING_S if compiles else DEADLINE_S
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    children: dict[int, int] = {}
    for rank in range(world):
        if (child := os.fork()) == 0:
            code = 1
            try:
                code = _rank(rank, world, folder, body, args)
            finally:
                # A rank that exits while others still connect their groups would make them fail.
                _wait_for_others(folder, world, code)
                os._exit(code)
        children[rank] = child
    end = time.monotonic() + deadline
    codes: dict[int, int] = {}
    while len(codes) < world and time.monotonic() < end:
        for rank, child in children.items():
            if rank not in codes:
                found, status = os.waitpid(child, os.WNOHANG)
                if found:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    if codes[rank]:
                        # The others wait for the failed rank, and may not end by themselves.
                        end = min(end, time.monotonic() + GRACE_S)
        time.sleep(0.01)
    left = [rank for rank in children if rank not in codes]
    for rank in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(children[rank], signal.SIGKILL)
        os.waitpid(children[rank], 0)
    return _ended(folder, codes, left)


def _wait_for_others(folder: Path, world: int, code: int) -> None:
    end = time.monotonic() + (GRACE_S if code == 0 else 0.0)
    while time.monotonic() < end and sum((folder / f"end-{rank}").exists() for rank in range(world)) < world:
        time.sleep(0.01)


def _ended(folder: Path, codes: dict[int, int], left: list[int]) -> Outcome:
    reports = {}
    for rank in codes:
        with contextlib.suppress(OSError):
            reports[rank] = json.loads((folder / f"end-{rank}").read_text())
    sentences = [text for code, text in reports.values() if code == 2 and text]
    traces = [text for code, text in reports.values() if code == 1 and text]
    died = [f"rank {rank} ended with {code} and without a word" for rank, code in codes.items() if rank not in reports]
    # When one rank refuses, the errors of the others are consequences. Users read the sentence of the refusal.
    if sentences:
        return Outcome("refused", sentences[0])
    if traces or died:
        return Outcome("traceback", (traces or died)[0])
    if left:
        return Outcome("hang", f"ranks {left} did not end")
    return Outcome("ok" if not any(codes.values()) else "stopped", str(sorted(set(codes.values()))))


@dataclass
class Verdict:
    """The result of a case: equal, refused, TRACEBACK, MISMATCH or HANG, with an explanation."""

    word: str
    text: str = ""
    advice: int = 0  # number of refusals whose advice was followed

    @property
    def is_bad(self) -> bool:
        return self.word.isupper()


def _verdict_of(outcome: Outcome, where: str) -> Verdict:
    words = {"refused": "refused", "traceback": "TRACEBACK", "hang": "HANG", "stopped": "TRACEBACK"}
    return Verdict(words[outcome.how], f"{where}: {outcome.text}")


class Runner:
    """A runner of one case in a folder."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.sections = {name: dict(keys) for name, keys in case.sections.items()}
        self.other = case.other

    def judge(self) -> Verdict:
        """Run the case, and run it again with the advice of each refusal."""
        followed = 0
        while True:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            found = self._judge_once()
            found.advice = followed
            choices = advised(found.text) if found.word == "refused" else []
            if not choices or followed == ADVICE or not found.text.startswith("the run: "):
                return found
            followed += 1
            self.sections = merged(self.sections, choices[0])

    def _judge_once(self) -> Verdict:
        if self.case.hf:
            self.sections["model"]["hf"] = _hugging_face(self.case.hf, self.folder)
        if (base := self._base()) is not None and base.word:
            return base
        reference = self.folder / "reference"
        found = self._whole(reference) if self.case.against != "itself" else None
        if found is not None and found.how != "ok":
            return _verdict_of(found, "one process")
        ended = self._interrupted()
        if ended is not None:
            return ended
        if self.case.against == "itself":
            found = run_forks(self.case.world, self.folder / "ranks", _train, self._at(reference, True), False)
            if found.how != "ok":
                return _verdict_of(found, "a second run")
        if difference := differences(reference, self.folder / "run", exactly=self.case.against == "itself"):
            return Verdict("MISMATCH", difference)
        return self._dry() if self.case.dry else Verdict("equal")

    def _base(self) -> Verdict | None:
        """Train the weights that adapters change, in a run of one step without adapters."""
        if self.sections.get("tune", {}).get("kind", "full") == "full":
            return None
        sections = self._at(self.folder / "base", False)
        sections = {name: keys for name, keys in sections.items() if name not in ("tune", "data")}
        sections["data"] = {"prefixes": ["made"]}
        sections["train"] = {"steps": 1, "precision": "fp64"}
        sections["run"] |= {"eval_every": 0}
        found = run_forks(1, self.folder / "ranks", _train, sections, False)
        self.sections["tune"]["base"] = str(self.folder / "base")
        return None if found.how == "ok" else _verdict_of(found, "the base")

    def _at(self, run: Path, shared: bool, **more: Any) -> Sections:
        """Return the sections of a run in a folder, with the case's layout if `shared`."""
        dropped = () if shared else SHARING
        found = {name: dict(keys) for name, keys in self.sections.items() if name not in dropped}
        found["run"] = found.get("run", {}) | {"dir": str(run), "tensorboard": False, "device": "cpu"}
        found["checkpoint"] = {"every": 1, "keep": 0}
        found["train"] = {"compile": False} | found["train"] | more
        if not shared:
            found["train"].pop("server", None)
            found["train"]["compile"] = False
        return found

    def _whole(self, run: Path) -> Outcome:
        return run_forks(1, self.folder / "ranks", _train, self._at(run, False), False)

    def _interrupted(self) -> Verdict | None:
        """Run the layout with the case's interruption. Return a verdict if the run ended in another way than
        expected.
        """
        run, ranks, then = self.folder / "run", self.folder / "ranks", self.case.then
        whole = self._at(run, True)
        if then in ("same", "other"):
            found = run_forks(self.case.world, ranks, _train, whole, True)
        else:
            found = run_forks(self.case.world, ranks, _train, whole, then == "SIGTERM")
        if found.how not in (("ok", "stopped") if then else ("ok",)):
            return _verdict_of(found, "the run")
        if not then or (self.folder / "run" / "checkpoints" / f"step-{STEPS:08d}").exists():
            return None
        world, sections = self.case.world, whole
        if self.other is not None:
            world = self.other[0]
            kept = {name: keys for name, keys in whole.items() if name not in SHARING}
            sections = kept | self.other[1]
        found = run_forks(world, ranks, _train, sections, False)
        return None if found.how == "ok" else _verdict_of(found, "the resumed run")

    def _dry(self) -> Verdict:
        file = self.folder / "config.yaml"
        file.write_text(dump_yaml(to_mapping(config_from(self._at(self.folder / "dry", True)))))
        last = self.case.world - 1
        words = ["dryrun", str(file), "--devices", str(self.case.world), "--ranks", f"0,{last}"]
        found = run_forks(1, self.folder / "ranks", main, words)
        if found.how == "stopped":
            lines = (self.folder / "ranks" / "out-0").read_text().splitlines()
            differing = [line.strip() for line in lines if line.endswith("differs")]
            return Verdict("MISMATCH", f"dry run: {'; '.join(differing)[:300]}")
        return Verdict("equal") if found.how in ("ok", "refused") else _verdict_of(found, "the dry run")


def _hugging_face(family: str, folder: Path) -> str:
    from tests.models.planned_families import write_tiny

    return write_tiny(family, folder)


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics: the last one of each step and kind."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        value = json.loads(line)
        kind = "validation" if "valid_loss" in value or "validation" in value else "step"
        found[value.get("step", 0), kind] = value
    return [found[key] for key in sorted(found)]


def differences(reference: Path, run: Path, exactly: bool) -> str:
    """Return the first difference between two runs, or an empty string."""
    expected, found = metrics_of(reference), metrics_of(run)
    if len(expected) != len(found):
        return f"{len(found)} lines of metrics and not {len(expected)}"
    for theirs, ours in zip(expected, found, strict=True):
        for key in sorted(theirs.keys() & COMPARED):
            if far := _far(theirs[key], ours.get(key), exactly):
                return f"step {theirs.get('step')}: {key} {far}"
    return _weights_differ(reference, run, exactly)


COMPARED = {"loss", "grad_norm", "losses", "experts", "valid_loss", "valid_losses", "layers", "validation", "monitored"}


def _far(theirs: Any, ours: Any, exactly: bool) -> str:
    if isinstance(theirs, dict):
        keys = sorted(theirs.keys() - {"busiest_rank"})  # busiest_rank depends on ep by definition
        pairs = [(key, theirs[key], ours.get(key) if isinstance(ours, dict) else None) for key in keys]
        return next((f"{key} {far}" for key, a, b in pairs if (far := _far(a, b, exactly))), "")
    if isinstance(theirs, list):
        if not isinstance(ours, list) or len(ours) != len(theirs):
            return f"{ours} and not {theirs}"
        return next((far for a, b in zip(theirs, ours, strict=True) if (far := _far(a, b, exactly))), "")
    if not isinstance(theirs, (int, float)) or isinstance(theirs, bool):
        return ""
    if not isinstance(ours, (int, float)):
        return f"{ours} and not {theirs}"
    limit = 0.0 if exactly else EXACT * abs(theirs) + FLOOR
    return "" if abs(theirs - ours) <= limit or theirs == ours else f"{ours!r} and not {theirs!r}"


def _weights_differ(reference: Path, run: Path, exactly: bool) -> str:
    readers = [Reader(folder / "checkpoints" / f"step-{STEPS:08d}") for folder in (reference, run)]
    expected, found = (
        {name for name in reader.index.tensors if exactly or not name.startswith(("reducer.", "outer.", "replica."))}
        for reader in readers
    )
    if expected != found:
        return f"tensors {sorted(expected ^ found)[:3]} are in one checkpoint only"
    for name in sorted(expected):
        theirs, ours = (_tensor(reader, name) for reader in readers)
        if theirs.shape != ours.shape:
            return f"{name} is of shape {ours.shape} and not {theirs.shape}"
        scale = float(np.abs(theirs).max(initial=0.0))
        worst = float(np.abs(theirs - ours).max(initial=0.0))
        if not worst <= (0.0 if exactly else EXACT * scale + FLOOR):
            return f"{name} is off by {worst:.2g} of {scale:.2g}"
    return ""


def _tensor(reader: Reader, name: str) -> np.ndarray[Any, Any]:
    found = reader.index.tensors[name]
    whole = np.full(found["shape"], np.nan)
    for block in (block for block in reader.index.blocks if block.tensor == name):
        at = tuple(slice(a, a + n) for a, n in zip(block.start, block.shape, strict=True))
        whole[at] = reader.block(block).to(torch.float64).numpy()
    return whole
