"""The time that a user waits for `meshwright --help`, for the first line of `train`, and for the first step of 8 ranks.

The bare interpreter and `import torch` are measured for comparison. Times are seconds of the clock, and of a processor
(user and system), which other programs on the machine change little.

    python benchmarks/startup.py
    python benchmarks/startup.py --limits    # only the first two; the exit code is 1 if one takes too long
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import BenchParser, finish

CONFIG = """
model: {layers: 4, hidden: 64, heads: 4, vocab: 257, seq: 64}
layout: {tp: 2, pp: 2}
data: {prefixes: [tokens]}
train: {steps: 1, global_batch: 4}
run: {device: cpu, tensorboard: false}
"""
ENV = os.environ | {"OMP_NUM_THREADS": "1"}


def timed(command: list[str], cwd: str) -> float:
    begin = time.perf_counter()
    subprocess.run(command, cwd=cwd, check=True, capture_output=True, env=ENV)
    return time.perf_counter() - begin


LIMITS = {"help": 0.3, "first line": 1.0}  # seconds of a processor


def processor_s(command: list[str], cwd: str) -> float:
    """Return the processor seconds of a command and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=cwd, check=True, capture_output=True, env=ENV)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def first_line(folder: str) -> tuple[float, float]:
    """Return the seconds until `train` says something, by the clock and by a processor (Linux)."""
    words = ["train", "config.yaml", "--nproc", "4", f"run.dir={tempfile.mkdtemp(dir=folder)}"]
    command, pipe = [sys.executable, "-m", "meshwright", *words], subprocess.PIPE
    begin = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder, stderr=pipe, stdout=subprocess.DEVNULL, text=True, env=ENV)
    assert process.stderr is not None and process.stderr.readline().startswith(("starts", "continues"))
    seconds = time.perf_counter() - begin
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    process.kill()
    process.wait()
    return seconds, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def least_seconds(folder: str, times: int = 5) -> dict[str, float]:
    """Return the least processor seconds of several tries. The commands take turns."""
    python = [sys.executable, "-c", "pass"]
    help_ = [sys.executable, "-m", "meshwright", "--help"]
    found: dict[str, list[float]] = {"interpreter": [], "help": [], "first line": [], "first line, clock": []}
    for _ in range(times):
        found["interpreter"].append(processor_s(python, folder))
        found["help"].append(processor_s(help_, folder))
        clock, processor = first_line(folder)
        found["first line"].append(processor)
        found["first line, clock"].append(clock)
    return {name: min(values) for name, values in found.items()}


def first_step(folder: str, number: int) -> float:
    """Return the seconds until metrics.jsonl has its first line."""
    metrics = Path(folder) / f"run{number}" / "metrics.jsonl"
    command = [sys.executable, "-m", "meshwright", "train", "config.yaml", "--nproc", "8", f"run.dir=run{number}"]
    begin = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENV)
    while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
        time.sleep(0.01)
    seconds = time.perf_counter() - begin
    assert process.wait() == 0
    return seconds


def main() -> int:
    parser = BenchParser(__doc__)
    parser.add_argument("--limits", action="store_true", help="only the times with limits, which decide the exit code")
    parser.add_argument("--tries", type=int, default=5)
    args = parser.parse(tries=1)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.yaml").write_text(CONFIG)
        (Path(folder) / "text.txt").write_text("words and words " * 2000)
        (Path(folder) / "more.txt").write_text("words and more words " * 2000)
        prepare = [sys.executable, "-m", "meshwright", "data", "prepare", "text.txt", "more.txt", "--out", "tokens"]
        timed(prepare, folder)
        found = least_seconds(folder, args.tries)
        for name, value in found.items():
            limit = f"  (limit {LIMITS[name]} s)" if name in LIMITS else ""
            print(f"{name:<18} {value:6.3f} s{limit}")
        if args.limits:
            finish(args, found)
            return int(any(found[name] > limit for name, limit in LIMITS.items()))
        starts, imports = [], []
        for number in range(args.tries):
            starts.append(first_step(folder, number))
            imports.append(timed([sys.executable, "-c", "import torch"], folder))
    start, torch_import = statistics.median(starts), statistics.median(imports)
    print(
        f"8 ranks from command to first step: median {start:.1f} s ({min(starts):.1f} to {max(starts):.1f}), "
        f"{start / torch_import:.1f} x one `import torch` ({torch_import:.1f} s)"
    )
    finish(args, {"startup_s": start, "import_torch_s": torch_import, **found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
