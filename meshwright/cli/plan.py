"""`meshwright plan`: search the layouts of a model on a cluster and write the config of the best one. No torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.cli.common_args import (
    add_batch,
    add_devices,
    add_tokens,
    cluster_arguments,
    command_words,
    planned_from_args,
    tokens_from,
)
from meshwright.config.memory import RecomputeConfig
from meshwright.config.rules import context_is_shared, features_fit, first_broken_rule
from meshwright.config.sections import Config
from meshwright.disk import write
from meshwright.errors import UserError, notice
from meshwright.plan.account import experts_json, layout_of_cost, layout_words, whole_run
from meshwright.plan.cluster import Cluster
from meshwright.plan.cost import predict_cost
from meshwright.plan.explain import against, no_fit_error, why_best, yaml_of
from meshwright.plan.job import Job
from meshwright.plan.memory import device_memory, needed_gib
from meshwright.plan.page import page, ranking_cells
from meshwright.plan.question import Question, question_of
from meshwright.plan.rank import rank_json
from meshwright.plan.schedules import against_others
from meshwright.plan.search import (
    MARGIN_PERCENT,
    SPACE_FIELDS,
    Candidate,
    SearchResult,
    SearchSpace,
    fixed_keys,
    search,
    space_of,
    usable_gib,
)
from meshwright.plan.stack import Stack
from meshwright.plan.target import Target, devices_for, target_of
from meshwright.show.progress import searching
from meshwright.show.terminal import table
from meshwright.show.units import count, percent, seconds
from meshwright.spec.model.graph import active_parameters, parameter_count

# The keys that narrow the search. If no layout is found, the error names those that were given.
NARROWING_KEYS = (*SPACE_FIELDS, "zero.shard_group", "train.ramp", "run.eval_samples")
EXAMPLES = """example:
  meshwright plan llama3-70b --cluster h100-80g-dgx --devices 256 --global-batch 1024
  meshwright plan mt-nlg-530b --cluster a100-80g-dgx --devices 3360 --global-batch 1920 --html plan.html
  meshwright plan llama3-70b --cluster h100-80g-dgx --devices 256 --global-batch 1024 --tokens 15T --html plan.html
  meshwright plan llama3-8b --cluster h100-80g-dgx --devices 16 --global-batch 64 --why layout.tp=8 layout.pp=2
  meshwright plan config.yaml --cluster a100-40g-dgx --devices 64 --global-batch 512 --fit 36 --json
  meshwright plan llama3-8b --devices 64 --global-batch 256 --cluster h100-80g-dgx --cluster l40s-48g --network 25gbe

A key of the layout that is given here stays fixed, e.g. layout.tp=8, layout.ep=8, recompute.mode=full, zero.stage=1 or
pipeline.schedule=1f1b; those of a config file are searched like the rest. Layouts that `train` would refuse are not
ranked."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cluster_arguments(parser, several=True)
    add_devices(parser)
    add_batch(parser)
    parser.add_argument("--fit", type=float, metavar="GiB", help="memory to fit into (default: the device's)")
    margin = "per cent of the device's memory to leave free (default 6; does not apply to --fit)"
    parser.add_argument("--margin", type=float, default=MARGIN_PERCENT, metavar="PERCENT", help=margin)
    grids = "also try 2D, 2.5D and 3D grids of tensor-parallel ranks (the search takes longer)"
    parser.add_argument("--tp-grids", action="store_true", help=grids)
    parser.add_argument("--top", type=int, default=10, metavar="K", help="how many to show (default 10)")
    add_tokens(parser)
    why = "also answer for the best layout with these keys, e.g. --why layout.tp=8 layout.pp=2"
    parser.add_argument("--why", nargs="+", action="append", default=[], metavar="key=value", help=why)
    out = "write the best layout's config there"
    parser.add_argument("--out", type=Path, metavar="FILE", help=out)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report that needs no network")


def run(args: argparse.Namespace) -> None:
    names: list[str] = args.cluster or []
    if len(names) > 1:
        _compare(args, names)
        return
    found = ranked(args, names[0] if names else None)
    asked, shown, tokens = found.of, found.shown, tokens_from(args)
    answers = [_why_not(args, asked, words, shown[0]) for words in args.why]
    write(args.out, lambda: yaml_of(shown[0]))
    question = question_of(asked.target, found.base, asked.cluster, asked.limit, tokens)
    write(args.html, lambda: page(question, found.reasons, shown, found.result.outcomes, answers))
    if args.json:
        print(json.dumps(_json(shown, found.known, tokens) | ({"why": answers} if answers else {})))
        return
    print(_text(question, shown, found.reasons, answers))
    if args.out is None:
        notice(
            "next: --out FILE writes this layout as a config for train, --html FILE a page with pictures and sliders"
        )


@dataclass(frozen=True)
class Ranking:
    """The best layouts of a search, the best one first."""

    of: _Asked
    base: Job
    result: SearchResult
    shown: list[Candidate]
    reasons: list[str]
    known: Candidate | None  # that of the target's published run


def ranked(args: argparse.Namespace, cluster_name: str | None) -> Ranking:
    """Search the layouts on one cluster, and explain the best."""
    asked, base, result = _searched(args, cluster_name)
    shown = without_twins(result.candidates)[: args.top]
    reasons = why_best(result.candidates, result.layouts, result.fitting)
    if shown[0].job.layout.pp > 1 and "pipeline.schedule" not in fixed_keys(args.words):
        reasons.append(f"Schedule {against_others(shown[0], asked.limit).why()}.")
    if result.broken:
        reasons.append(f"{result.broken:,} more break a rule, the most promising of them this one: {result.refused}.")
    known = known_run(asked.target, asked.cluster, base.stack, base)
    if known:
        reasons.append(_compare_with_known(asked.target.name, known, shown[0]))
    return Ranking(asked, base, result, shown, reasons, known)


def _searched(args: argparse.Namespace, cluster_name: str | None) -> tuple[_Asked, Job, SearchResult]:
    """Search the layouts on one cluster. If none fits, raise an error that says why."""
    args = argparse.Namespace(**{**vars(args), "cluster": cluster_name})
    target, cluster, stack = planned_from_args(args, command_words(args), as_run=False)
    devices = devices_for(target, args.devices)
    if (args.fit is not None and not 0 < args.fit < float("inf")) or args.top < 1:
        raise UserError("--fit must be a number of GiB above zero, and --top at least 1")
    if not 0 <= args.margin < 100:
        raise UserError(f"--margin {args.margin:g} must be per cent of the device's memory, e.g. --margin 6")
    asked = _Asked(target, cluster, stack, devices, args.fit or usable_gib(cluster, args.margin), args.tp_grids)
    base, space, result = asked.searched(args.words)
    if not result.candidates:
        fixed = [word for word in args.words if word.partition("=")[0] in NARROWING_KEYS]
        raise no_fit_error(base, cluster, result, asked.limit, space, fixed)
    return asked, base, result


@dataclass(frozen=True)
class _Asked:
    """The parts that all searches of one command share."""

    target: Target
    cluster: Cluster
    stack: Stack
    devices: int
    limit: float
    grids: bool

    def searched(self, words: list[str], config: Config | None = None) -> tuple[Job, SearchSpace, SearchResult]:
        """Search the layouts with the keys of the layout that `words` fix."""
        for word in words:
            # A split in a config file is ignored. One on the command line is refused, since the user expects an effect.
            if word.startswith("pipeline.split="):
                raise UserError(f"{word} would have no effect: leave it out, the search splits the layers itself")
        node, host = min(self.cluster.node.devices, self.devices), self.cluster.device.units == 1
        base = Job(config or self.target.config, self.devices, self.stack, node, host=host)
        space = _space(base.config, words)
        if self.grids and "layout.tp_grid" not in fixed_keys(words):
            space = replace(space, grids=())
        with searching("searching layouts") as show:
            result = search(base, self.cluster, self.limit, space, watch=lambda n, of, best: show(n, of, _so_far(best)))
        return base, space, result


def _why_not(args: argparse.Namespace, asked: _Asked, words: list[str], best: Candidate) -> dict[str, str]:
    """Return the user's question, and the best layout with these keys or the reason why there is none."""
    text = " ".join(words)
    free = [word for word in words if word.partition("=")[0] not in SPACE_FIELDS]
    if free:
        raise UserError(f"--why {free[0]}: ask about keys that the search chooses, such as {', '.join(SPACE_FIELDS)}")
    given = [*args.words, *words]
    target = target_of(args.target, [*command_words(args), *words], as_run=False)
    config = replace(target.config, train=replace(target.config.train, precision=best.job.config.train.precision))
    try:
        _, _, result = asked.searched(given, config)
    except UserError as error:
        return {"words": text, "answer": f"This can't be planned: {error}."}
    if result.candidates:
        found = result.candidates[0]
        slower = found.cost.step_s / best.cost.step_s - 1
        answer = f"The best such layout takes {seconds(found.cost.step_s)}, {percent(slower)} more"
        answer += f" ({layout_words(layout_of_cost(found.cost))})"
        return {"words": text, "answer": f"{answer}: it loses {against(best.cost, found.cost)}."}
    if result.nearest:
        gib, job = result.nearest
        nearest = f"the nearest, with dp={job.layout.dp}, micro-batch {job.config.train.micro_batch} and "
        nearest += f"ZeRO {job.config.zero.stage}, needs {gib:.1f} GiB of {asked.limit:.1f}"
        return {"words": text, "answer": f"No such layout fits: {nearest}."}
    refused = result.refused or "none divides the devices, the batch and the model"
    return {"words": text, "answer": f"No such layout is possible: {refused}."}


def _so_far(best: Candidate | None) -> str:
    """Describe the best layout of an unfinished search."""
    return f"best so far {seconds(best.cost.step_s)}: {layout_words(layout_of_cost(best.cost))}" if best else ""


def _compare(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Print the best layout on each cluster, the fastest first, and why there is none on the others."""
    if args.out or args.html or args.why:
        why = "--out, --html and --why are about one plan"
        raise UserError(f"{why}: name one --cluster, or leave them out to compare clusters")
    best: dict[str, Candidate] = {}
    reasons: dict[str, str] = {}
    for name in names:
        try:
            asked, _, result = _searched(args, name)
        except UserError as error:
            reasons[name] = str(error)
        else:
            best[asked.cluster.name] = result.candidates[0]
    if not best:
        raise UserError("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
    ranked = dict(sorted(best.items(), key=lambda item: item[1].cost.step_s))
    if args.json:
        rows = {name: {**_candidate(each), "usd_per_billion_tokens": _dollars(each)} for name, each in ranked.items()}
        print(json.dumps({"clusters": rows, "without_a_layout": reasons}))
        return
    heads = ("cluster", "layout", "step", "tokens/s", "MFU", "GiB", "USD/B tokens")
    print(table([heads, *(_compared_cells(name, each) for name, each in ranked.items())]))
    for name, reason in reasons.items():
        print(f"{name}: {reason}")


def _dollars(candidate: Candidate) -> float:
    """Return the US dollars of a billion tokens, at the price in the cluster file."""
    return whole_run(candidate.cost, 1e9)["cost_usd"]


def _compared_cells(name: str, candidate: Candidate) -> tuple[str, ...]:
    cost = candidate.cost
    speed = f"{cost.tokens_per_s_device * cost.job.world:,.0f}"
    words = layout_words(layout_of_cost(cost))
    memory, dollars = f"{candidate.memory_gib:.1f}", f"{_dollars(candidate):,.2f}"
    return name, words, seconds(cost.step_s), speed, f"{100 * cost.mfu:.1f} %", memory, dollars


def without_twins(candidates: list[Candidate]) -> list[Candidate]:
    """Return the candidates, but only the first of those that look the same: with the same figures, or with the same
    layout except for the chunks, the schedule, the split and the order of the axes."""
    alike = ("chunks", "order", "schedule", "split")
    seen: set[object] = set()
    kept = []
    for candidate in candidates:
        layout = layout_of_cost(candidate.cost)
        keys = {ranking_cells(candidate)[1:], str({key: layout[key] for key in layout if key not in alike})}
        if not keys & seen:
            kept.append(candidate)
        seen |= keys
    return kept


# Context parallelism is tried from this sequence length on: the search then takes about three times as long.
LONG_CONTEXT = 16384
# The values of recompute.pieces that are tried for long sequences.
PIECES = (1, 8)


def _space(config: Config, words: list[str]) -> SearchSpace:
    """Return the search space: all keys that the words leave open. For long sequences it also has context parallelism,
    activations offloaded to host memory and MLPs computed in pieces."""
    fixed = fixed_keys(words)
    space = space_of(config, fixed)
    probe = replace(config, layout=replace(config.layout, cp=2))
    long = config.model.seq >= LONG_CONTEXT
    if "layout.cp" not in fixed and long and not first_broken_rule(probe, 2, [features_fit, context_is_shared]):
        space = replace(space, cp=(1, 2, 4, 8))
    if "recompute.offload" not in fixed and long and any(RecomputeConfig(mode).blocks for mode in space.recompute):
        space = replace(space, offload=(False, True))
    chunks = not config.model.experts.count and not config.train.precision_facts.scales_products
    if "recompute.pieces" not in fixed and long and chunks:
        space = replace(space, pieces=PIECES)
    return space


def known_run(target: Target, cluster: Cluster, stack: Stack, base: Job) -> Candidate | None:
    """Return the layout of the target's published run, with the same stack, or None if its cluster, devices or batch
    differ from those of the search."""
    run = target.run
    asked = (cluster.name, base.world, base.global_batch)
    if not run or (run["cluster"], run["devices"], run["train"]["global_batch"]) != asked:
        return None
    published = target_of(target.name).config
    published = replace(published, train=replace(published.train, precision=target.config.train.precision))
    job = replace(base, config=published)
    return Candidate(predict_cost(job, cluster), needed_gib(job, cluster))


def _compare_with_known(name: str, known: Candidate, best: Candidate) -> str:
    """Return a sentence that compares the published layout with the best one."""
    slower = known.cost.step_s / best.cost.step_s - 1
    text = f"The layout that {name} ran with ({layout_words(layout_of_cost(known.cost))}) would take "
    text += f"{seconds(known.cost.step_s)} here, {percent(slower)} more"
    return text + (f": it loses {against(best.cost, known.cost)}." if slower > 0.02 else ".")


def _candidate(candidate: Candidate) -> dict[str, Any]:
    """Return a candidate as --json prints it."""
    cost = candidate.cost
    return {
        "layout": layout_of_cost(cost), "step_time_s": cost.step_s, "tokens_per_s_per_device": cost.tokens_per_s_device,
        "mfu": cost.mfu, "hfu": cost.hfu, "memory_gib": candidate.memory_gib, "bubble": cost.bubble,
        "comm_s": {name: axis.seconds for name, axis in cost.axes.items()},
        "exposed_comm_s": {name: axis.exposed_seconds for name, axis in cost.axes.items()},
        "parameters": parameter_count(cost.job.model), "active_parameters": active_parameters(cost.job.model),
        **experts_json(cost.job), "precision": cost.job.config.train.precision,
        "rank": rank_json(cost.job, cost.memory.pp_rank),
        "device": device_memory(cost.job, cost.cluster, cost.memory).as_json(),
    }  # fmt: skip


def _json(shown: list[Candidate], known: Candidate | None, tokens: float | None) -> dict[str, Any]:
    document = {"best": _candidate(shown[0]), "candidates": [_candidate(candidate) for candidate in shown]}
    if tokens:
        document["run"] = whole_run(shown[0].cost, tokens)
    if known:
        document["published"] = _candidate(known)
    return document


def _text(question: Question, shown: list[Candidate], reasons: list[str], answers: list[dict[str, str]]) -> str:
    rows = [("layout", "step", "tokens/s/device", "MFU", "bubble", "GiB"), *map(ranking_cells, shown)]
    best, facts = shown[0].cost, question.facts
    device = device_memory(best.job, best.cluster, best.memory)
    memory = f"Memory of the best layout: {device.total:.1f} GiB of a device = {device.words()}."
    asked = (
        f"{facts['model']}; {facts['sequence']} x {facts['global batch']}; {facts['devices']} ({facts['cluster']}); "
    )
    lines = [f"{asked}{facts['precision']}, {facts['software']}.", "", *reasons]
    if question.tokens:
        run = whole_run(best, question.tokens)
        lines.append(
            f"{count(question.tokens)} tokens take {run['days']:.1f} days, {run['device_hours']:,.0f} device hours, "
            f"{run['energy_mwh']:,.0f} MWh of the devices and {run['cost_usd']:,.0f} USD at the cluster file's price."
        )
    lines += ["", table(rows), "", memory, "", "Why the next ones are slower:"]
    for candidate in shown[1:5]:
        lines.append(f"  {layout_words(layout_of_cost(candidate.cost))}: {against(shown[0].cost, candidate.cost)}")
    return "\n".join(lines + [f"Why not {one['words']}? {one['answer']}" for one in answers])
