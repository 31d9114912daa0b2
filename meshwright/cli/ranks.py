"""How a command gets its ranks: it starts local ones, or is itself one rank of torchrun or srun. No torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from meshwright.comm.process import quiet_torch
from meshwright.errors import UserError
from meshwright.launch.launch import guarded, launch
from meshwright.launch.processes import Place, find_place


def place_in_launcher(args: argparse.Namespace) -> Place | None:
    """Returns this process's place if torchrun or srun started it."""
    place = find_place()
    if place.launched and args.nproc is not None:
        raise UserError("--nproc starts ranks, and this process is already one rank of a launcher: leave it out")
    return place if place.launched else None


def run_as_rank(
    place: Place, prepare: Callable[[Place], None], main: Callable[..., None], args: argparse.Namespace, stops: bool
) -> int:
    """Runs as one rank started by torchrun or srun. A mistake that `prepare` finds is the same on every rank, so one
    rank per machine reports it."""
    quiet_torch()
    try:
        prepare(place)
    except UserError:
        if place.local_rank == 0:
            raise
        return 2
    guarded(None, stops, main, args)
    return 0


def start(
    ranks: int,
    main: Callable[..., None],
    args: argparse.Namespace,
    restarts: int = 0,
    stops: bool = False,
    loses: Callable[[], str] | None = None,
    tell: Callable[[str, str], None] = lambda kind, text: None,
) -> int:
    """Runs on local ranks; one rank alone, if it need not be started again, is this process. `loses` says what is lost
    when a second Ctrl-C ends it; `tell` hears of restarts and failures."""
    if ranks > 1 or restarts:
        return launch(ranks, restarts, main, args, stops=stops, loses=loses, tell=tell)
    try:
        main(args)
    except KeyboardInterrupt:
        if loses is None:
            raise
        print(f"meshwright: {loses()}", file=sys.stderr)
        return 130
    return 0


def local_devices(kind: str, least: int) -> int:
    if kind == "cpu":
        return least
    from meshwright.device import accelerator_count

    return max(least, accelerator_count())
