"""Describes a run as one JSON document, from its folder alone, for the run's page. It does not import torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.config.step_schedules import consumed_after
from meshwright.errors import UserError, plural
from meshwright.plan.cluster import Cluster, load_cluster
from meshwright.plan.job import job_of
from meshwright.plan.measured import cluster_for
from meshwright.record.run_folder import own_model_in, read_config
from meshwright.record.run_notes import layout_since, read_events
from meshwright.record.speed import begins_of, pace_of
from meshwright.spec.layout import Layout
from meshwright.spec.model.description import describe, layout_of
from meshwright.spec.model.graph import parameter_count
from meshwright.spec.traffic.counts import COUNTED, LEARNED
from meshwright.watch import planned
from meshwright.watch.metrics_file import MetricsFile, plain, thinned
from meshwright.watch.read import is_number, numbers, read_lines, read_small, read_trace
from meshwright.watch.run_parts import RunView, kind_words, layout_line, schedule_line
from meshwright.watch.state import alerts_of, state_of

DETAILED = 240  # Lines that are parsed whole, evenly spaced over the run.
COMPARED = 24  # Lines whose bytes are compared with the plan, evenly spaced over the run.
MOST_LAYER_POINTS = 160
MOST_EVENTS = 400
MOST_GRID = 4096  # The grid draws at most this many ranks.
MOST_CALLS = 24  # The page shows at most this many calls of a rank's flight record.
SPREAD = ("loss", "grad_norm", "step_time_s", "tokens_per_s")  # Columns drawn with their lowest and highest values.


class RunReport:
    """The JSON documents of one run.

    `document` reads the folder again on every call. `plan` takes longer and depends on the config alone (except for the
    compared bytes), so it is computed once per config.
    """

    def __init__(self, folder: str | Path, cluster: str | None = None) -> None:
        self.path, self.cluster = Path(folder), cluster
        self.metrics = MetricsFile(self.path / "metrics.jsonl")
        self.config, self.config_text = read_config(self.path)
        self._planned: tuple[Any, dict[str, Any]] | None = None
        self._known_bytes: dict[Any, dict[str, dict[str, int]]] = {}
        self._state_inputs: tuple[Any, ...] = ()  # The last arguments of `state_of` after the folder.

    def version(self) -> tuple[Any, ...]:
        """Return a value that changes whenever the page does.

        It depends on the files that the page is made from and on the run's state: a run that falls silent or is gone
        changes no file.
        """
        names = ("metrics.jsonl", "validation.jsonl", "layers.jsonl", "events.jsonl", "ranks.json", "run.json",
                 "trace.json", "config.yaml", "flight/hang.json")  # fmt: skip
        stamps = []
        for name in names:
            try:
                status = (self.path / name).stat()
                stamps.append((status.st_size, status.st_mtime_ns))
            except OSError:
                stamps.append((0, 0))
        if not self._state_inputs:
            self.document()
        return *stamps, state_of(self.path, *self._state_inputs)["kind"]

    def document(self) -> dict[str, Any]:
        """Read the folder and return the document that the page draws."""
        self.config, self.config_text = read_config(self.path, (self.config, self.config_text))
        self.metrics.refresh()
        notes, lines = read_small(self.path / "run.json"), self.metrics.lines(DETAILED)
        self.view = view = self._view(lines[-1] if lines else {})
        run: dict[str, Any] = {
            "name": self.path.resolve().name, "folder": str(self.path), "now": time.time(), "notes": notes,
            "config": self.config_text, "layout": self._layout(notes), "events": view.events[-MOST_EVENTS:],
            "progress": self._progress(view, lines[-1] if lines else {}, notes), "series": self._series(lines),
            "details": _details(lines, self._recent_lines()), "validations": self._validations(),
            "layers": self._layers(), "ranks": self._ranks(notes), "sources": self._sources(notes),
            "trace": self._trace(),
        }  # fmt: skip
        hang, progress = read_small(self.path / "flight" / "hang.json"), run["progress"]
        self._state_inputs = (view.events, hang, progress["last_time"], progress["step_time_s"] or 0.0)
        run["state"] = state_of(self.path, *self._state_inputs)
        run["alerts"] = alerts_of(view, run["ranks"], run["state"], len(self.metrics))
        return run

    def _recent_lines(self) -> list[dict[str, Any]]:
        """Return the lines of the steps over which the speed is measured."""
        pace = self.view.pace
        return self.metrics.lines(pace.count, since=pace.first) if pace else []

    # The parts of the document.

    def _world(self, notes: Mapping[str, Any]) -> int | None:
        world = notes.get("world")
        return world if isinstance(world, int) and world > 0 else None

    def layout(self, notes: Mapping[str, Any]) -> Layout | None:
        world = self._world(notes)
        try:
            return layout_of(self.config, world) if world else None
        except UserError:
            return None

    def _layout(self, notes: Mapping[str, Any]) -> dict[str, Any]:
        layout, m = self.layout(notes), self.config.model
        words = (plural(m.layers, "layer"), f"hidden {m.hidden}", f"seq {m.seq}")
        own = own_model_in(notes)
        described: dict[str, Any] = {
            "parameters": own["parameters"] if own else parameter_count(describe(m)),
            "model": str(own["name"]) if own else " · ".join([*kind_words(self.config), *words]),
            "precision": self.config.train.precision, "device": str(notes.get("device") or self.config.run.device),
        }  # fmt: skip
        if layout is not None:
            described |= {"world": layout.world, "words": layout_line(self.config, layout)}
            described["schedule"] = schedule_line(self.config, layout)
        return described

    def _view(self, last: Mapping[str, Any]) -> RunView:
        c, events = self.metrics.columns, read_events(self.path)
        pace = pace_of(c["step"], c["tokens"], c["step_time_s"], c["time"], begins_of(events))  # type: ignore[arg-type]
        return RunView(
            int(c["step"][-1]) if len(self.metrics) else 0, self.config.train.steps, _last(c["loss"]),
            _last(c["grad_norm"]), pace, _counted(last), int(np.nansum(c["skipped"])),
            int((~np.isfinite(c["loss"]) & (c["skipped"] == 0)).sum()), events,
        )  # fmt: skip

    def _progress(self, view: RunView, last: Mapping[str, Any], notes: Mapping[str, Any]) -> dict[str, Any]:
        c, config, pace = self.metrics.columns, self.config, view.pace
        flops = _flops(last)
        # The MFU of one TFLOP/s: a line states both, so the page needs no device's peak.
        mfu_of = (last.get("mfu") or 0.0) / (last.get("tflops") or 1.0)
        samples_s = float(np.nansum(c["global_batch"][pace.steps])) / (pace.step_s * pace.count) if pace else 0.0
        tflops = flops * samples_s / 1e12 if flops else None
        return {
            "step": view.step, "steps": view.steps, "steps_done": len(self.metrics),
            "tokens": int(np.nansum(c["tokens"])), "samples": consumed_after(config, view.step),
            "all_samples": consumed_after(config, view.steps),
            "loss": view.loss, "grad_norm": view.grad_norm, "lr": _last(c["lr"]),
            "step_time_s": pace and pace.step_s, "tokens_per_s": pace and pace.tokens_per_s,
            "recent_steps": pace.count if pace else 0, "wall_s": pace and pace.wall_s,
            "tflops": tflops, "mfu": tflops * mfu_of if tflops and mfu_of else None,
            "seconds_left": view.seconds_left(), "counted": view.counted,
            "trained_s": float(np.nansum(c["step_time_s"])), "last_time": _last(c["time"]),
            "skipped": view.skipped, "not_finite": view.not_finite,
            "flops_per_sample": flops, "price_hour": self._price(notes),
        }  # fmt: skip

    def _price(self, notes: Mapping[str, Any]) -> float | None:
        """Return the price of all devices in dollars per hour; None if the cluster is not known."""
        cluster, world = self._cluster(notes), self._world(notes)
        # A device of one unit is a CPU core, for which no price is shown.
        return cluster.device.price_hour * world if cluster and world and cluster.device.units > 1 else None

    def _series(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        c = dict(self.metrics.columns)
        if not len(self.metrics):
            return {}
        with np.errstate(divide="ignore", invalid="ignore"):
            c["tokens_per_s"] = c["tokens"] / c["step_time_s"]
        began = c["time"][0]
        c["time"], c["tokens"] = c["time"] - began, np.nancumsum(c["tokens"])
        if not np.isfinite(c["loss_scale"]).any():
            del c["loss_scale"]
        skipped = c["step"][c["skipped"] > 0]
        infinite = c["step"][~np.isfinite(c["loss"]) & (c["skipped"] == 0)]
        del c["skipped"], c["global_batch"]
        series = thinned(c, SPREAD)
        flops = [(_flops(line), line.get("mfu"), line.get("tflops")) for line in lines[-1:]]
        if flops and flops[0][0]:
            series["tokens_to_tflops"] = flops[0][2] / (lines[-1]["tokens"] / lines[-1]["step_time_s"])
            series["tflops_to_mfu"] = flops[0][1] / flops[0][2] if flops[0][1] else None
        return series | {"began": float(began), "skipped": plain(skipped[-500:]), "not_finite": plain(infinite[-500:])}

    def _validations(self) -> list[dict[str, Any]]:
        """Return the validations by step. If a step was validated more than once, the last line counts."""
        by_step = {}
        for line in read_lines(self.path / "validation.jsonl"):
            if isinstance(line.get("step"), int):
                loss = line["loss"] if is_number(line.get("loss")) else None
                by_step[line["step"]] = {"step": line["step"], "loss": loss, "sources": numbers(line.get("sources"))}
        return [by_step[step] for step in sorted(by_step)]

    def _layers(self) -> dict[str, Any] | None:
        lines = [line for line in read_lines(self.path / "layers.jsonl") if isinstance(line.get("layers"), list)]
        # Only lines that list the same layers as the newest one fit into one drawing.
        lines = [line for line in lines if line["layers"] == lines[-1]["layers"]]
        chosen = [lines[round(i)] for i in np.linspace(0, len(lines) - 1, min(MOST_LAYER_POINTS, len(lines)))]
        if not chosen:
            return None
        keys = ("grad_norm", "weight_norm", "update_ratio")
        columns = {key: [plain(np.array(line.get(key, []), np.float64)) for line in chosen] for key in keys}
        names = [str(name) for name in lines[-1]["layers"]]
        return {"names": names, "steps": [line.get("step") for line in chosen]} | columns

    def _ranks(self, notes: Mapping[str, Any]) -> dict[str, Any]:
        recorded = read_small(self.path / "ranks.json")
        layout = self.layout(notes)
        keys = [key for key in ("busy_s", "waited_s", "data_s", "peak_bytes") if isinstance(recorded.get(key), list)]
        ranks: dict[str, Any] = {key: [n for n in recorded[key] if is_number(n)][:MOST_GRID] for key in keys}
        if layout is not None:
            world = min(layout.world, MOST_GRID)
            axes = [axis for axis in ("dp", "cp", "tp", "pp") if layout.axis_size(axis) > 1]
            ranks |= {"step": recorded.get("step"), "world": layout.world, "axes": axes}
            ranks["at"] = [[layout.coordinate(rank)[axis] for axis in axes] for rank in range(world)]
            ranks["flight"] = [rank for rank in range(world) if self._flight_file(rank).is_file()]
        return ranks

    def _flight_file(self, rank: int) -> Path:
        return self.path / "flight" / f"rank-{rank}.json"

    def flight(self, rank: int) -> dict[str, Any]:
        """Return a rank's last calls, newest first; none if they were not written after a hang or by a traced step."""
        record = read_small(self._flight_file(rank))
        keep = ("op", "axis", "number", "phase", "layer", "payload", "peer", "age_s", "held_s", "done")
        calls = [{k: call.get(k) for k in keep} for call in record.get("last", []) if isinstance(call, dict)]
        return {"rank": rank, "at": record.get("at"), "step": record.get("step"), "calls": calls[-MOST_CALLS:][::-1]}

    def _sources(self, notes: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the samples and tokens consumed from each file so far.

        They follow from the weights: at any time, a blend is within one sample of its weights.
        """
        weights = numbers(notes.get("sources"))
        steps = self.metrics.columns["step"]
        samples = consumed_after(self.config, int(steps[-1])) if len(steps) else 0
        total = sum(weights.values())
        tokens = int(np.nansum(self.metrics.columns["tokens"]))
        return [
            {"name": name, "share": w / total, "samples": samples * w / total, "tokens": tokens * w / total}
            for name, w in weights.items()
        ] or [{"name": name, "share": 1.0, "samples": samples, "tokens": tokens} for name in self._only_source()]

    def _only_source(self) -> list[str]:
        prefixes = self.config.data.prefixes
        return list(prefixes) if len(prefixes) == 1 else []

    def _trace(self) -> dict[str, Any] | None:
        trace = read_trace(self.path / "trace.json")
        if trace and (since := self._since()) and trace["step"] and trace["step"] <= since:
            trace["earlier"] = f"traced at step {trace['step']}, before the layout changed at step {since}"
        elif trace:
            trace["bubble"] = planned.bubble_of(trace["spans"], self.config.layout.pp)
        return trace

    def _since(self) -> int:
        return layout_since(read_events(self.path))

    # The planner's figures.

    def _cluster(self, notes: Mapping[str, Any]) -> Cluster | None:
        return load_cluster(self.cluster) if self.cluster else _known_cluster(str(notes.get("device") or ""))

    def plan(self) -> dict[str, Any]:
        """Return the planner's figures, and the planned bytes beside the recorded ones.

        All but the comparison depend on the config, the cluster, the world and the trace, and are cached by them.
        """
        notes, lines = read_small(self.path / "run.json"), self.metrics.lines(COMPARED)
        trace = self.path / "trace.json"
        key = (self.config_text, self.cluster, notes.get("world"), trace.stat().st_mtime_ns if trace.exists() else 0)
        if self._planned is None or self._planned[0] != key:
            self._planned = (key, self._plan(notes))
        figures = dict(self._planned[1])
        world = self._world(notes)
        figures["comm"] = self._compared(lines, world) if world else {}
        return figures

    def _plan(self, notes: Mapping[str, Any]) -> dict[str, Any]:
        config, world, cluster = self.config, self._world(notes), self._cluster(notes)
        if world is None:
            return {}
        figures: dict[str, Any] = {}
        traced, step = self._trace(), None
        try:
            host = cluster.device.units == 1 if cluster else config.run.on_cpu
            figures["memory"] = planned.planned_memory(job_of(config, world, host=host))
            if cluster:
                node = min(cluster.node.devices, world)
                figures["step"], step = planned.planned_step(config, world, cluster, node)
                figures["room_bytes"] = cluster.device.memory_gib * 2**30 if not host else None
            if not cluster or (host and not self.cluster):
                figures["hint"] = planned.hint_of(str(notes.get("device") or "this device"), world, cluster)
            drawn = traced and "earlier" not in traced
            figures["simulated"] = planned.simulated_spans(config, traced["spans"], step) if traced and drawn else None
        except Exception as error:
            # The planner may not support this run. The page then shows the figures made so far, and the reason.
            figures["why_not"] = str(error)
        return figures

    def _bytes(self, world: int, samples: int, monitored: int, step: int) -> dict[str, dict[str, int]]:
        at = planned.step_kind(self.config, step)
        key = (self.config_text, world, samples, monitored, *at.values())
        if key not in self._known_bytes:
            self._known_bytes[key] = planned.planned_bytes(self.config, world, samples, monitored, **at)
        return self._known_bytes[key]

    def _compared(self, lines: list[dict[str, Any]], world: int) -> dict[str, Any]:
        """Return for each axis the recorded and the planned bytes of the last step, and the first step where they
        differ among those of the present layout.
        """
        axes: dict[str, Any] = {}
        varies = planned.unplanned_axes(self.config)
        # During the warm-up, gradients are summed in another way.
        warmup = self.config.comm.reduce.warmup_steps
        begin = max(warmup, self._since())
        for line in lines:
            comm, samples = line.get("comm"), line.get("global_batch")
            if not isinstance(comm, dict) or not isinstance(samples, int) or line["step"] <= begin:
                continue
            # A skipped step has no new weights to send.
            if line.get("skipped"):
                continue
            try:
                expected = self._bytes(world, samples, len(line.get("monitored") or {}), line["step"])
            except Exception as error:
                # The run may be of another version, with a feature that this planner does not know.
                return {"why_not": str(error)}
            for axis in sorted({*comm, *expected}):
                seen = numbers(comm.get(axis))
                plan = numbers(expected.get(axis))
                before = axes.get(axis, {}).get("differs_at")
                differs = None if axis in varies or seen == plan else line["step"]
                axes[axis] = {"recorded": seen, "planned": plan, "differs_at": before or differs,
                              "varies": axis in varies}  # fmt: skip
        return axes


@lru_cache(maxsize=16)
def _known_cluster(device: str) -> Cluster | None:
    return cluster_for(device)


def _details(lines: list[dict[str, Any]], recent: list[dict[str, Any]]) -> dict[str, Any]:
    """Return columns over the lines that were parsed whole, and the mean of each phase over the recent steps.

    The columns are phases, exposed seconds, monitored values, losses, the spread over ranks, and the load of experts.
    """
    columns: dict[str, Any] = {"step": [line.get("step") for line in lines]}
    groups = {"phases": "phases", "exposed": "exposed_s", "monitored": "monitored", "losses": "losses"}
    for name, key in groups.items():
        parts = [numbers(line.get(key)) for line in lines]
        names = list(dict.fromkeys(n for part in parts for n in part))
        columns[name] = {n: [part.get(n) for part in parts] for n in names}
    for key in ("busy_s", "waited_s", "data_s", "peak_bytes"):
        rows = [numbers(line["ranks"].get(key)) if isinstance(line.get("ranks"), dict) else {} for line in lines]
        if any(rows):
            columns[key] = {part: [row.get(part) for row in rows] for part in ("min", "median", "max", "rank")}
    columns["recent_phases"] = {
        name: statistics.fmean(values)
        for name in columns["phases"]
        if (values := [n for line in recent if (n := numbers(line.get("phases")).get(name)) is not None])
    }
    columns["experts"] = {key: [_busiest(line, key) for line in lines] for key in ("busiest", "busiest_rank")}
    columns["experts"] = {key: values for key, values in columns["experts"].items() if any(values)}
    return columns


def _busiest(line: Mapping[str, Any], key: str) -> float | None:
    """Return the largest of a line's figures for each block with experts; None if it has none."""
    experts = line.get("experts")
    values = experts.get(key) if isinstance(experts, dict) else None
    return max((v for v in values if is_number(v)), default=None) if isinstance(values, list) else None


def _counted(line: Mapping[str, Any]) -> str | None:
    """Describe the number of items in a step over which its loss is a mean; None if that is all its tokens."""
    unit = next((unit for unit in COUNTED if is_number(line.get(unit))), None)
    if unit is None or not line.get("tokens"):
        return None
    return f"{100 * line[unit] / line['tokens']:.3g} % learned" if unit == LEARNED else f"{line[unit]} {unit} a step"


def _last(column: Any) -> float | None:
    return float(column[-1]) if len(column) and np.isfinite(column[-1]) else None


def _flops(line: Mapping[str, Any]) -> float | None:
    """Return the model's FLOPs for one sample, computed from a line's TFLOP/s; None if it has none."""
    if not (is_number(line.get("tflops")) and line.get("global_batch")):
        return None
    return float(line["tflops"] * 1e12 * line["step_time_s"] / line["global_batch"])
