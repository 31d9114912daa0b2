"""`meshwright layout`: every rank group of a mesh, and a drawing of it. Needs no torch."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from meshwright.cli.files import write
from meshwright.layout.layout import GROUP_KINDS, Layout
from meshwright.show.chart import check_svg
from meshwright.show.layout_drawing import draw
from meshwright.show.mesh_drawing import mesh_svg
from meshwright.show.terminal import encodable, terminal_width

EXAMPLES = """example:
  meshwright layout --devices 16 --tp 4 --pp 2 --node-size 8
  meshwright layout --devices 64 --tp 4 --pp 2 --cp 2 --ep 8 --json
  meshwright layout --devices 16 --tp 2 --pp 2 --svg mesh.svg"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    ranks = "number of devices, one rank each"
    parser.add_argument("--devices", "--world", dest="world", type=int, required=True, metavar="N", help=ranks)
    add_axes(parser)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the groups of every axis")


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
    check_svg("--svg", args.svg)
    layout = Layout(args.world, args.tp, args.pp, args.cp, args.ep, args.order, args.node_size, etp=args.etp)
    if not layout.views_agree:
        print(
            f"note: order {layout.order} gives ranks another tp or pp position among the experts than in the "
            "dense layers; put tp first and pp last for a job with experts",
            file=sys.stderr,
        )
    write(args.svg, lambda: mesh_svg(layout))
    if args.json:
        print(json.dumps({name: layout.groups(name) for name in GROUP_KINDS}))
    else:
        print(encodable(draw(layout, width=max(60, min(terminal_width(100), 160))), sys.stdout))
