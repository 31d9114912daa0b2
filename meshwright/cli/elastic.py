"""`faults.elastic: true`: runs that go on with the ranks that are left. No torch, except to look at the devices."""

from __future__ import annotations

import argparse
import re
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.checkpoint.keeper import KeeperProcess
from meshwright.config.rules import TRAINING_RULES, first_broken_rule
from meshwright.config.sections import Config
from meshwright.errors import UserError, notice
from meshwright.launch.elastic import Elastic, Wishes
from meshwright.launch.launch import Outcome, Team, attempt_of, conclude, launching
from meshwright.launch.processes import LOOPBACK, Place, is_loopback, outward_address
from meshwright.launch.signals import ends_at_once
from meshwright.record.run_folder import last_step
from meshwright.record.run_owner import has_ended_since, owner_number
from meshwright.watch.read import is_number, read_lines

NOTES = ".nodes"  # in the run's folder: what the launchers of several nodes say to each other
IDLE_S = 1.0  # between two looks of a rank that stands by


def add_arguments(parser: argparse.ArgumentParser) -> None:
    nodes = "machines of an elastic run, e.g. 1:4 (least and most); start the same command on each"
    parser.add_argument("--nodes", metavar="MIN:MAX", help=nodes)
    spares = "elastic: further devices of this machine that stand by and take the places of lost ones (default: 0)"
    parser.add_argument("--spares", type=int, default=0, metavar="N", help=spares)
    address = "with --nodes: this machine's address, on whose network the ranks talk (default: that of its name, or of "
    address += "its route to others)"
    parser.add_argument("--address", metavar="IP", help=address)
    parser.set_defaults(stands_by=False)


def nodes_of(args: argparse.Namespace) -> tuple[int, int]:
    """The least and the most machines."""
    found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", args.nodes or "1")
    least, most = (int(found.group(1)), int(found.group(2) or found.group(1))) if found else (0, 0)
    if not 1 <= least <= most:
        raise UserError(f"--nodes {args.nodes} is no number of machines: give e.g. 2, or 1:4 for one to four")
    return least, most


def check_arguments(args: argparse.Namespace, config: Config) -> None:
    if args.spares < 0:
        raise UserError(f"--spares {args.spares} must not be negative")
    if not config.faults.elastic and (args.nodes or args.spares):
        option = "--nodes" if args.nodes else "--spares"
        raise UserError(f"{option} is for runs that go on after a loss: set faults.elastic=true, or leave it out")
    if args.address and not args.nodes:
        raise UserError("--address is the address of one of several machines: give --nodes too, or leave it out")
    if config.faults.elastic and args.restarts:
        raise UserError("faults.elastic=true starts ranks again by itself: leave --restarts out")


def check_rank(args: argparse.Namespace) -> None:
    if args.spares or args.address:
        option = "--spares" if args.spares else "--address"
        raise UserError(f"{option} is for our own launcher, and this process is a rank of another one: leave it out")


def address_of(args: argparse.Namespace, most: int) -> str:
    """Returns the address on which this machine's ranks are reached. With one machine nobody else can reach them. With
    several it is the one that --address names, else that of the machine's name. Debian and Ubuntu give that name the
    address 127.0.1.1, which other machines can't reach: then it is the address of the route to others."""
    if most == 1 and not args.address:
        return LOOPBACK
    try:
        found: str | None = socket.gethostbyname(args.address or socket.gethostname())
    except OSError as error:
        if args.address:
            raise UserError(f"--address {args.address} is not known ({error.strerror}): give an IP address") from None
        found = None
    if most > 1 and (found is None or is_loopback(found)) and not args.address:
        found = outward_address()
    if found is None:
        what = "no address is known by which other machines reach this one"
        raise UserError(f"{what}: give the one on whose network the ranks talk with --address IP")
    if most > 1 and is_loopback(found):
        # Several launchers on one machine may be meant, each at a loopback address of its own.
        notice(f"meshwright: --address {args.address} is reached from this machine alone")
    return found


def choose(config: Config, local: int, ranks: int) -> tuple[int, list[str]]:
    """The most ranks, up to this number, for which there is a layout with the same global batch, and what the best one,
    by the planner's predicted time of a step, changes in the config."""
    from meshwright.cli.auto_layout import best_layout, devices_of, words_of  # the planner, which other runs don't need

    cluster, limit = devices_of(config, local)
    why: UserError | None = None
    for count in range(ranks, 0, -1):
        try:
            return count, words_of(config, best_layout(config, count, cluster, limit))
        except UserError as error:
            why = why or error
    raise why or UserError("there is no rank left to go on with")


def start_elastic(
    config: Config, args: argparse.Namespace, main: Callable[..., None], nproc: int,
    loses: Callable[[], str], tell: Callable[[str, str], None],
) -> int:  # fmt: skip
    """Runs this machine's launcher."""
    least, most = nodes_of(args)
    folder, address = Path(config.run.dir), address_of(args, most)
    wishes = Wishes(
        nproc, partial(choose, config, nproc), partial(last_step, folder), args.spares, least, most, address,
        folder=folder / NOTES if most > 1 else None, lost_after=config.faults.lost_after_s,
        rest=config.faults.rest_s, tell=tell,
    )  # fmt: skip
    with launching(stops=True) as place, ExitStack() as held:
        if most > 1 or config.checkpoint.memory_every:
            keeper = held.enter_context(KeeperProcess(address))
            wishes = replace(wishes, port=keeper.port, keyed=keeper.tell)

        def started(team: Team, words: list[str]) -> Outcome:
            given = argparse.Namespace(**vars(args) | {"overrides": [*args.overrides, *words]})
            return attempt_of(team, place, True, main, (given,))

        ended = Elastic(wishes, place, started).run()
    return conclude(ended, loses, tell)


# Ranks that another launcher starts: torchrun with --nnodes MIN:MAX begins again with as many as are left.


def fewer_ranks(config: Config, words: Sequence[str], place: Place) -> tuple[int, list[str]]:
    """How many of a launcher's ranks train, and the words of their layout: those given if the run never had more ranks
    than now and they fit, else the planner's. Every rank finds the same."""
    if place.world >= _most_ranks(config) and first_broken_rule(config, place.world, TRAINING_RULES) is None:
        return place.world, list(words)
    ranks, chosen = choose(config, place.local_world, place.world)
    if place.rank == 0:
        notice(f"meshwright: {ranks} of {place.world} ranks train ({' '.join(chosen)})")
    return ranks, [*words, *chosen]


def _most_ranks(config: Config) -> int:
    worlds: list[Any] = [event.get("world") for event in read_lines(Path(config.run.dir) / "events.jsonl")]
    return int(max((world for world in worlds if is_number(world)), default=0))


def stand_by(config: Config, place: Place) -> None:
    """The body of a rank that does not train: it ends when the run does, or with its launcher."""
    folder = Path(config.run.dir)
    number = owner_number(folder)
    notice(f"meshwright: rank {place.rank} of {place.world} stands by")
    with ends_at_once():
        while not has_ended_since(folder, number):
            time.sleep(IDLE_S)
