"""`meshwright inspect`: list the contents of a checkpoint and verify every checksum. Needs no torch."""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

from meshwright.errors import plural
from meshwright.record import companions
from meshwright.record.checkpoint_format import ELEMENT_BYTES, Index, find_checkpoint, read_index
from meshwright.record.verify import verify_checkpoint
from meshwright.show.progress import progress
from meshwright.show.terminal import table
from meshwright.show.units import size

EXAMPLES = """example:
  meshwright inspect runs/demo
  meshwright inspect runs/mine@1000 --json
  meshwright inspect runs/demo/checkpoints/step-00001000 --no-verify"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="CKPT|RUN[@STEP]", help="a checkpoint's folder, or a run's (its newest one)")
    parser.add_argument("--no-verify", action="store_true", help="don't read the tensors to compare their checksums")


def run(args: argparse.Namespace) -> None:
    path = find_checkpoint(args.source)
    index = read_index(path)
    found = describe(path, index)
    if not args.no_verify:
        begin = time.perf_counter()
        with progress(f"checking {path.name}", found["tensor_bytes"]) as advance:
            found["verified_bytes"] = verify_checkpoint(path, index, advance)
        companions.verify(path)
        found["verify_seconds"] = time.perf_counter() - begin
    print(json.dumps(found) if args.json else "\n".join(page(found)))


def describe(path: Path, index: Index) -> dict[str, Any]:
    """Return the document that --json prints. `verified_bytes` and `verify_seconds` are None until the verification."""
    states: dict[str, dict[str, Any]] = {}
    for name, tensor in index.tensors.items():
        state = states.setdefault(name.split("/", 1)[0], {"tensors": 0, "elements": 0, "bytes": 0, "dtypes": []})
        count = math.prod(tensor["shape"])
        state["tensors"] += 1
        state["elements"] += count
        state["bytes"] += count * ELEMENT_BYTES.get(tensor["dtype"], 0)
        if tensor["dtype"] not in state["dtypes"]:
            state["dtypes"].append(tensor["dtype"])
    train, model = index.config.get("train", {}), index.config.get("model", {})
    return {
        "path": str(path), "step": index.step, "consumed": index.consumed, "world": index.world,
        "layout": index.config.get("layout", {}), "precision": train.get("precision"), "model": model,
        "counters": index.state, "states": states, "tensors": len(index.tensors), "blocks": len(index.blocks),
        "files": index.files, "file_bytes": sum(index.files.values()),
        "tensor_bytes": sum(state["bytes"] for state in states.values()), "verified_bytes": None,
        "verify_seconds": None,
    }  # fmt: skip


def page(found: dict[str, Any]) -> list[str]:
    """Return the document of `describe` as lines of text."""
    layout, model, world = found["layout"], found["model"], found["world"]
    # The layout comes from the index as it is, so an axis that is missing or not a number is skipped.
    cut = math.prod(ranks for axis in ("tp", "pp", "cp", "replicas") if type(ranks := layout.get(axis)) is int)
    axes_there = [axis for axis in ("tp", "pp", "cp", "ep", "chunks", "replicas") if axis in layout]
    sizes = {"dp": world // max(cut, 1)} | {axis: layout[axis] for axis in axes_there}
    axes = " ".join(f"{axis}={ranks}" for axis, ranks in sizes.items() if ranks != 1) or "none"
    shape = [f"{key}={model[key]}" for key in ("layers", "hidden", "heads", "vocab", "seq") if key in model]
    # Without a loss scale, `good_steps` (the steps since the scale changed) is not counted.
    scaled = found["counters"].get("loss_scale") is not None
    counted = {key: n for key, n in found["counters"].items() if n is not None and (scaled or key != "good_steps")}
    counters = ", ".join(f"{key.replace('_', ' ')} {value:g}" for key, value in counted.items())
    lines = [
        found["path"],
        f"  step        {found['step']:,}, after {plural(found['consumed'], 'sample')}",
        f"  model       {' '.join(shape) or 'unknown'}",
        f"  written by  {plural(world, 'rank')}, layout {axes}, precision {found['precision'] or 'unknown'}",
        f"  counters    {counters or 'none'}",
    ]
    rows = [("state", "tensors", "elements", "size", "dtype")]
    for name, state in found["states"].items():
        numbers = (f"{state['tensors']:,}", f"{state['elements']:,}", size(state["bytes"]))
        rows.append((name, *numbers, ", ".join(state["dtypes"])))
    lines.append(table(rows, left=(0, 4)))
    held = f"{plural(found['tensors'], 'tensor')} in {plural(found['blocks'], 'block')}"
    lines.append(f"  {held} in {plural(len(found['files']), 'file')}, {size(found['file_bytes'])}")
    if found["verified_bytes"] is None:
        lines.append("  not verified")
    else:
        speed = size(found["verified_bytes"] / max(found["verify_seconds"], 1e-9))
        lines.append(f"  every checksum is right ({size(found['verified_bytes'])} at {speed}/s)")
    return lines
