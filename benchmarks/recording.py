"""The cost of recording a run: the shares of a step that its files, its norms by layer and its loggers take.

The benchmark also measures the share of a processor that `meshwright watch` takes while it follows the run. One CPU
rank trains a small GPT. Counted are the processor time of the training thread (for which a step waits), that of the
loggers' thread, and that of a thread that reads the run as the page's server does. The last two compete for a processor
only if there is none to spare. The first two are divided by the processor time of the same steps in the same thread, so
other programs on the machine change the ratios little. The result is the median of several runs.

    python benchmarks/recording.py [--json] [--runs 3]
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from common import BenchParser, finish

import meshwright
from meshwright.config.load import config_from
from meshwright.dryrun.stand_ins import RandomTokens
from meshwright.engine.providers import forward_step, model_provider
from meshwright.plan.measured import speed_of
from meshwright.record import loggers
from meshwright.run import layers, loop
from meshwright.watch.report import RunReport

STEPS, LIMIT = 60, 0.005
PAGE_S = 2.5  # between two requests of the page
MODEL = {"layers": 4, "hidden": 256, "heads": 4, "vocab": 4096, "seq": 256}


class Spent:
    """The processor seconds that a thread itself spends in some methods, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.undo: list[Any] = []
        self.begun: list[float] = []  # processor time of the training thread, whenever a step is recorded

    @property
    def step_s(self) -> float:
        """The processor seconds of a step with everything that belongs to it. The first steps are left out."""
        return (self.begun[-1] - self.begun[4]) / (len(self.begun) - 5)

    def around(self, owner: Any, method: str, name: str) -> None:
        plain = getattr(owner, method)

        def timed(*args: Any, **more: Any) -> Any:
            begun = time.thread_time()
            if name == "files":
                self.begun.append(begun)
            try:
                return plain(*args, **more)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - begun

        setattr(owner, method, timed)
        self.undo.append(lambda: setattr(owner, method, plain))


def follow(folder: Path, done: threading.Event, spent: list[float]) -> None:
    """Read the run as the page's server does, once per request of the page."""
    while not (folder / "metrics.jsonl").exists():
        time.sleep(0.05)
    report = RunReport(folder)
    while not done.wait(PAGE_S):
        begun = time.thread_time()
        json.dumps(report.document())
        report.plan()
        spent.append(time.thread_time() - begun)


def measure(names: list[str], steps: int) -> dict[str, Any]:
    spent, watched, done = Spent(), [0.0], threading.Event()
    spent.around(loop.Recording, "after", "files")
    for method in ("before", "after"):
        spent.around(layers.LayerNorms, method, "norms by layer")
    for name in names:
        spent.around(loggers.LOGGERS[name][0], "log", f"logger {name} (its own thread)")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        config = config_from({
            "model": MODEL, "data": {"prefixes": ["none"]},
            "train": {"steps": steps, "global_batch": 4, "micro_batch": 4},
            "run": {"dir": str(run), "device": "cpu", "loggers": names, "tensorboard": False},
            "checkpoint": {"every": 0},
        })  # fmt: skip
        data = RandomTokens(MODEL["vocab"], MODEL["seq"])
        threading.Thread(target=follow, args=(run, done, watched), daemon=True).start()
        meshwright.pretrain(
            config, model_provider, lambda ctx, samples: (data, None, None), forward_step, speed=speed_of
        )
        done.set()
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for undo in spent.undo:
        undo()
    step, clock = spent.step_s, sum(line["step_time_s"] for line in lines) / len(lines)
    shares = {name: seconds / STEPS / step for name, seconds in spent.seconds.items()}
    waits = sum(share for name, share in shares.items() if "thread" not in name)
    beside = sum(share for name, share in shares.items() if "thread" in name)
    return {
        "step_ms": 1e3 * clock, "processor_ms": 1e3 * step, "shares": shares, "training waits for": waits,
        "loggers beside it": beside, "watch, of a processor": statistics.median(watched[1:] or watched) / PAGE_S,
    }  # fmt: skip


def median_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of every figure over several runs, and whether these keep to the limit."""
    shares = {name: statistics.median(one["shares"][name] for one in found) for name in found[0]["shares"]}
    rest = {name: statistics.median(one[name] for one in found) for name in found[0] if name != "shares"}
    within = rest["training waits for"] < LIMIT and rest["watch, of a processor"] < LIMIT
    return rest | {"shares": shares, "within": within}


def main() -> None:
    parser = BenchParser(__doc__)
    names = [name for name, (_, package) in loggers.LOGGERS.items() if importlib.util.find_spec(package)]
    names = [name for name in names if name in ("csv", "tensorboard")] + [n for n in names if n in ("wandb", "trackio")]
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="runs, of which the median counts")
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse(runs=1, steps=8)
    found = median_of([measure(names, args.steps) for _ in range(args.runs)])
    took = f"{found['step_ms']:.0f} ms, {found['processor_ms']:.0f} ms of a processor"
    print(f"a step takes {took}; loggers: {', '.join(names)}")
    for name, share in found["shares"].items():
        print(f"  {name:<44} {100 * share:8.3f} %")
    print(f"  {'a step waits for, in all':<44} {100 * found['training waits for']:8.3f} %  (limit {100 * LIMIT} %)")
    watch = 100 * found["watch, of a processor"]
    print(f"  {'watch: share of a processor while it follows':<44} {watch:8.3f} %  (limit {100 * LIMIT} %)")
    finish(args, found)
    if not found["within"] and not args.quick:
        raise SystemExit("over the limit")


if __name__ == "__main__":
    main()
