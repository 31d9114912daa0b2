"""`meshwright recipes`: list known training runs that can be started by name, with published and predicted figures. No
torch."""

from __future__ import annotations

import argparse
import json

from meshwright.config.recipes import recipe_names
from meshwright.errors import UserError, nearest
from meshwright.plan.recipes import NOTE, SHORT, as_json, markdown, predict_recipe, short_row
from meshwright.show.terminal import table

EXAMPLES = """example:
  meshwright recipes
  meshwright config show bloom-176b
  meshwright train bloom-176b --tiny
  meshwright recipes --markdown > docs/recipes.md

The error is the predicted figure over the published one, minus 1. Every command that takes a config also takes a
recipe's name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="the recipes to show (default: all)")
    parser.add_argument("--markdown", action="store_true", help="print them as a page, with sources and differences")


def run(args: argparse.Namespace) -> None:
    for name in args.names:
        if name not in recipe_names():
            close = nearest(name, recipe_names())
            raise UserError(f"there is no recipe '{name}'{close}: the recipes are {', '.join(recipe_names())}")
    names = args.names or recipe_names()
    if args.markdown:
        print(markdown(names), end="")
        return
    found = [predict_recipe(name) for name in names]
    if args.json:
        print(json.dumps([as_json(one) for one in found]))
        return
    print(table([SHORT, *map(short_row, found)]))
    print(NOTE)
