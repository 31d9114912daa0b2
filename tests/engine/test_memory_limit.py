"""Offload makes it possible to train states that are several times larger than the memory a process takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# A program that trains a few steps. It prints its losses and how far its anonymous memory grew beyond its imports.
PROGRAM = """
import json, sys, threading, time
import torch
from tests.support.oracle import Made, make_trainer, small_config

def anonymous():
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1])

torch.set_num_threads(1)
where, folder = sys.argv[1:]
zero = {"stage": 3, "offload": {"optimizer": where, "params": where, "path": folder, "buffer_mib": 1.0}}
config = small_config(
    model={"layers": 12, "hidden": 768, "heads": 8, "vocab": 4096, "seq": 16},
    train={"precision": "bf16", "grad_dtype": "bf16", "global_batch": 2, "micro_batch": 2},
    zero=zero, comm={"bucket_mib": 4}, run={"device": "cpu"},
)
make_trainer(small_config(train={"precision": "bf16", "global_batch": 2})).step()  # loads what a first step loads
before, most, done = anonymous(), 0, False

def watch():
    global most
    while not done:
        most = max(most, anonymous())
        time.sleep(0.005)

watcher = threading.Thread(target=watch)
watcher.start()
trainer = make_trainer(config, data=Made(config.model.vocab, config.model.seq))
parameters = sum(buffer.size for buffer in trainer.data_parallel.buffers)
losses = [trainer.step().loss for _ in range(4)]
done = True
watcher.join()
print(json.dumps({"losses": losses, "bytes": (most - before) / parameters}))
"""


def run(where: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-c", PROGRAM, where, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.wide
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_states_that_do_not_fit_train_from_disk(tmp_path: Path) -> None:
    """Weights, gradients, masters and moments take 16 bytes per parameter. With offload to disk, everything except the
    gradients' 2 bytes lives in files. Never more than 3.7 bytes are resident, counted from the first drawn weight, and
    the losses are the same.
    """
    # On a CPU, offload to cpu moves nothing, since that is its own memory.
    held, offloaded = run("cpu", tmp_path), run("disk", tmp_path)
    assert offloaded["losses"] == held["losses"]
    assert held["bytes"] > 16 and offloaded["bytes"] < 3.7, (held["bytes"], offloaded["bytes"])
