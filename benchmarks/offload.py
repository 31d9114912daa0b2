"""States in files, for a process that may not hold them in memory.

The process trains under a memory limit (a control group: Linux, as root) that is a fraction of weights, gradients and
states. It is compared with the same run without offload and limit. The rate at which states were moved is compared with
the rate at which the disk reads and writes the same blocks.

    python benchmarks/offload.py --hidden 1536 --limit-gib 1.6
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import BenchParser, finish

STATE_BYTES = 16  # per parameter: weight and gradient in bf16, master and two moments in fp32


@contextmanager
def control_group(limit: int) -> Iterator[Path]:
    """Create a control group that may use `limit` bytes of memory, including the pages of files."""
    second = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    folder = Path("/sys/fs/cgroup", "" if second else "memory", f"meshwright-{os.getpid()}")
    try:
        folder.mkdir()
    except OSError as error:
        sys.exit(f"no memory limit can be set here ({error}): run as root where control groups can be made")
    try:
        (folder / ("memory.max" if second else "memory.limit_in_bytes")).write_text(str(limit))
        for swap in ("memory.swap.max", "memory.swappiness"):
            if (folder / swap).exists():
                (folder / swap).write_text("0")
        yield folder
    finally:
        folder.rmdir()


def disk_rate(folder: Path, piece: int, total: int) -> float:
    """Return the bytes per second, reads plus writes, of blocks that one thread reads and another one writes."""
    import torch

    from meshwright.engine.sharding.offload import StateFile, page_tensor
    from meshwright.spec.traffic.placement import PAGE

    elements = piece // 4 // PAGE * PAGE
    count = max(3, total // piece)
    file = StateFile(folder, [elements] * count, torch.float32)
    blocks = [page_tensor(elements, torch.float32) for _ in range(2)]

    def reads() -> None:
        for i in range(count):
            file.read(i, 0, blocks[0])

    def writes() -> None:
        for i in range(count):
            # Half of the file is between the reader and the writer.
            file.write((i + count // 2) % count, 0, blocks[1])

    writes()
    begin = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(reads), pool.submit(writes)]:
            done.result()
    return 2 * count * elements * 4 / (time.perf_counter() - begin)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train in the limited process, or in the unlimited one for comparison."""
    import torch

    from meshwright.config.load import config_from
    from meshwright.device import Device
    from meshwright.dryrun.stand_ins import RandomTokens
    from meshwright.engine.context import build_context
    from meshwright.engine.providers import forward_step, model_provider
    from meshwright.engine.step import Trainer
    from meshwright.run.pretrain import build_modules

    torch.set_num_threads(1)
    offload = {"optimizer": args.child, "params": args.child, "path": str(args.folder), "buffer_mib": args.buffer_mib}
    config = config_from({
        "model": {"layers": 12, "hidden": args.hidden, "heads": 12, "vocab": 4096, "seq": 32},
        "train": {"precision": "bf16", "grad_dtype": "bf16", "global_batch": 2, "micro_batch": 2, "steps": 100},
        "zero": {"stage": 3, "offload": offload}, "comm": {"bucket_mib": 16},
        "data": {"prefixes": ["none"]}, "run": {"device": "cpu"},
    })  # fmt: skip
    ctx = build_context(config, 0, 1, Device("cpu"), trains=True)
    data = RandomTokens(config.model.vocab, config.model.seq)
    trainer = Trainer(ctx, build_modules(ctx, model_provider), forward_step, data)
    parameters = sum(buffer.size for buffer in trainer.data_parallel.buffers)
    losses, updates, moved = [], [], 2 * 12 * parameters
    for _ in range(args.steps):
        result = trainer.step()
        losses.append(result.loss)
        updates.append(result.phases["optimizer"])
        print(f"  {args.child}: step {result.step}, {result.step_time_s:.1f} s", file=sys.stderr, flush=True)
    found = {"parameters": parameters, "losses": losses, "update_s": min(updates), "rate": moved / min(updates)}
    if args.child == "disk":
        piece = int(args.buffer_mib * 2**20)
        found["disk_rate"] = disk_rate(args.folder, piece, 12 * parameters)
    return found


def run(args: argparse.Namespace, place: str, group: Path | None) -> dict[str, Any] | int:
    """Return the result of a separate process, or the signal that ended it."""

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    command = [sys.executable, __file__, *sys.argv[1:], "--child", place, "--folder", str(args.folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, preexec_fn=enter)
    if done.returncode < 0:
        return -done.returncode
    if done.returncode:
        sys.exit(done.returncode)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = BenchParser(__doc__)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--limit-gib", type=float, default=1.6)
    parser.add_argument("--buffer-mib", type=float, default=8.0)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to use (default: a temporary folder)")
    parser.add_argument("--child", choices=["none", "disk"], help=argparse.SUPPRESS)
    args = parser.parse(hidden=96, steps=1, limit_gib=1.0)
    if args.child:
        print(json.dumps(train(args)))
        return
    if args.quick and not os.access("/sys/fs/cgroup", os.W_OK):
        print("this benchmark needs control groups, and none can be made here: nothing was measured")
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder, control_group(int(args.limit_gib * 2**30)) as group:
        args.folder = Path(folder)
        held, limited = run(args, "none", None), run(args, "disk", group)
        refused = run(args, "none", group)
    assert isinstance(held, dict)
    states = STATE_BYTES * held["parameters"]
    print(
        f"{held['parameters'] / 1e6:.0f}M parameters, {states / 2**30:.2f} GiB of weights, gradients and states, in "
        f"{args.limit_gib} GiB for the whole process ({states / args.limit_gib / 2**30:.1f} x)"
    )
    print(f"without offload: {'it was killed' if isinstance(refused, int) else 'it ran as well'}")
    if isinstance(limited, int):
        sys.exit(f"with offload: it was ended by signal {limited}")
    same = "the same" if limited["losses"] == held["losses"] else "OTHERS"
    print(f"with offload: losses {limited['losses']}, {same} as without a limit")
    print(
        f"states moved at {limited['rate'] / 1e9:.2f} GB/s, read and written together: "
        f"{limited['rate'] / limited['disk_rate']:.2f} of the disk's {limited['disk_rate'] / 1e9:.2f}"
    )
    finish(args, {"held": held, "limited": limited, "killed without offload": isinstance(refused, int)})


if __name__ == "__main__":
    main()
