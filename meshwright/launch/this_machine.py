"""Checks before any rank starts that a run fits into the memory of this machine's devices, and suggests what would fit.

It also finds the planner's layout for `layout=auto` and elastic runs. torch is imported only to examine the devices.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from meshwright.config.load import AUTO_LAYOUT, config_from, merge_sections, nest, to_mapping, without_auto
from meshwright.config.sections import Config
from meshwright.errors import UserError, either, notice
from meshwright.plan.account import plain_words
from meshwright.plan.cluster import Cluster
from meshwright.plan.explain import no_fit_error
from meshwright.plan.job import Job, checked_job, job_of
from meshwright.plan.measured import cluster_for
from meshwright.plan.memory import Memory, largest
from meshwright.plan.schedules import choose_schedule
from meshwright.plan.search import (
    MARGIN_PERCENT,
    Candidate,
    SearchSpace,
    fixed_keys,
    search,
    space_of,
)
from meshwright.plan.stack import own_stack
from meshwright.show.units import seconds, size
from meshwright.spec.schedule.kinds import AUTO_SCHEDULE

OUT_OF_MEMORY = "out of memory|allocate memory|alloc_cpu"  # Words in the errors of torch and the system.
WAYS = 3  # The most suggestions in a message, and the most keys that a suggestion changes.


def on_cpu(config: Config) -> bool:
    """Return True if ranks of this machine compute on its CPUs."""
    from meshwright.device import accelerator_count

    return config.run.on_cpu or not accelerator_count()


def here(config: Config, ranks: int) -> Job:
    """Return the job of a config on this machine's devices, with the kernels available on them."""
    return checked_job(config, ranks, host=on_cpu(config))


def room_of(config: Config, local_ranks: int, free: bool = True) -> tuple[str, float]:
    """Return the name of the memory that a rank uses, and the number of bytes that it may use. A host's memory
    counts as far as it is free now, or with `free` False as a whole."""
    from meshwright.device import Device, accelerator_count, host_memory_bytes

    if on_cpu(config):
        return "this machine's free memory, for each of its ranks", host_memory_bytes(free) / local_ranks
    sharing = -(-local_ranks // accelerator_count())
    return "the device", Device.find(config.run.device).memory_bytes() / sharing


def check_memory(config: Config, ranks: int, local_ranks: int | None = None) -> None:
    """Refuse a run that is certain not to fit on this machine, and warn of one that probably does not.

    The size of weights, gradients and states is known to the byte: if these do not fit, raise. The peak is an estimate.
    """
    need = largest(here(config, ranks))
    memory, room = room_of(config, local_ranks or ranks)
    ways = f"{size(room)} ({memory}): {ways_to_fit(config, ranks, room)}" if need.peak > room else ""
    if need.states > room:
        raise UserError(f"a rank's weights, gradients and optimizer states take {size(need.states)}, and it has {ways}")
    if ways:
        print(f"meshwright: warning: a rank needs about {size(need.peak)} at its peak, and has {ways}", file=sys.stderr)


def ways_to_fit(config: Config, ranks: int, room: float) -> str:
    """Suggest up to three changes of the config with which a rank needs at most `room` bytes.

    All suggestions change the same number of keys, which is the smallest possible.
    """
    ways: list[str] = []
    singles = list(changes(config, ranks))
    for count in range(1, WAYS + 1):
        for combination in combinations(singles, count):
            keys = {key: value for change in combination for key, value in change.items()}
            # Fewer keys than changes: two of them set the same key, so they can't be combined.
            need = _memory_with(config, ranks, keys) if len(keys) == count else None
            words = " ".join(f"{key}={value}" for key, value in keys.items())
            if need is not None and need.peak <= room:
                ways.append(f"{words} ({size(need.peak)})")
            if len(ways) == WAYS:
                return f"try {either(ways)}"
        if ways:
            break
    more = f"`meshwright plan` finds a layout on more than {ranks} ranks" if ranks > 1 else "use more ranks"
    return f"try {either(ways)}" if ways else f"no other zero.stage, recompute.mode or micro-batch fits: {more}"


def changes(config: Config, ranks: int) -> Iterator[dict[str, Any]]:
    """Yield the changes of one key that may save memory."""
    c = config
    for stage in range(max(1, c.zero.stage + 1), 4):
        yield {"zero.stage": stage}
    if c.recompute.blocks != 1:
        yield {"recompute.mode": "full"}
    if c.train.micro_batch > 1:
        yield {"train.micro_batch": 1}
    if c.train.precision_facts.is_wide:
        yield {"train.precision": "bf16"}
    for tp in (2, 4, 8):
        if tp > c.layout.tp and ranks % tp == 0:
            yield {"layout.tp": tp}


def _memory_with(config: Config, ranks: int, keys: Mapping[str, Any]) -> Memory | None:
    """Return the memory that a rank needs with these keys changed; None if the rules don't allow the change."""
    try:
        return largest(here(config_from(merge_sections(to_mapping(config), nest(keys))), ranks))
    except UserError:
        return None


def out_of_memory(config: Config, ranks: int, local_ranks: int, rank: int, error: BaseException) -> UserError | None:
    """Return an error that explains how to fit, for a rank that ran out of memory; None for any other error."""
    from meshwright.comm.group import CommError
    from meshwright.device import Device

    other = isinstance(error, CommError) or not re.search(OUT_OF_MEMORY, str(error))
    if other and not isinstance(error, MemoryError):
        return None

    device = Device.choose(config.run.device, 0)
    memory, room = room_of(config, local_ranks)
    held = device.peak_bytes()
    planned = largest(here(config, ranks)).peak
    most = f"{size(held)} were held, " if held else ""
    # The estimate was too low if the rank ran out of memory although the plan fits, so aim for less than was planned.
    return UserError(
        f"rank {rank} ran out of memory ({most}planned were {size(planned)}, and it has {size(room)} of {memory}): "
        f"{ways_to_fit(config, ranks, min(room, 0.95 * planned))}"
    )


MARGIN = 1 - MARGIN_PERCENT / 100  # A layout may use this share of a device's memory, as for `plan`.


def best_layout(config: Config, ranks: int, cluster: Cluster, limit_gib: float, fixed: Sequence[str] = ()) -> Candidate:
    """Return the fastest layout that fits. The keys in `fixed` keep their values."""
    host = cluster.device.units == 1
    # The layout is for this machine's nodes, not for the ones in the config. The order in which rings visit the nodes
    # changes no sum and no number of bytes, so it can be dropped.
    plain = replace(config, layout=replace(config.layout, node_size=0), comm=replace(config.comm, switches=()))
    job = Job(plain, ranks, own_stack(plain, host), min(cluster.node.devices, ranks), host=host)
    space: SearchSpace = space_of(plain, fixed_keys(list(fixed)))
    result = search(job, cluster, limit_gib, space)
    if not result.candidates:
        raise no_fit_error(job, cluster, result, limit_gib, space, list(fixed))
    return result.candidates[0]


def words_of(base: Config, best: Candidate) -> list[str]:
    """Return the keys that the plan changes in a config, as words (key=value).

    `layout.node_size` is left out: the run finds the number of ranks on a node by itself.
    """
    before, after = to_mapping(base), to_mapping(best.job.config)
    sections = {"layout": None, "pipeline": None, "zero": None, "recompute": None, "train": ["micro_batch"],
                "comm": ["switches"]}  # fmt: skip
    changed: dict[str, Any] = {}
    for section, keys in sections.items():
        for key in keys or after[section]:
            if after[section][key] != before[section][key] and key != "node_size":
                changed[f"{section}.{key}"] = after[section][key]
    return [f"{key}={_written(value)}" for key, value in changed.items()]


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace("(", "[").replace(")", "]")


def resolve(config: Config, words: Sequence[str], ranks: int, says: bool = True) -> list[str]:
    """Return the words with `layout=auto` replaced by the planner's choice for `ranks` ranks on this machine's devices.

    `config` is the config that the other words make.
    """
    given = without_auto(words)
    cluster, limit = devices_of(config, ranks)
    best = best_layout(config, ranks, cluster, limit, given)
    chosen = words_of(config, best)
    if says:
        time = f"{seconds(best.cost.step_s)} a step predicted for {cluster.device.name}"
        keys = f"in keys: {' '.join(chosen) or 'as given'}"
        notice(f"layout=auto: {plain_words(best.job.config, ranks)} ({time}); {keys}")
    return [*given, *chosen]


# Ways to divide a model among devices whose speed is not known, the fastest first.
PLAIN_WAYS: tuple[dict[str, Any], ...] = (
    {}, {"zero.stage": 1}, {"zero.stage": 3}, {"recompute.mode": "full"}, {"zero.stage": 3, "recompute.mode": "full"}
)  # fmt: skip


def layout_words(config: Config, words: Sequence[str], ranks: int) -> list[str]:
    """Return the words with the planner's layout or, on devices that it knows no cluster of, with the first of a few
    plain ways that fits into memory; with the last way if none does."""
    if devices_are_known(config, ranks):
        return resolve(config, words, ranks)
    room = MARGIN * room_of(config, ranks)[1]
    needs = [(_memory_with(config, ranks, way), way) for way in PLAIN_WAYS]
    fits = next((way for need, way in needs if need is not None and need.peak <= room), PLAIN_WAYS[-1])
    given = {word.partition("=")[0] for word in words}
    return [*words, *(f"{key}={value}" for key, value in fits.items() if key not in given)]


def devices_are_known(config: Config, ranks: int) -> bool:
    """Return True if some cluster describes this machine's devices, so that the planner can choose a layout."""
    from meshwright.device import Device

    gib = room_of(config, ranks)[1] / 2**30
    return on_cpu(config) or cluster_for(Device.find(config.run.device).name, gib) is not None


def devices_of(
    config: Config, ranks: int, asked: str = AUTO_LAYOUT, own: str = "layout", free: bool = True
) -> tuple[Cluster, float]:
    """Return the cluster that describes this machine's devices, and the GiB that a rank's layout may use. `asked` is
    the word that needs them, and `own` names what to give instead."""
    from meshwright.device import Device

    device = Device.find(config.run.device)
    _, room = room_of(config, ranks, free)
    limit = MARGIN * room / 2**30
    cluster = cluster_for("cpu" if device.module is None else device.name, room / 2**30)
    if cluster is None:
        raise UserError(
            f"{asked} knows no cluster of {device.name}: give the {own} yourself, or plan with a profile of this "
            "machine (`meshwright comm bench --out here.yaml`, then `meshwright plan CONFIG --cluster here.yaml`)"
        )
    return cluster, limit


def with_schedule(config: Config, ranks: int, local_ranks: int, says: bool = True) -> Config:
    """Return the config with `pipeline.schedule: auto` replaced by the schedule that is the fastest on this machine's
    devices and fits. All ranks of a launcher choose the same one, since nothing that changes is measured."""
    if config.pipeline.schedule != AUTO_SCHEDULE:
        return config
    asked = f"pipeline.schedule={AUTO_SCHEDULE}"
    cluster, limit = devices_of(config, local_ranks, asked, "schedule", free=False)
    node = config.layout.node_size or local_ranks
    host = cluster.device.units == 1
    job = job_of(config, ranks, own_stack(config, host), cluster_node=node, host=host)
    choice = choose_schedule(job, cluster, limit)
    if says:
        notice(f"{asked}: {choice.why()}")
    return choice.config


def schedule_words(config: Config, ranks: int, local_ranks: int, says: bool = True) -> list[str]:
    """Return the words by which `with_schedule` changes a config."""
    chosen = with_schedule(config, ranks, local_ranks, says)
    if chosen is config:
        return []
    return [f"pipeline.schedule={chosen.pipeline.schedule}", f"layout.chunks={chosen.layout.chunks}"]


def choose(config: Config, local: int, ranks: int) -> tuple[int, list[str]]:
    """Choose the layout for at most `ranks` ranks after a loss, with the same global batch.

    Return the largest number of ranks that has a layout, and the keys that the layout with the shortest predicted step
    changes in the config. `local` is the number of ranks on this machine.
    """
    cluster, limit = devices_of(config, local)
    first_error: UserError | None = None
    for count in range(ranks, 0, -1):
        try:
            return count, words_of(config, best_layout(config, count, cluster, limit))
        except UserError as error:
            first_error = first_error or error
    raise first_error or UserError("there is no rank left to continue with")
