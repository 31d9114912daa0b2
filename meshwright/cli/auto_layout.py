"""`layout=auto`: the planner's best layout of a config on the devices at hand, as `key=value` words. torch is imported
only to look at the devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshwright.config.load import to_mapping, without_auto
from meshwright.config.sections import Config
from meshwright.errors import UserError, notice
from meshwright.plan.account import plain_words
from meshwright.plan.cluster import Cluster
from meshwright.plan.job import Job
from meshwright.plan.measured import cluster_for
from meshwright.plan.search import Candidate, SearchSpace, fixed_keys, search, space_of, why_nothing
from meshwright.plan.stack import own_stack
from meshwright.show.units import seconds

MARGIN = 0.94  # of a device's memory may be planned with


def best_layout(config: Config, ranks: int, cluster: Cluster, limit_gib: float, fixed: Sequence[str] = ()) -> Candidate:
    """The fastest layout that fits; the keys `fixed` stay as they are."""
    host = cluster.device.units == 1
    # A layout for other nodes than a config's own; in which order rings visit them changes no sum and no byte.
    plain = replace(config, layout=replace(config.layout, node_size=0), comm=replace(config.comm, switches=()))
    job = Job(plain, ranks, own_stack(plain, host), min(cluster.node.devices, ranks), host=host)
    space: SearchSpace = space_of(plain, fixed_keys(list(fixed)))
    found = search(job, cluster, limit_gib, space)
    if not found.candidates:
        raise why_nothing(job, cluster, found, limit_gib, space, list(fixed))
    return found.candidates[0]


def words_of(base: Config, best: Candidate) -> list[str]:
    """What the plan changes in a config, as words. How many ranks a node has, the run finds by itself."""
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
    """The words with `layout=auto` replaced by the planner's choice for so many ranks of this machine's devices.
    `config` is what the other words make."""
    given = without_auto(words)
    cluster, limit = devices_of(config, ranks)
    best = best_layout(config, ranks, cluster, limit, given)
    chosen = words_of(config, best)
    if says:
        time = f"{seconds(best.cost.step_s)} a step predicted for {cluster.device.name}"
        keys = f"in keys: {' '.join(chosen) or 'as given'}"
        notice(f"layout=auto: {plain_words(best.job.config, ranks)} ({time}); {keys}")
    return [*given, *chosen]


def devices_of(config: Config, ranks: int) -> tuple[Cluster, float]:
    """The cluster that stands for these devices, and how many GiB a rank may plan with."""
    from meshwright.cli.fits import room_of
    from meshwright.device import Device

    device = Device.find(config.run.device)
    _, room = room_of(config, ranks)
    limit = MARGIN * room / 2**30
    cluster = cluster_for("cpu" if device.module is None else device.name, room / 2**30)
    if cluster is None:
        raise UserError(
            f"layout=auto knows no cluster of {device.name}: give the layout yourself, or plan with a profile of this "
            "machine (`meshwright comm bench --out here.yaml`, then `meshwright plan CONFIG --cluster here.yaml`)"
        )
    return cluster, limit
