"""Saving and loading a checkpoint, compared with a plain torch.distributed.checkpoint save of the same tensors.

One rank with at least 500 MB of state takes both in turns on the same disk. The result has three parts: how long an
asynchronous save blocks the training loop, as a share of a synchronous one (with checksums and fsync); how much slower
the steps beside it are; and the bandwidth of saves and loads relative to torch.distributed.checkpoint (above 1: ours is
faster).

    python benchmarks/checkpoint.py
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from common import BenchParser, finish

from meshwright.checkpoint.load import Reader, complete_load, read_into
from meshwright.checkpoint.save import Saver
from meshwright.config.load import config_from
from meshwright.device import Device
from meshwright.dryrun.stand_ins import RandomTokens
from meshwright.engine.context import build_context
from meshwright.engine.providers import forward_step, model_provider
from meshwright.engine.sharding.remainders import tensors_of
from meshwright.engine.step import Trainer
from meshwright.record.checkpoint_format import folder_name
from meshwright.run.pretrain import build_modules


def make_trainer(hidden: int) -> Trainer:
    config = config_from({
        "model": {"layers": 8, "hidden": hidden, "heads": hidden // 64, "seq": 64, "vocab": 8192},
        "train": {"global_batch": 1, "steps": 10**6}, "lr": {"schedule": "constant"},
        "data": {"prefixes": ["none"]}, "run": {"device": "cpu"},
    })  # fmt: skip
    ctx = build_context(config, 0, 1, Device("cpu"))
    return Trainer(ctx, build_modules(ctx, model_provider), forward_step, RandomTokens(8192, 64))


def timed(work: Any) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def with_each_file(folder: Path, call: Callable[[int], None]) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            call(handle)
            os.close(handle)


def sync_all(folder: Path) -> None:
    """Force the files to the disk, which a plain save leaves to the system."""
    with_each_file(folder, os.fsync)


def forget(folder: Path) -> None:
    """Drop these files, which are on the disk, from the system's page cache."""
    with_each_file(folder, lambda handle: os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED))


def main() -> None:
    parser = BenchParser(__doc__)
    parser.add_argument("--hidden", type=int, default=640)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse(hidden=64, rounds=1)
    torch.set_num_threads(1)
    trainer = make_trainer(args.hidden)
    trainer.step()
    tensors = {
        f"{state.name}/{i}/{j}/{part}": tensor
        for i, state in enumerate(trainer.states())
        for j, share in enumerate(state.tensors)
        for part, tensor in enumerate(tensors_of(share))
    }
    size: int = sum(share.nbytes for share in tensors.values())
    rows: dict[str, list[float]] = {k: [] for k in ("sync", "stall", "beside", "alone", "dcp", "load", "dcp_load")}
    with tempfile.TemporaryDirectory(dir=".") as name:
        root = Path(name)
        saver = Saver(trainer, root / "ours", asynchronous=True, busy="wait", keep=0)
        for number in range(args.rounds + 1):
            found = measure(trainer, saver, tensors, root, theirs_first=number % 2 == 1)
            if number:  # the first round touches the staging memory
                for key, seconds in found.items():
                    rows[key].append(seconds)
            print(f"  round {number}/{args.rounds}", end="\r", file=sys.stderr, flush=True)
    report(rows, size, args)


def measure(
    trainer: Trainer, saver: Saver, tensors: dict[str, torch.Tensor], root: Path, theirs_first: bool
) -> dict[str, float]:
    """Run one round with every way once, and return the seconds of each.

    The loop is blocked while a save begins, and while the next update waits for it.
    """
    shutil.rmtree(root / "ours", ignore_errors=True)
    out = {"alone": timed(trainer.step)}
    saver.asynchronous = True
    blocked, wait = [], trainer.before_update
    trainer.before_update = lambda: blocked.append(timed(wait))
    blocked.append(timed(saver.save))
    out["beside"] = timed(trainer.step)
    trainer.before_update = wait
    out["stall"] = sum(blocked)
    saver.wait()
    trainer.step()
    saver.asynchronous = False
    theirs = root / "theirs"
    shutil.rmtree(theirs, ignore_errors=True)

    def load() -> None:
        reader = Reader(ours)
        read_into(trainer, reader, model_only=False)
        complete_load(trainer, reader, model_only=False)

    def plain_save() -> None:
        dcp.save(tensors, checkpoint_id=theirs, no_dist=True)
        sync_all(theirs)

    saves = {"sync": saver.save, "dcp": plain_save}
    for name in sorted(saves, reverse=not theirs_first):
        out[name] = timed(saves[name])
    ours = root / "ours" / folder_name(trainer.step_number)
    for folder in (ours, theirs):  # our writer leaves no files in the cache, so neither load may read from there
        forget(folder)
    out["load"] = timed(load)
    out["dcp_load"] = timed(lambda: dcp.load(tensors, checkpoint_id=theirs, no_dist=True))
    return out


def report(rows: dict[str, list[float]], size: int, args: argparse.Namespace) -> None:
    def ratio(over: str, under: str) -> float:
        return statistics.median(a / b for a, b in zip(rows[over], rows[under], strict=True))

    result = {
        "bytes": size, "rounds": args.rounds, "stall_share": ratio("stall", "sync"), "save_ratio": ratio("dcp", "sync"),
        "load_ratio": ratio("dcp_load", "load"), "step_beside_a_save": ratio("beside", "alone"),
    }  # fmt: skip
    print(
        f"{size / 1e6:.0f} MB, median of {args.rounds} rounds: an asynchronous save blocks the loop for "
        f"{100 * result['stall_share']:.1f} % of a synchronous one's time; the step beside it takes "
        f"{result['step_beside_a_save']:.2f} x; against torch.distributed.checkpoint: "
        f"save {result['save_ratio']:.2f} x, "
        f"load {result['load_ratio']:.2f} x the bandwidth"
    )
    finish(args, result)


if __name__ == "__main__":
    main()
