"""`meshwright layout`: every rank group of a mesh, and a drawing of it. Needs no torch."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from meshwright.config.grid import check_grid, grid_numbers
from meshwright.errors import UserError
from meshwright.layout.grid import Grid
from meshwright.layout.layout import GROUP_KINDS, Layout
from meshwright.show import grid_drawing
from meshwright.show.chart import check_svg
from meshwright.show.layout_drawing import draw
from meshwright.show.terminal import encodable, terminal_width

EXAMPLES = """example:
  meshwright layout --world 16 --tp 4 --pp 2 --node-size 8
  meshwright layout --world 64 --tp 4 --pp 2 --cp 2 --ep 8 --json
  meshwright layout --world 8 --tp 8 --tp-grid 2x2x2 --tp-kind 3d --svg product.svg"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world", type=int, required=True, metavar="N", help="number of ranks")
    add_axes(parser)
    parser.add_argument("--tp-grid", default="", metavar="RxC[xD]", help="tp as a grid of row x col (x depth) ranks")
    parser.add_argument("--tp-kind", default="", choices=["2d", "2.5d", "3d"], help="the kind of a grid")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="of a grid: draw who holds what of a product")


def add_axes(parser: argparse.ArgumentParser) -> None:
    """Adds the options that divide a world."""
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel size (default 1)")
    parser.add_argument("--pp", type=int, default=1, metavar="N", help="pipeline stages (default 1)")
    parser.add_argument("--cp", type=int, default=1, metavar="N", help="context-parallel size (default 1)")
    parser.add_argument("--ep", type=int, default=1, metavar="N", help="expert-parallel size (default 1)")
    parser.add_argument("--etp", type=int, default=0, metavar="N", help="tensor parallelism of experts (default: tp)")
    parser.add_argument("--order", default=Layout.order, help="the axes, fastest-varying first (default %(default)s)")
    parser.add_argument("--node-size", type=int, metavar="N", help="ranks on a node: shows what crosses")


def run(args: argparse.Namespace) -> None:
    grid = _grid(args)
    parts = grid.parts if grid else ()
    layout = Layout(
        args.world, args.tp, args.pp, args.cp, args.ep, args.order, args.node_size, etp=args.etp, parts=parts
    )
    if grid and args.svg:
        args.svg.write_text(grid_drawing.draw(grid), encoding="utf-8")
    if not layout.views_agree:
        print(
            f"note: order {layout.order} gives ranks another tp or pp position among the experts than in the "
            "dense layers; put tp first and pp last for a job with experts",
            file=sys.stderr,
        )
    if args.json:
        axes = [name for _, pieces in parts for name, _ in pieces]
        print(json.dumps({name: layout.groups(name) for name in (*GROUP_KINDS, *axes)}))
    else:
        print(encodable(draw(layout, width=max(60, min(terminal_width(100), 160))), sys.stdout))
        if grid:
            print(f"\nthe grid {grid}: parts of rows and of features that a tensor-parallel rank holds")
            print(grid_drawing.describe(grid))


def _grid(args: argparse.Namespace) -> Grid | None:
    check_svg("--svg", args.svg)
    if not args.tp_grid:
        if args.tp_kind or args.svg:
            raise UserError("--tp-kind and --svg belong to a grid: give --tp-grid too, e.g. --tp-grid 2x2")
        return None
    sizes = grid_numbers("--tp-grid", args.tp_grid)
    check_grid(args.tp, sizes, args.tp_kind, False)
    return Grid.of(args.tp_kind or "2d", sizes)
