"""Run folders as a run writes them, made without training: healthy, resumed and faulty ones of any length."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.config.load import config_from, to_yaml
from meshwright.config.sections import Config
from meshwright.plan.communication import predict_step
from meshwright.record.run_folder import RunFolder
from meshwright.spec.schedule.kinds import build
from meshwright.spec.schedule.simulate import simulate
from meshwright.spec.schedule.trace import spans_of, trace_json

WORLD, BEGAN = 8, 1_700_000_000.0
PHASES = {"data": 0.01, "forward": 0.12, "backward": 0.22, "reduce": 0.03, "optimizer": 0.02}


def config_of(steps: int, folder: Path) -> Config:
    return config_from({
        "model": {"layers": 4, "hidden": 64, "heads": 4, "vocab": 512, "seq": 64},
        "layout": {"tp": 2, "pp": 2}, "data": {"prefixes": ["data/books", "data/code"], "weights": [0.7, 0.3]},
        "train": {"steps": steps, "global_batch": 16, "micro_batch": 2}, "run": {"dir": str(folder), "device": "cpu"},
    })  # fmt: skip


def line_of(step: int, comm: dict[str, Any], loss: float) -> dict[str, Any]:
    spread = {"min": 0.3, "median": 0.31, "max": 0.33, "rank": 5}
    return {
        "step": step, "time": BEGAN + 0.4 * step, "loss": loss, "grad_norm": 1.0 + 0.3 * math.sin(step), "lr": 1e-3,
        "loss_scale": None, "skipped": False, "tokens": 1024, "global_batch": 16, "step_time_s": 0.4,
        "tokens_per_s": 2560.0, "phases": PHASES, "comm": comm, "tflops": 0.0042, "mfu": None,
        "exposed_s": dict.fromkeys(comm, 0.004),
        "ranks": {"busy_s": spread, "waited_s": spread, "peak_bytes": {k: 3e8 * (k != "rank") for k in spread}},
    }  # fmt: skip


def comm_of(config: Config, **at: int) -> dict[str, Any]:
    return {axis: dict(traffic._asdict()) for axis, traffic in predict_step(config, WORLD, **at).items()}


def healthy(folder: Path, steps: int = 60, done: int | None = None) -> Path:
    """Write the folder of a healthy run of `steps` steps, of which the first `done` are finished."""
    folder.mkdir(parents=True, exist_ok=True)
    config, done = config_of(steps, folder), done or steps
    (folder / "config.yaml").write_text(to_yaml(config))
    comm, checked = comm_of(config), comm_of(config, step=config.faults.check_every)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, done + 1):
            loss = 2.0 + 4.0 * math.exp(-5 * step / steps) + 0.05 * math.sin(7 * step)
            sent = comm if step % config.faults.check_every else checked
            file.write(json.dumps(line_of(step, sent, loss)) + "\n")
    validations = [{"step": n, "loss": 3.0 - n / steps, "sources": {"data/books": 2.5, "data/code": 2.1}}
                   for n in (steps // 3, steps // 2)]  # fmt: skip
    names = ["embedding", *(f"layers.{n}" for n in range(4)), "final_norm"]
    layers = [
        {"step": n, "layers": names, "grad_norm": [1.0 / (i + 1) for i in range(6)], "weight_norm": [9.0] * 6,
         "update_ratio": [1e-3 * (i + 1) for i in range(6)]} for n in range(5, done, 5)
    ]  # fmt: skip
    events = [
        {"time": BEGAN, "kind": "start", "step": 0, "text": f"starts on {WORLD} ranks", "lost": 0},
        {"time": BEGAN + 8, "kind": "checkpoint", "step": 20, "text": "saved in 0.1 s"},
    ]
    if done == steps:
        text = f"finished {steps} steps"
        events.append({"time": BEGAN + 0.4 * steps, "kind": "end", "step": steps, "text": text})
    for name, rows in (("validation", validations), ("layers", layers[:200]), ("events", events)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    notes = {
        "world": WORLD, "version": "0.1.0", "command": "meshwright train c.yaml", "host": "here", "torch": "2.13",
        "python": "3.11", "device": "cpu", "started": BEGAN, "sources": {"data/books": 7, "data/code": 3},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(notes))
    ranks = {"step": done, "busy_s": [0.3 + 0.002 * n for n in range(WORLD)], "waited_s": [0.1] * WORLD,
             "peak_bytes": [3e8] * WORLD}  # fmt: skip
    (folder / "ranks.json").write_text(json.dumps(ranks))
    rates = {"memory": 0.5, "sent_per_s": 1e6, "received_per_s": 2e6}
    machine = [{"time": BEGAN + 10 * n, "step": 5 * n, "cores": 0.4 + 0.3 * math.sin(n)} | rates for n in range(1, 8)]
    (folder / "machine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in machine))
    timeline = simulate(build("1f1b", 2, 4, 1), 0.03, 0.06, 0.01)
    (folder / "trace.json").write_text(trace_json(spans_of(timeline), "made, step 3", step=3))
    return folder


def add_event(folder: Path, **event: Any) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": BEGAN + 10, "step": None, "text": ""} | event) + "\n")


def resumed(folder: Path) -> Path:
    healthy(folder, done=50)
    add_event(folder, kind="restart", text="rank 1 was killed by SIGKILL; restart 1 of 3")
    add_event(folder, kind="resume", step=20, text="continues from step 20; trains 11 later steps again", lost=11)
    add_event(folder, kind="end", step=50, text="stopped on request at step 50 of 60", time=BEGAN + 30)
    return folder


def relaid(folder: Path, step: int = 40) -> Path:
    """Write the folder of a run that continued after `step` without tensor parallelism."""
    before = config_of(60, healthy(folder, done=step + 5))
    config = replace(before, layout=replace(before.layout, tp=1), run=replace(before.run, tensorboard=False))
    comm, run = comm_of(config), RunFolder(config, WORLD, step)
    for number in range(step + 1, 61):
        run.step(line_of(number, comm, 2.0) | {"step_time_s": 0.2, "tokens_per_s": 5120.0})
    run.close()
    return folder


def faulty(folder: Path) -> Path:
    healthy(folder, done=47)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["step"] in (29, 33):
            line |= {"skipped": True, "grad_norm": None}
        if line["step"] == 41:
            line["loss"] = None
        if line["step"] >= 38:
            line["comm"]["tp"]["wire_bytes"] -= 4096
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ranks = json.loads((folder / "ranks.json").read_text())
    ranks["busy_s"][3] *= 2
    (folder / "ranks.json").write_text(json.dumps(ranks))
    (folder / "flight").mkdir(exist_ok=True)
    hang = {"time": time.time(), "rank": 0, "text": "all_reduce number 9 over tp did not end; rank 3 did not arrive"}
    (folder / "flight" / "hang.json").write_text(json.dumps(hang))
    call = {"op": "all_reduce", "axis": "tp", "number": 9, "phase": "forward", "payload": 8192, "held_s": 15.0}
    for rank in range(WORLD):
        record = {"rank": rank, "at": "data/dataset.py:120 sample", "last": [call | {"done": rank == 3}]}
        (folder / "flight" / f"rank-{rank}.json").write_text(json.dumps(record))
    return folder
