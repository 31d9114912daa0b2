"""`meshwright train`: train a model on local ranks, or as one rank of torchrun or srun."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.checkpoint.keeper import KeeperProcess
from meshwright.config.load import AUTO_LAYOUT, load_config, without_auto
from meshwright.config.rules import TRAINING_RULES, check, first_broken_rule
from meshwright.config.sections import Config
from meshwright.config.twin import TWIN_BASES, TWIN_DATA, TWIN_TALKS, tiny_config
from meshwright.data.packed import is_chat, length_words
from meshwright.engine.datasets import datasets_of, unused_tokens
from meshwright.errors import UserError, notice, plural
from meshwright.launch.elastic import Elastic, LauncherOptions
from meshwright.launch.launch import (
    Outcome,
    Team,
    attempt_of,
    conclude,
    launch_folder,
    local_devices,
    place_in_launcher,
    regroups,
    run_as_rank,
    start,
    warm_up,
)
from meshwright.launch.processes import ProcessPlace, address_of, find_place
from meshwright.launch.signals import ends_at_once
from meshwright.plan.effects import say_what_has_no_effect
from meshwright.record.checkpoint_format import (
    checkpoint_folder,
    first_weights,
    is_hf_folder,
    list_checkpoints,
    model_folder,
)
from meshwright.record.companions import check_tokenizer
from meshwright.record.run_folder import check_folders, describe_loss, last_step, refuse_finished
from meshwright.record.run_notes import read_events, write_event
from meshwright.record.run_owner import has_ended_since, owner_number, refuse_owned
from meshwright.record.speed import BEGINS, pace_of_lines
from meshwright.show.terminal import say_next
from meshwright.spec.schedule.kinds import AUTO_SCHEDULE

EXAMPLES = """example:
  meshwright train examples/demo.yaml --nproc 8 layout.tp=2 layout.pp=2 train.steps=50
  torchrun --nnodes 2 --node_rank 0 --nproc_per_node 8 --master_addr HOST --master_port 29500 \\
      -m meshwright train CONFIG.yaml
  meshwright train bloom-176b --tiny
  meshwright train CONFIG.yaml --nproc 8 --restarts 3        (call it again to continue from the last checkpoint)
  meshwright train CONFIG.yaml run.dir=runs/tuned --from runs/first@1000
  srun -N 2 --ntasks-per-node 8 meshwright train CONFIG.yaml
  meshwright train CONFIG.yaml --nproc 8 layout=auto         (the planner chooses; keys given here stay as they are)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG.yaml|RECIPE", help="the run's config file, or a recipe's name")
    tiny = "train the recipe's twin instead: a small model with the same axes, on this machine's CPUs, with data"
    parser.add_argument("--tiny", action="store_true", help=tiny)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="config keys to change, e.g. train.steps=100")
    source = "what to start from: the weights of another run, of a checkpoint or of a Hugging Face folder for a new "
    source += "run, all of the state of a checkpoint within the same run"
    parser.add_argument("--from", dest="source", metavar="PATH[@STEP]", help=source)
    again = "times to start again from the last checkpoint when a rank dies (under torchrun: its --max-restarts)"
    parser.add_argument("--restarts", type=int, default=0, metavar="N", help=again)
    parser.add_argument("--nproc", type=int, help="local ranks to start (default: the number of GPUs, or 1)")
    parser.add_argument("--full", action="store_true", help="end with all tables, also the bytes of links")
    add_elastic_arguments(parser)
    # A program that calls `meshwright.train` gets a result instead of the summary.
    parser.set_defaults(summary=True, quiet=False)


def run(args: argparse.Namespace) -> int:
    """Train as one rank of another launcher, or check the config and start local ranks. Everything that can be checked
    without torch is checked before it is loaded, which takes seconds."""
    # With --nodes this process is the launcher of its node, even if srun started it as one task per node.
    place = None if args.nodes else place_in_launcher(args.nproc)
    if place:
        if args.tiny:
            raise UserError("--tiny starts its own ranks: leave out torchrun or srun")
        return run_as_rank(place, lambda at: prepare(args, at), train, args, stops=True)
    if args.nproc is not None and args.nproc < 1:
        raise UserError(f"--nproc {args.nproc} must be at least 1")
    config = config_of(args)
    check_elastic_arguments(args, config)
    _, nodes = nodes_of(args)
    config = with_choices(args, config, nodes)
    if args.restarts < 0:
        raise UserError(f"--restarts {args.restarts} must not be negative")
    check_folders(config)
    # With several nodes, another node's launcher of this run may own the folder already.
    if nodes == 1:
        refuse_owned(Path(config.run.dir))
    if args.nproc != 1:
        warm_up()
    if args.tiny:
        args.nproc = args.nproc or tiny_config(args.config)[1]
    # Without --nproc the number of ranks depends on the GPUs, which only torch can count.
    known = args.nproc or (1 if config.run.on_cpu else 0)
    if known:
        check(config, nodes * known, TRAINING_RULES)
    refuse_finished(config, args.source)
    if args.tiny:
        prepare_tiny(config)
    unused = unused_tokens(config, datasets_of(config)[0])
    weights = first_weights(config, args.source)
    is_new = not list_checkpoints(checkpoint_folder(config))
    if weights and is_new:
        check_tokenizer(model_folder(weights), config.data)
    # This line comes before torch is loaded, so that the user does not wait for seconds without a word.
    say_start(config, nodes * known, args.source)
    if unused and is_new and not weights and not config.model.hf:
        notice(unused)
    from meshwright.device import check_machine
    from meshwright.launch.this_machine import check_memory

    ranks = known or local_devices(config.run.device, least=1) - args.spares
    if ranks < 1:
        raise UserError(f"--spares {args.spares} leaves no device to train on: lower it")
    check(config, nodes * ranks, TRAINING_RULES)
    check_machine(config.run.device, config.comm.backend, config.train.precision, ranks)
    check_memory(config, nodes * ranks, ranks)
    say_what_has_no_effect(config, nodes * ranks, ranks)
    tell, loses = partial(write_event_of, config.run.dir, time.time()), partial(describe_loss, config)
    if config.faults.elastic:
        return start_elastic(config, args, train, ranks, loses, tell)
    return start(ranks, train, args, args.restarts, stops=True, loses=loses, tell=tell)


def with_choices(args: argparse.Namespace, config: Config, nodes: int) -> Config:
    """Return the config with the planner's choices in place of `layout=auto` and `pipeline.schedule: auto`. They are
    added to the arguments, from which the ranks read the config."""
    if AUTO_LAYOUT not in args.overrides and config.pipeline.schedule != AUTO_SCHEDULE:
        return config
    from meshwright.launch.this_machine import resolve, schedule_words

    local = args.nproc or (tiny_config(args.config)[1] if args.tiny else local_devices(config.run.device, least=1))
    if AUTO_LAYOUT in args.overrides:
        args.overrides = resolve(config, args.overrides, nodes * local)
        config = config_of(args)
    args.overrides = [*args.overrides, *schedule_words(config, nodes * local, local)]
    return config_of(args)


def write_event_of(folder: str, since: float, kind: str, text: str) -> None:
    """Write an event of the launcher to the run's folder, if the run has begun. A mistake that is found before this
    command's ranks have begun leaves the folder as it was."""
    if not (Path(folder) / "run.json").is_file():
        return
    events = read_events(folder)
    began = any(event.get("kind") in BEGINS and event["time"] >= since for event in events)
    if events and events[-1].get("text") == text:
        return  # The rank that writes the run has noted it.
    # A mistake that is only found while training is a failure of the run.
    if kind != "refusal" or began:
        write_event(folder, "failure" if kind == "refusal" else kind, text)


def prepare(args: argparse.Namespace, place: ProcessPlace) -> None:
    """Check the config of a rank of another launcher, before torch is loaded. Rank 0 reports the start."""
    config = config_of(args)
    # Every rank chooses the same layout, because the planner's search is deterministic.
    if AUTO_LAYOUT in args.overrides:
        from meshwright.launch.this_machine import resolve

        args.overrides = resolve(config, args.overrides, place.world, says=place.rank == 0)
        config = config_of(args)
    if config.pipeline.schedule == AUTO_SCHEDULE:
        from meshwright.launch.this_machine import schedule_words

        chosen = schedule_words(config, place.world, place.local_world, says=place.rank == 0)
        args.overrides = [*args.overrides, *chosen]
        config = config_of(args)
    world = place.world
    check_rank(args)
    if config.faults.elastic:
        world, args.overrides = fewer_ranks(config, args.overrides, place)
        config = config_of(args)
        args.stands_by = place.rank >= world
        if not args.stands_by:
            os.environ["WORLD_SIZE"] = str(world)
    check(config, world, TRAINING_RULES)
    if place.rank == 0:
        check_folders(config)
        say_start(config, world, args.source)
        say_what_has_no_effect(config, world, place.local_world)
        attempt, most = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
        if attempt != "0":
            notice(f"a rank had failed: all ranks were started again (restart {attempt} of {most})")


def say_start(config: Config, ranks: int, source: str | None = None) -> None:
    """Print whether the run starts or continues and, of a new one, where its weights and the length of its samples come
    from. A checkpoint that it loads is reported later, once it has been verified."""
    many = plural(ranks, "rank") if ranks > 1 else ""
    emulate = config.comm.emulate
    slow = f" ({emulate.words(config.layout.node_size or ranks)})" if emulate.on else ""
    if list_checkpoints(checkpoint_folder(config)):
        notice(f"continues {config.run.dir}{f' on {many}' * bool(many)}, up to step {config.train.steps}{slow}")
    else:
        notice(f"starts {config.run.dir}{f' with {many}' * bool(many)}, {plural(config.train.steps, 'step')}{slow}")
        for line in (weights_words(config, source), samples_words(config)):
            if line:
                notice(line)


def weights_words(config: Config, source: str | None) -> str:
    """Return the source of a new run's weights, if the config or --from names a folder."""
    weights = first_weights(config, source)
    folder = config.model.hf
    if not weights:
        return f"weights: drawn from train.seed, because {folder} holds none" if folder else ""
    named = "--from" if source else "model.hf"
    if config.tune.base:
        named = "tune.base"
    if config.tune.adapts:
        return f"weights: those of {weights} ({named}), frozen; adapters of rank {config.tune.rank} are trained"
    return f"weights: those of {weights} ({named}), all of them trained" if is_hf_folder(weights) else ""


def samples_words(config: Config) -> str:
    """Return the length of samples and its reason, if conversations or a Hugging Face folder set the default."""
    seq, prefixes, folder = config.model.seq, config.data.prefixes, config.model.hf
    if config.objective_facts.packed and all(is_chat(prefix) for prefix in prefixes):
        return length_words(prefixes, seq)
    longest = f"; without it the longest that {folder} takes" if folder else ""
    return f"samples of {plural(seq, 'token')} (model.seq{longest})" if folder else ""


def config_of(args: argparse.Namespace) -> Config:
    """Return the config, or the recipe's twin with --tiny. `layout=auto` is left out: `run` and `prepare` replace it by
    the keys that the planner chose."""
    words = without_auto(args.overrides)
    return tiny_config(args.config, words)[0] if args.tiny else load_config(args.config, words)


def train(args: argparse.Namespace) -> None:
    """Train as one rank. The rank that writes the run's files prints the summary at the end."""
    from meshwright.engine.providers import datasets_provider, forward_step, model_provider
    from meshwright.launch.this_machine import out_of_memory
    from meshwright.plan.measured import speed_of
    from meshwright.run.pretrain import pretrain
    from meshwright.watch.live import Display
    from meshwright.watch.planned import planned_means
    from meshwright.watch.run_page import summary

    config = config_of(args)
    place = find_place()
    if args.stands_by:
        stand_by(config, place)
        return
    try:
        with ExitStack() as shown:
            display = None if args.quiet else shown.enter_context(Display(config, place.world))
            trainer = pretrain(
                config, model_provider, datasets_provider, forward_step, source=args.source, watcher=display,
                speed=speed_of, command=args.command,
            )  # fmt: skip
    except (RuntimeError, MemoryError) as error:
        if sentence := out_of_memory(config, place.world, place.local_world, place.rank, error):
            raise sentence from None
        raise
    if regroups():
        return
    if trainer.writes and args.json:
        print(json.dumps(figures_of(config.run.dir)), flush=True)
    elif trainer.writes and args.summary:
        summary(config.run.dir, plan=planned_means, full=args.full)
        # A run that was stopped has said how it is continued.
        if last_step(Path(config.run.dir))[0] >= config.train.steps:
            say_next(*commands_after(config))


def commands_after(config: Config) -> list[str]:
    """Return the commands that usually follow the training of a run."""
    folder = shlex.quote(config.run.dir)
    commands = [f"meshwright watch {folder}"]
    if config.model.kind_facts.writes_text and not config.compares:
        prompt = "chat" if config.objective_facts.packed else "generate"
        commands.append(f"meshwright {prompt} {folder}" + (' --prompt "..."' if prompt == "generate" else ""))
    ending = "merge" if config.tune.adapts else "export"
    return [*commands, f"meshwright {ending} {folder} --to {folder}/{ending}ed"]


def figures_of(folder: str) -> dict[str, Any]:
    """Return the figures of the summary for --json: the run's first and last step, its validations and its speed."""
    steps, validations = (
        [json.loads(line) for line in (Path(folder) / name).read_text(encoding="utf-8").splitlines()]
        for name in ("metrics.jsonl", "validation.jsonl")
    )
    pace = pace_of_lines(steps, read_events(folder))
    return {
        "run_dir": folder, "steps": len(steps), "first": steps[0], "last": steps[-1], "validation": validations,
        "tokens": sum(step["tokens"] for step in steps),
        "tokens_per_s": pace and pace.tokens_per_s,
    }  # fmt: skip


# The folder, within the run's, of the notes by which the launchers of several nodes agree.
NOTES = ".nodes"
# Seconds between two checks of a standby rank whether the run has ended.
IDLE_S = 1.0


def add_elastic_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of elastic runs, which continue after the loss of a rank or a node."""
    nodes = "machines of an elastic run, e.g. 1:4 (least and most); start the same command on each"
    parser.add_argument("--nodes", metavar="MIN:MAX", help=nodes)
    spares = "elastic: further devices of this machine that stand by and replace lost ones (default: 0)"
    parser.add_argument("--spares", type=int, default=0, metavar="N", help=spares)
    address = "with --nodes: this machine's address, on whose network the ranks talk (default: that of its name, or of "
    address += "its route to other machines)"
    parser.add_argument("--address", metavar="IP", help=address)
    parser.set_defaults(stands_by=False)


def nodes_of(args: argparse.Namespace) -> tuple[int, int]:
    """Return the least and the most machines that --nodes names."""
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", args.nodes or "1")
    least, most = (int(match.group(1)), int(match.group(2) or match.group(1))) if match else (0, 0)
    if not 1 <= least <= most:
        raise UserError(f"--nodes {args.nodes} is not a number of machines: give e.g. 2, or 1:4 for one to four")
    return least, most


def check_elastic_arguments(args: argparse.Namespace, config: Config) -> None:
    """Refuse options of elastic runs that don't fit the config or each other."""
    if args.spares < 0:
        raise UserError(f"--spares {args.spares} must not be negative")
    if not config.faults.elastic and (args.nodes or args.spares):
        option = "--nodes" if args.nodes else "--spares"
        raise UserError(f"{option} is for runs that continue after a loss: set faults.elastic=true, or leave it out")
    if args.address and not args.nodes:
        raise UserError("--address is the address of one of several machines: give --nodes too, or leave it out")
    if config.faults.elastic and args.restarts:
        raise UserError("faults.elastic=true starts ranks again by itself: leave --restarts out")


def check_rank(args: argparse.Namespace) -> None:
    """Refuse options of Meshwright's launcher on a rank that another launcher started."""
    if args.spares or args.address:
        option = "--spares" if args.spares else "--address"
        raise UserError(f"{option} is for our own launcher, and this process is a rank of another one: leave it out")


def start_elastic(
    config: Config, args: argparse.Namespace, main: Callable[..., None], nproc: int,
    loses: Callable[[], str], tell: Callable[[str, str], None],
) -> int:  # fmt: skip
    """Run the launcher of this node for an elastic run, and return the exit code."""
    # Imported here because this loads the planner, which other runs don't need.
    from meshwright.launch.this_machine import choose

    least, most = nodes_of(args)
    folder = Path(config.run.dir)
    address = address_of(args.address, most)
    wishes = LauncherOptions(
        nproc, partial(choose, config, nproc), partial(last_step, folder), args.spares, least, most, address,
        folder=folder / NOTES if most > 1 else None, lost_after=config.faults.lost_after_s,
        rest=config.faults.rest_s, tell=tell,
    )  # fmt: skip
    with launch_folder(stops=True) as place, ExitStack() as held:
        if most > 1 or config.checkpoint.memory_every:
            keeper = held.enter_context(KeeperProcess(address))
            wishes = replace(wishes, port=keeper.port, keyed=keeper.tell)

        def started(team: Team, words: list[str]) -> Outcome:
            """Run one attempt on the ranks of a team, with the layout that the planner chose for them."""
            attempt_args = argparse.Namespace(**vars(args) | {"overrides": [*args.overrides, *words]})
            return attempt_of(team, place, True, main, (attempt_args,))

        outcome = Elastic(wishes, place, started).run()
    return conclude(outcome, loses, tell)


# The functions below are for ranks that another launcher starts. torchrun with --nnodes MIN:MAX starts again with the
# nodes that are left, so their number may not fit the config's layout.


def fewer_ranks(config: Config, words: Sequence[str], place: ProcessPlace) -> tuple[int, list[str]]:
    """Return the number of a launcher's ranks that train, and the words of their layout.

    These are all ranks and the given words, if they fit each other and the run never had more ranks than now. Otherwise
    the planner chooses both. Every rank computes the same result without communication."""
    if place.world >= _most_ranks(config) and first_broken_rule(config, place.world, TRAINING_RULES) is None:
        return place.world, list(words)
    from meshwright.launch.this_machine import choose

    ranks, chosen = choose(config, place.local_world, place.world)
    if place.rank == 0:
        notice(f"meshwright: {ranks} of {place.world} ranks train ({' '.join(chosen)})")
    return ranks, [*words, *chosen]


def _most_ranks(config: Config) -> int:
    """Return the largest world that the run ever had, 0 before its first start."""
    return max((event.get("world", 0) for event in read_events(config.run.dir)), default=0)


def stand_by(config: Config, place: ProcessPlace) -> None:
    """Wait as a rank that does not train, until the run ends or the launcher ends this process."""
    folder = Path(config.run.dir)
    number = owner_number(folder)
    notice(f"meshwright: rank {place.rank} of {place.world} stands by")
    with ends_at_once():
        while not has_ended_since(folder, number):
            time.sleep(IDLE_S)


def prepare_tiny(config: Config) -> None:
    """Make the files that a twin needs and that don't exist yet: token files of Python's standard library, generated
    conversations, and an untrained base for adapters."""
    if TWIN_DATA in config.data.prefixes and not Path(f"{TWIN_DATA}.idx").is_file():
        from meshwright.data.prepare import prepare

        prepare(["stdlib"], TWIN_DATA, force=True)
    if TWIN_TALKS in config.data.prefixes and not Path(f"{TWIN_TALKS}.idx").is_file():
        from meshwright.data.talks import write_talks

        write_talks(TWIN_TALKS)
    base = Path(config.tune.base)
    if config.tune.base.startswith(TWIN_BASES) and not base.is_dir():
        from meshwright.interop.first_weights import write_first_weights

        write_first_weights(config.model, base, config.train.seed)
