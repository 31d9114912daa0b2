"""Whether a run fits into the memory of the devices at hand, said before any rank starts; and what would fit. torch is
imported only to look at the devices."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from meshwright.config.load import config_from, merged, nested, to_mapping
from meshwright.config.sections import Config
from meshwright.errors import UserError, either
from meshwright.plan.job import Job, checked_job
from meshwright.plan.memory import Memory, largest
from meshwright.show.units import size

OUT_OF_MEMORY = "out of memory|allocate memory|alloc_cpu"  # what torch's and the system's errors say
WAYS = 3  # that are named, and keys that one may change


def on_cpu(config: Config) -> bool:
    """Whether ranks of this machine compute on its CPUs."""
    from meshwright.device import accelerator_count

    return config.run.device == "cpu" or not accelerator_count()


def here(config: Config, ranks: int) -> Job:
    """The job of a config on this machine's devices, with the kernels that they have."""
    return checked_job(config, ranks, host=on_cpu(config))


def room_of(config: Config, local_ranks: int) -> tuple[str, float]:
    """What a rank has its memory from, and how many bytes of it."""
    from meshwright.device import Device, accelerator_count, host_memory_bytes

    if on_cpu(config):
        return "this machine's free memory, for each of its ranks", host_memory_bytes() / local_ranks
    sharing = -(-local_ranks // accelerator_count())
    return "the device", Device.find(config.run.device).memory_bytes() / sharing


def check_memory(config: Config, ranks: int, local_ranks: int | None = None) -> None:
    """Refuses a run on this machine whose weights, gradients and states alone, which are known to the byte, do not fit;
    warns of one whose peak, which is nearly known, does not."""
    need = largest(here(config, ranks))
    what, room = room_of(config, local_ranks or ranks)
    ways = f"{size(room)} ({what}): {ways_to_fit(config, ranks, room)}" if need.peak > room else ""
    if need.states > room:
        raise UserError(f"a rank's weights, gradients and optimizer states take {size(need.states)}, and it has {ways}")
    if ways:
        print(f"meshwright: warning: a rank needs about {size(need.peak)} at its peak, and has {ways}", file=sys.stderr)


def ways_to_fit(config: Config, ranks: int, room: float) -> str:
    """Up to three changes of the config that need no more than `room` bytes, those of the fewest keys first."""
    found: list[str] = []
    singles = list(changes(config, ranks))
    for count in range(1, WAYS + 1):
        for several in combinations(singles, count):
            keys = {key: value for each in several for key, value in each.items()}
            need = _changed(config, ranks, keys) if len(keys) == count else None
            words = " ".join(f"{key}={value}" for key, value in keys.items())
            if need is not None and need.peak <= room:
                found.append(f"{words} ({size(need.peak)})")
            if len(found) == WAYS:
                return f"try {either(found)}"
        if found:
            break
    more = f"`meshwright plan` finds a layout on more than {ranks} ranks" if ranks > 1 else "use more ranks"
    return f"try {either(found)}" if found else f"no other zero.stage, recompute.mode or micro-batch fits: {more}"


def changes(config: Config, ranks: int) -> Iterator[dict[str, Any]]:
    c = config
    for stage in range(max(1, c.zero.stage + 1), 4):
        yield {"zero.stage": stage}
    if c.recompute.mode != "full":
        yield {"recompute.mode": "full"}
    if c.train.micro_batch > 1:
        yield {"train.micro_batch": 1}
    if c.train.precision in ("fp32", "fp64"):
        yield {"train.precision": "bf16"}
    for tp in (2, 4, 8):
        if tp > c.layout.tp and ranks % tp == 0:
            yield {"layout.tp": tp}


def _changed(config: Config, ranks: int, keys: Mapping[str, Any]) -> Memory | None:
    try:
        return largest(here(config_from(merged(to_mapping(config), nested(keys))), ranks))
    except UserError:
        return None  # the rules don't allow it


def out_of_memory(config: Config, ranks: int, local_ranks: int, rank: int, error: BaseException) -> UserError | None:
    """The sentence for a rank that ran out of memory; None for any other error."""
    from meshwright.comm.group import CommError
    from meshwright.device import Device

    other = isinstance(error, CommError) or not re.search(OUT_OF_MEMORY, str(error))
    if other and not isinstance(error, MemoryError):
        return None

    device = Device.choose(config.run.device, 0)
    what, room = room_of(config, local_ranks)
    held, planned = device.peak_bytes(), largest(here(config, ranks)).peak
    most = f"{size(held)} were held, " if held else ""
    return UserError(
        f"rank {rank} ran out of memory ({most}planned were {size(planned)}, and it has {size(room)} of {what}): "
        f"{ways_to_fit(config, ranks, min(room, 0.95 * planned))}"
    )
