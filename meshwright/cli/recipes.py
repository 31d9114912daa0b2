"""`meshwright recipes`: list known training runs that can be started by name, with published and predicted figures. No
torch."""

from __future__ import annotations

import argparse
import json

from meshwright.config.recipes import recipe_names
from meshwright.errors import UserError, nearest
from meshwright.plan.recipes import LAYOUTS, NOTE, SHORT, as_json, layout_row, markdown, predict_recipe, short_row
from meshwright.show.terminal import say_next, table

EXAMPLES = """example:
  meshwright recipes
  meshwright recipes --layouts
  meshwright config show bloom-176b
  meshwright train bloom-176b --tiny
  meshwright recipes --markdown > docs/recipes.md

The error is the predicted speed of a step over the published one, minus 1. Every command that takes a config also
takes a recipe's name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="the recipes to show (default: all)")
    parser.add_argument("--markdown", action="store_true", help="print them as a page, with sources and differences")
    layouts = "print the devices of each run and how they are divided, instead of its speed"
    parser.add_argument("--layouts", action="store_true", help=layouts)


def run(args: argparse.Namespace) -> None:
    for name in args.names:
        if name not in recipe_names():
            close = nearest(name, recipe_names())
            raise UserError(f"there is no recipe '{name}'{close}: the recipes are {', '.join(recipe_names())}")
    names = args.names or recipe_names()
    if args.markdown:
        print(markdown(names), end="")
        return
    if args.layouts:
        rows = [layout_row(name) for name in names]
        print(
            json.dumps([dict(zip(LAYOUTS, row, strict=True)) for row in rows]) if args.json else table([LAYOUTS, *rows])
        )
        return
    found = [predict_recipe(name) for name in names]
    if args.json:
        print(json.dumps([as_json(one) for one in found]))
        return
    print(table([SHORT, *map(short_row, found)]))
    print("\n".join([NOTE, *(f"{one.recipe.name}: {one.recipe.why}" for one in found if one.recipe.why)]))
    name = args.names[0] if args.names else "llama3-8b"
    say_next(f"meshwright cost {name}", f"meshwright train {name} --tiny", "meshwright predict")
