"""`meshwright layout`: draw the ranks of a layout and list every group of them. Needs no torch."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from meshwright.config.grid import check_grid, grid_numbers
from meshwright.config.load import load_config
from meshwright.config.recipes import read_recipe, recipe_names
from meshwright.disk import write
from meshwright.errors import UserError
from meshwright.show import grid_drawing
from meshwright.show.chart import check_svg
from meshwright.show.layout_drawing import draw
from meshwright.show.mesh_drawing import mesh_svg
from meshwright.show.terminal import encodable, terminal_width
from meshwright.spec.layout.grid import Grid
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.description import layout_of

EXAMPLES = """example:
  meshwright layout --devices 16 --tp 4 --pp 2 --node-size 8
  meshwright layout CONFIG.yaml --devices 16 layout.pp=2
  meshwright layout --devices 64 --tp 4 --pp 2 --cp 2 --ep 8 --json
  meshwright layout --devices 16 --tp 2 --pp 2 --svg mesh.svg
  meshwright layout --devices 8 --tp 8 --tp-grid 2x2x2 --tp-kind 3d --svg product.svg"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    named = "take the layout of a config file instead of the options below"
    parser.add_argument("config", nargs="?", metavar="CONFIG.yaml", help=named)
    parser.add_argument("words", nargs="*", metavar="key=value", help="config keys to change, e.g. layout.tp=2")
    ranks = "number of devices, one rank each (default: those of the recipe's run)"
    parser.add_argument("--devices", "--world", dest="world", type=int, metavar="N", help=ranks)
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="parts that train separately (default 1)")
    add_axes(parser)
    parser.add_argument("--tp-grid", default="", metavar="RxC[xD]", help="tp as a grid of row x col (x depth) ranks")
    parser.add_argument("--tp-kind", default="", choices=["2d", "2.5d", "3d"], help="the kind of a grid")
    drawn = "draw the groups of every axis; with --tp-grid, the parts of a product that each rank holds"
    parser.add_argument("--svg", type=Path, metavar="FILE", help=drawn)


def add_axes(parser: argparse.ArgumentParser) -> None:
    """Add the options for the sizes and the order of a layout's axes."""
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel size (default 1)")
    parser.add_argument("--pp", type=int, default=1, metavar="N", help="pipeline stages (default 1)")
    parser.add_argument("--cp", type=int, default=1, metavar="N", help="context-parallel size (default 1)")
    parser.add_argument("--ep", type=int, default=1, metavar="N", help="expert-parallel size (default 1)")
    parser.add_argument("--etp", type=int, default=0, metavar="N", help="tensor parallelism of experts (default: tp)")
    parser.add_argument("--order", default=Layout.order, help="the axes, fastest-varying first (default %(default)s)")
    parser.add_argument("--node-size", type=int, metavar="N", help="ranks on a node: shows which groups cross nodes")


def run(args: argparse.Namespace) -> None:
    check_svg("--svg", args.svg)
    if args.world is None:
        if args.config not in recipe_names():
            raise UserError("give --devices with the number of devices, e.g. --devices 16")
        args.world = read_recipe(args.config).devices
    layout, grid = _of_config(args) if args.config else _of_options(args)
    if not layout.views_agree:
        print(
            f"note: order {layout.order} gives ranks another tp or pp position among the experts than in the "
            "dense layers; put tp first and pp last for a job with experts",
            file=sys.stderr,
        )
    write(args.svg, lambda: grid_drawing.draw(grid) if grid else mesh_svg(layout))
    if args.json:
        axes = [name for _, pieces in layout.parts for name, _ in pieces]
        print(json.dumps({name: layout.groups(name) for name in (*layout.group_kinds, *axes)}))
    else:
        print(encodable(draw(layout, width=max(60, min(terminal_width(100), 160))), sys.stdout))
        if grid:
            print(f"\nthe grid {grid}: parts of rows and of features that a tensor-parallel rank holds")
            print(grid_drawing.describe(grid))


def _of_options(args: argparse.Namespace) -> tuple[Layout, Grid | None]:
    """Return the layout that the options describe."""
    grid = _grid(args)
    layout = Layout(
        args.world, args.tp, args.pp, args.cp, args.ep, args.order, args.node_size, etp=args.etp,
        replicas=args.replicas, parts=grid.parts if grid else (),
    )  # fmt: skip
    return layout, grid


def _of_config(args: argparse.Namespace) -> tuple[Layout, Grid | None]:
    """Return the layout of a config. Options that describe a layout too are refused."""
    others = [name for name in ("tp", "pp", "cp", "ep", "replicas") if getattr(args, name) != 1]
    others += [name for name in ("etp", "tp_grid", "tp_kind") if getattr(args, name)]
    if others or args.order != Layout.order:
        key = others[0] if others else "order"
        option = f"--{key.replace('_', '-')}"
        raise UserError(f"{option} and {args.config} both say the layout: give layout.{key}=... instead of {option}")
    config = load_config(args.config, args.words)
    return layout_of(config, args.world, args.node_size or 0), config.layout.grid


def _grid(args: argparse.Namespace) -> Grid | None:
    """Return the grid of tensor-parallel ranks that the options describe, or None."""
    if not args.tp_grid:
        if args.tp_kind:
            raise UserError("--tp-kind belongs to a grid: give --tp-grid too, e.g. --tp-grid 2x2")
        return None
    sizes = grid_numbers("--tp-grid", args.tp_grid)
    check_grid(args.tp, sizes, args.tp_kind, False)
    return Grid.of(args.tp_kind or "2d", sizes)
