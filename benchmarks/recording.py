"""What recording a run costs: the share of a training step that its own files, its norms by layer and its loggers take,
and what `meshwright watch` takes of a processor while it follows the run.

One CPU rank trains a small GPT. Counted is the time of the thread that trains (what a step waits for) and that of the
loggers' thread (which competes for a processor only where there is none to spare).

    python benchmarks/recording.py [--json]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import meshwright
from meshwright.config.load import config_from
from meshwright.dryrun.stand_ins import RandomTokens
from meshwright.plan.measured import speed_of
from meshwright.train import layers, loggers, loop
from meshwright.train.gpt import forward_step, model_provider
from meshwright.watch.report import RunReport

STEPS, LIMIT = 60, 0.005
MODEL = {"layers": 4, "hidden": 256, "heads": 4, "vocab": 4096, "seq": 256}


class Spent:
    """Seconds of a thread's own processor time in some methods, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(self, owner: Any, method: str, name: str) -> None:
        plain = getattr(owner, method)

        def timed(*args: Any, **more: Any) -> Any:
            begun = time.thread_time()
            try:
                return plain(*args, **more)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - begun

        setattr(owner, method, timed)


def follow(folder: Path, done: threading.Event, spent: list[float]) -> None:
    """Reads the run as the page's server does, once per request of the page."""
    while not (folder / "metrics.jsonl").exists():
        time.sleep(0.05)
    report = RunReport(folder)
    while not done.wait(2.5):
        begun = time.thread_time()
        json.dumps(report.document())
        report.plan()
        spent.append(time.thread_time() - begun)


def measure(names: list[str]) -> dict[str, Any]:
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
            "train": {"steps": STEPS, "global_batch": 4, "micro_batch": 4},
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
    step = sum(line["step_time_s"] for line in lines) / len(lines)
    shares = {name: seconds / STEPS / step for name, seconds in spent.seconds.items()}
    waits = sum(share for name, share in shares.items() if "thread" not in name)
    return {
        "step_ms": 1e3 * step, "shares": shares, "training waits for": waits,
        "watch, of a processor": max(watched) / 2.5, "within": waits < LIMIT,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    names = [name for name, (_, package) in loggers.LOGGERS.items() if importlib.util.find_spec(package)]
    names = [name for name in names if name in ("csv", "tensorboard")] + [n for n in names if n in ("wandb", "trackio")]
    args, found = parser.parse_args(), measure(names)
    if args.json:
        print(json.dumps(found))
        return
    print(f"a step takes {found['step_ms']:.0f} ms; loggers: {', '.join(names)}")
    for name, share in found["shares"].items():
        print(f"  {name:<44} {100 * share:8.3f} %")
    print(f"  {'a step waits for, in all':<44} {100 * found['training waits for']:8.3f} %  (limit {100 * LIMIT} %)")
    print(f"  {'watch: share of a processor while it follows':<44} {100 * found['watch, of a processor']:8.3f} %")


if __name__ == "__main__":
    main()
