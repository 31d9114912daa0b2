"""Whole runs that are stopped and resumed on other layouts, saved in the background, read for text and losses, and
healed; and commands as launched processes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.config.load import to_yaml
from tests.faults.planted import Fault, Flip, events, lines, numbers
from tests.nccl import run_bodies
from tests.nccl.fault_cases import config_of
from tests.nccl.faulty import Plant
from tests.nccl.lanes import Found, Lane
from tests.nccl.processes import Ended, finished
from tests.nccl.same_cases import EXACT, MODEL
from tests.support.oracle import relative

Sections = dict[str, dict[str, Any]]
LAST = 9
EXPERTS = {"count": 4, "top_k": 2, "ffn": 16}
COPY = "layers.1.mlp.down.weight"


@dataclass(frozen=True)
class Story:
    """A case with its own check function, which gets the lane, the case and `given`."""

    subject: str
    label: str
    ranks: int
    check: Callable[..., Found]
    given: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.subject}/{self.label}"


def check_story(lane: Lane, case: Story) -> Found:
    return case.check(lane, case, *case.given)


def sections_of(folder: Path, device: str, **more: dict[str, Any]) -> Sections:
    base: Sections = {
        "model": MODEL, "optimizer": {"lr": 1e-3}, "lr": {"warmup": 2}, "checkpoint": {"every": 1, "keep": 2},
        "train": {"precision": "fp64", "global_batch": 8, "micro_batch": 1, "steps": LAST},
        "run": {"dir": str(folder), "tensorboard": False, "device": device, "eval_every": 3, "eval_samples": 8},
        "comm": {"bucket_mib": 0.02},
    }  # fmt: skip
    return {name: base.get(name, {}) | more.get(name, {}) for name in base | more}


def differences(run: Path, reference: Path) -> tuple[float, list[str]]:
    """Compare the losses and norms of all steps and all validations of two runs."""
    worst, wrong = 0.0, []
    for name, keys in (("metrics.jsonl", ("loss", "grad_norm")), ("validation.jsonl", ("loss",))):
        ours, theirs = lines(run, name), lines(reference, name)
        if [line["step"] for line in ours] != [line["step"] for line in theirs]:
            return float("inf"), [f"{name} has steps {[line['step'] for line in ours]}"]
        for key in keys:
            error = relative([line[key] for line in ours], [line[key] for line in theirs])
            worst = max(worst, error)
            if not error <= EXACT:
                wrong.append(f"{key} of {name} differs by {error:.1e}")
    return worst, wrong


def check_resumed(lane: Lane, case: Story, stages: Sequence[Sections], alone: Sections) -> Found:
    """Compare a run with one process without stops. The run is stopped by SIGTERM twice, and resumed on another layout
    each time. The same number of steps is planned from the start, so that the learning rate is the same.
    """
    folder, device = lane.folder(case.name), lane.transport.device
    ended = 0
    for number, more in enumerate(stages):
        stop = 3 * (number + 1) if number + 1 < len(stages) else 0
        sections = sections_of(folder / "run", device, **more)
        steps = set(lane.world(case.ranks).run(run_bodies.train_some, sections, stop))
        last = steps.pop()
        if steps or not ended < last or (stop and last == LAST):
            return Found([f"stage {number} ended at steps {sorted({last, *steps})} after {ended}"])
        ended = last
    if ended != LAST:
        return Found([f"the run ended at step {ended} of {LAST}"])
    lane.world(1).run(run_bodies.train_some, sections_of(folder / "alone", device, **alone))
    worst, wrong = differences(folder / "run", folder / "alone")
    return Found(wrong, worst)


def check_uninterrupted(lane: Lane, case: Story, more: Sections) -> Found:
    """Compare a run that saves every step in the background, is stopped and resumed, with the same ranks without a
    stop.
    """
    folder, device, world = lane.folder(case.name), lane.transport.device, lane.world(case.ranks)
    for stop in (4, 0):
        last = set(world.run(run_bodies.train_some, sections_of(folder / "run", device, **more), stop))
    world.run(run_bodies.train_some, sections_of(folder / "whole", device, **more))
    worst, wrong = differences(folder / "run", folder / "whole")
    return Found(wrong if last == {LAST} else [f"ended at {last}", *wrong], worst)


def check_killed(lane: Lane, case: Story, more: Sections) -> Found:
    """Compare a run with an undisturbed one. Its rank 2 is killed in the middle of its fifth save, and the run is
    started again. All ranks are launched processes.
    """
    folder, transport = lane.folder(case.name), lane.transport
    ends = []
    for name, plant in (("run", Plant(2, "save", "kill", step=5)), ("run", None), ("whole", None)):
        own = {"run": {**config_run(folder / name, transport.device)}, "checkpoint": {"every": 1, "keep": 2}}
        train = {"precision": "fp64", "global_batch": 8, "micro_batch": 1, "steps": LAST}
        config = config_of(folder, transport.device, "dp4", **{"train": train, **more, **own})
        (folder / "config.yaml").write_text(to_yaml(config))
        ends.append(finished(transport, 4, folder, ["train", "config.yaml"], plant=plant, module="tests.nccl.faulty",
                             tag=f"{name}{len(ends)}"))  # fmt: skip
    wrong = [f"rank {n} ended with {each.code}: {each.said[-300:]}" for end in ends[1:] for n, each in enumerate(end)
             if each.code != 0]  # fmt: skip
    if wrong or ends[0][2].code != -9:
        return Found([*wrong[:2], f"the killed rank ended with {ends[0][2].code}"])
    worst, differing = differences(folder / "run", folder / "whole")
    return Found(differing, worst)


def config_run(folder: Path, device: str) -> dict[str, Any]:
    return {"dir": str(folder), "tensorboard": False, "device": device, "eval_every": 3, "eval_samples": 8}


def check_reading(lane: Lane, case: Story, what: str, layout: dict[str, Any], model: dict[str, Any]) -> Found:
    """Check that a model trained by one process gives the same text or loss on several ranks."""
    folder, device = lane.folder(case.name), lane.transport.device
    sections = sections_of(folder / "run", device, model=MODEL | {"seq": 48} | model, train={
        "precision": "fp64", "global_batch": 8, "micro_batch": 1, "steps": 3})  # fmt: skip
    lane.world(1).run(run_bodies.train_some, sections)
    source = str(folder / "run")
    if what == "text":
        prompts = [[5], [1, 2, 3, 4, 5, 6, 7], [9, 8, 7]]
        args: tuple[Any, ...] = (run_bodies.write_texts, source, layout, device, prompts)
        (alone,) = lane.world(1).run(run_bodies.write_texts, source, {}, device, prompts)
        texts = lane.world(case.ranks).run(*args)
        wrong = [f"rank {rank} wrote {text}, not {alone}" for rank, text in enumerate(texts) if text != alone]
        return Found(wrong[:1])
    (alone,) = lane.world(1).run(run_bodies.find_loss, source, {}, device)
    losses = lane.world(case.ranks).run(run_bodies.find_loss, source, layout, device)
    error = relative(losses, [alone] * len(losses))
    return Found([] if error <= EXACT else [f"losses {losses} instead of {alone}"], error)


def check_healed(lane: Lane, case: Story, fault: Fault | None, flip: Flip | None, rank: int, words: str) -> Found:
    """Check that a wrong number on one rank is attributed to it, and leaves no trace in the trained weights."""
    folder, device, world = lane.folder(case.name), lane.transport.device, lane.world(case.ranks)
    more: Sections = {"faults": {"window": 8, "check_every": 4}}
    for name, wrong in (("clean", (None, None)), ("planted", (fault, flip))):
        last = set(world.run(run_bodies.train_with, str(folder / name), device, *wrong, more))
        if last != {12}:
            return Found([f"{name}: ended with {last}"])
    reported = events(folder / "planted", "fault")
    if [event["rank"] for event in reported] != [rank] or not re.search(words, reported[0]["text"]):
        return Found([f"it says {[event['text'] for event in reported]}, not that it was rank {rank}: {words}"])
    ours, theirs = (numbers(folder / name) for name in ("planted", "clean"))
    if device == "cpu" and ours != theirs:
        return Found(["the run differs from one without the fault"])
    # A GPU adds up the rows of an embedding's gradient in any order, so two fp32 runs are equal only up to rounding.
    error = relative([line["loss"] for line in ours], [line["loss"] for line in theirs])
    return Found([] if error <= 1e-5 else [f"the losses differ by {error:.1e} from those without the fault"], error)


def check_command(
    lane: Lane, case: Story, words: Sequence[str], config: dict[str, Any], codes: tuple[int, ...]
) -> Found:
    """Check that a command as launched ranks ends cleanly on all of them."""
    folder, transport = lane.folder(case.name), lane.transport
    given = dict(config)
    layout = given.pop("named", "dp4")
    (folder / "config.yaml").write_text(to_yaml(config_of(folder, transport.device, layout, **given)))
    ended = finished(transport, case.ranks, folder, words)
    return Found(list(_unclean(ended, codes)))


def _unclean(ended: Sequence[Ended], codes: tuple[int, ...]) -> Iterator[str]:
    for rank, each in enumerate(ended):
        if each.code not in codes:
            yield f"rank {rank} ended with {each.code}: {each.said[-500:]}"
        yield from (f"rank {rank}: {text}" for text in each.complaints)
        if "Traceback" in each.said:
            yield f"rank {rank} has a traceback: {each.said[-500:]}"


def check_evaluated(lane: Lane, case: Story, overrides: Sequence[str]) -> Found:
    """Check that `meshwright eval` as launched ranks prints the loss of one process."""
    folder, transport = lane.folder(case.name), lane.transport
    train = {"precision": "fp64", "global_batch": 8, "micro_batch": 1, "steps": 3}
    config = config_of(folder, transport.device, "dp4", train=train, zero={"stage": 0})
    (folder / "config.yaml").write_text(to_yaml(config))
    finished(transport, 1, folder, ["train", "config.yaml"], tag="train")
    words = ["eval", "run", "--samples", "8", "--json"]
    one = finished(transport, 1, folder, words, tag="one")
    many = finished(transport, case.ranks, folder, [*words, *overrides])
    wrong = list(_unclean([*one, *many], (0,)))
    if wrong:
        return Found(wrong[:2])
    ours, theirs = (json.loads(end[0].out.strip().splitlines()[-1])["loss"] for end in (many, one))
    error = relative([ours], [theirs])
    return Found([] if error <= EXACT else [f"loss {ours} instead of {theirs}"], error)


def _resumes() -> Iterator[Story]:
    def staged(label: str, *stages: Sections, **alone: dict[str, Any]) -> Story:
        return Story("resume", label, 4, check_resumed, (tuple({**alone, **each} for each in stages), alone))

    tp2, pp4 = {"layout": {"tp": 2}, "zero": {"stage": 1}}, {"layout": {"pp": 4}}
    ring = {"layout": {"cp": 2}, "context": {"kind": "ring"}, "zero": {"stage": 3}}
    deep = {"model": MODEL | {"layers": 4}}
    yield staged("dp4-tp2-pp4", {}, tp2, pp4, **deep)
    yield staged("pp4-cp2-dp4", pp4, ring, {"zero": {"stage": 2}}, **deep)
    sequences = {"layout": {"tp": 4, "sequence_parallel": True}}
    chunks = {"layout": {"pp": 2, "chunks": 2}, "pipeline": {"schedule": "interleaved"}, "zero": {"stage": 2}}
    yield staged("tp4-chunks-cp4", sequences, chunks, {"layout": {"cp": 4}, "context": {"kind": "ulysses"}},
                 model=MODEL | {"layers": 4, "kv_heads": 4})  # fmt: skip
    parts = {"layout": {"ep": 2}}, {"layout": {"tp": 2, "ep": 2, "etp": 1}, "zero": {"stage": 1}}
    whole = {"layout": {"ep": 4}, "zero": {"stage": 3}}
    yield staged("ep2-tp2-ep4", *parts, whole, model=MODEL | {"experts": EXPERTS})
    grid = {"layout": {"tp": 4, "tp_grid": [2, 2], "tp_kind": "2d"}}
    two = {"train": {"precision": "fp64", "global_batch": 8, "micro_batch": 2, "steps": LAST}}
    yield staged("grid-dp4-pp4", grid | two, {"zero": {"stage": 3}}, pp4, **deep)


def _saves() -> Iterator[Story]:
    topk = {"comm": {"bucket_mib": 0.02, "reduce": {"kind": "topk", "ratio": 0.1, "block": 32}}}
    for stage in (1, 2, 3):
        yield Story("save", f"async-zero{stage}", 4, check_uninterrupted, ({"zero": {"stage": stage}},))
        yield Story("save", f"topk-zero{stage}", 4, check_uninterrupted, ({**topk, "zero": {"stage": stage}},))
        killed = {"zero": {"stage": stage}, "comm": topk["comm"] | {"timeout": 30.0}}
        yield Story("save", f"killed-topk-zero{stage}", 4, check_killed, (killed,))
    local = {"precision": "fp64", "global_batch": 8, "micro_batch": 1, "steps": LAST, "clip": 0.0,
             "local": {"steps": 3, "delay": 2}}  # fmt: skip
    # The stop comes while a sum of the replicas is in flight.
    yield Story("save", "replicas-delay", 4, check_uninterrupted, ({"layout": {"replicas": 2}, "train": local},))


def _readings() -> Iterator[Story]:
    yield Story("read", "text-tp2", 2, check_reading, ("text", {"tp": 2}, {}))
    three = {"heads": 6, "kv_heads": 3, "hidden": 24, "ffn": 48}
    yield Story("read", "text-tp3", 3, check_reading, ("text", {"tp": 3}, three))
    yield Story("read", "loss-cp2", 2, check_reading, ("loss", {"cp": 2, "kind": "ring"}, {}))
    yield Story("read", "loss-pp2", 2, check_reading, ("loss", {"pp": 2}, {}))
    yield Story("read", "loss-tp2-dp2", 4, check_reading, ("loss", {"tp": 2}, {}))
    yield Story("read", "eval-cp2", 2, check_evaluated, (("layout.cp=2",),))
    yield Story("read", "eval-pp2", 2, check_evaluated, (("layout.pp=2",),))


def _healings() -> Iterator[Story]:
    nan = r"first in the forward of layers\.1\b.* on rank 3"
    yield Story("heal", "nan", 4, check_healed, (Fault(5, 3), None, 3, nan))
    flipped = f"rank 2 held another {COPY}"
    yield Story("heal", "flipped-bit", 4, check_healed, (None, Flip(2, 4, COPY), 2, flipped))


def _commands() -> Iterator[Story]:
    short = {"precision": "fp64", "global_batch": 8, "micro_batch": 1, "steps": 6}

    def command(label: str, ranks: int, words: Sequence[str], codes: tuple[int, ...] = (0,), **config: Any) -> Story:
        return Story("command", label, ranks, check_command, (tuple(words), config, codes))

    sizes = ("--sizes", "4K:4M", "--seconds", "0.02")
    yield command("bench-2", 2, ["comm", "bench", *sizes])
    yield command("bench-4", 4, ["comm", "bench", "--tp", "2", "--pp", "2", *sizes])
    yield command("bench-8", 8, ["comm", "bench", "--tp", "2", "--pp", "2", *sizes])
    # A busy machine may be found too slow, which is exit code 1.
    yield command("doctor", 4, ["doctor", "--seconds", "2"], (0, 1))
    trace = {"train": short, "faults": {"check_every": 2}, "layout": {"tp": 2, "pp": 2}}
    yield command("trace", 4, ["train", "config.yaml", "run.trace=true"], **trace)
    adaptive = {"bucket_mib": 0.02, "reduce": {"adaptive": True}}
    longer, one = short | {"steps": 30}, {"stage": 1}
    yield command("adaptive", 4, ["train", "config.yaml"], train=longer, comm=adaptive, zero=one)
    # The first step compiles for longer than the timeout, which must not raise an alarm.
    yield command("compiling", 2, ["train", "config.yaml", "train.compile=true", "comm.timeout=5"], named="tp2",
                  train=short | {"precision": "fp32"})  # fmt: skip


RUN_CASES = [*_resumes(), *_saves(), *_readings(), *_healings(), *_commands()]
