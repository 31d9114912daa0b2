"""`meshwright config`: show a config with everything resolved, only check it, or start one from another program's."""

from __future__ import annotations

import argparse
import json
import shlex

import yaml

from meshwright.config.load import config_from, load_config, set_key, to_mapping, to_yaml
from meshwright.config.recipes import read_recipe, recipe_names
from meshwright.config.rules import RULES, TRAINING_RULES, check
from meshwright.errors import notice, plural
from meshwright.interop.configs import read_peer
from meshwright.plan.effects import say_what_has_no_effect
from meshwright.show.terminal import say_next

EXAMPLES = """example:
  meshwright config show examples/demo.yaml train.steps=10
  meshwright config show bloom-176b
  meshwright config check examples/demo.yaml --devices 8
  meshwright config from ds_config.json model.preset=llama3-8b data.prefixes=data/text > mine.yaml
  meshwright config from pretrain_gpt.sh > mine.yaml        (a script of Megatron-LM; or its arguments in quotes)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = "print the resolved config; check it; or start one from a DeepSpeed JSON or a script of Megatron-LM"
    parser.add_argument("action", choices=["show", "check", "from"], help=actions)
    parser.add_argument("config", metavar="CONFIG.yaml|RECIPE|THEIRS")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="config keys to change")
    ranks = "number of devices, one rank each, to check against (default: the recipe's, or the smallest that fits)"
    parser.add_argument("--devices", "--world", dest="world", type=int, metavar="N", help=ranks)


def run(args: argparse.Namespace) -> None:
    if args.action == "from":
        _from_peer(args)
        return
    config = load_config(args.config, args.overrides)
    recipe_devices = read_recipe(args.config).devices if args.config in recipe_names() else 0
    world = args.world if args.world is not None else recipe_devices or config.layout.least_world
    check(config, world, TRAINING_RULES if args.action == "check" else RULES)
    if args.action == "show":
        print(json.dumps(to_mapping(config)) if args.json else to_yaml(config).rstrip())
        return
    # The check has passed, so the world is a multiple of the ranks that one copy of the model takes.
    tp, pp = config.layout.tp, config.layout.pp
    dp = world // config.layout.least_world
    answer = {"ok": True, "world": world, "dp": dp, "tp": tp, "pp": pp}
    say_what_has_no_effect(config, world)
    words = f"{args.config} is valid for {plural(world, 'rank')}: dp={dp} tp={tp} pp={pp}"
    if args.json:
        print(json.dumps(answer))
        return
    print(words)
    given = shlex.join([args.config, *args.overrides])
    ranks = (f" --devices {world}", f" --nproc {world}") if world > 1 else ("", "")
    say_next(*(f"meshwright {name} {given}{n}" for name, n in zip(("memory", "train"), ranks, strict=True)))


def _from_peer(args: argparse.Namespace) -> None:
    """Print the keys that another program's config sets. The report on each key goes to stderr."""
    found = read_peer(args.config)
    sections = found.sections
    for word in args.overrides:
        set_key(sections, word)
    for line in (*(f"taken: {each}" for each in found.taken), *(f"left out: {each}" for each in found.left)):
        if not args.json:
            notice(line)
    lacks = [key for key in ("model", "data") if key not in sections]
    if lacks:
        notice(f"still needed: {' and '.join(lacks)}, e.g. model.preset=llama3-8b data.prefixes=data/text")
    else:
        # Wrong values and combinations are reported now, and not by the first command that reads the file.
        config = config_from(sections)
        check(config, args.world or config.layout.least_world, RULES)
    if args.json:
        print(json.dumps({"config": sections, "taken": found.taken, "left": found.left}))
        return
    print(yaml.safe_dump(sections, sort_keys=False), end="")
