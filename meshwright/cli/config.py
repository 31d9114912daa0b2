"""`meshwright config`: show a config with everything resolved, or only check it."""

from __future__ import annotations

import argparse
import json
import shlex

from meshwright.config.load import load_config, to_mapping, to_yaml
from meshwright.config.recipes import read_recipe, recipe_names
from meshwright.config.rules import RULES, TRAINING_RULES, check
from meshwright.errors import plural
from meshwright.plan.effects import say_what_has_no_effect
from meshwright.show.terminal import say_next

EXAMPLES = """example:
  meshwright config show examples/demo.yaml train.steps=10
  meshwright config show bloom-176b
  meshwright config check examples/demo.yaml --devices 8"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["show", "check"], help="print the resolved config, or check it")
    parser.add_argument("config", metavar="CONFIG.yaml|RECIPE")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="config keys to change")
    ranks = "number of devices, one rank each, to check against (default: the recipe's, or the smallest that fits)"
    parser.add_argument("--devices", "--world", dest="world", type=int, metavar="N", help=ranks)


def run(args: argparse.Namespace) -> None:
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
