"""The time from the command to the end of the first step on 8 local ranks and, for comparison, that of importing torch.

    python benchmarks/startup.py
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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


def first_step(folder: str, number: int) -> float:
    """Returns the seconds until metrics.jsonl has its first line."""
    metrics = Path(folder) / f"run{number}" / "metrics.jsonl"
    command = [sys.executable, "-m", "meshwright", "train", "config.yaml", "--nproc", "8", f"run.dir=run{number}"]
    begin = time.perf_counter()
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENV)
    while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
        time.sleep(0.01)
    seconds = time.perf_counter() - begin
    assert process.wait() == 0
    return seconds


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.yaml").write_text(CONFIG)
        (Path(folder) / "text.txt").write_text("words and words " * 2000)
        (Path(folder) / "more.txt").write_text("words and more words " * 2000)
        prepare = [sys.executable, "-m", "meshwright", "data", "prepare", "text.txt", "more.txt", "--out", "tokens"]
        timed(prepare, folder)
        starts, imports = [], []
        for number in range(5):
            starts.append(first_step(folder, number))
            imports.append(timed([sys.executable, "-c", "import torch"], folder))
    start, torch_import = statistics.median(starts), statistics.median(imports)
    print(
        f"8 ranks from command to first step: median {start:.1f} s ({min(starts):.1f} to {max(starts):.1f}), "
        f"{start / torch_import:.1f} x one `import torch` ({torch_import:.1f} s)"
    )
    print(json.dumps({"startup_s": start, "import_torch_s": torch_import}), file=sys.stderr)


if __name__ == "__main__":
    main()
