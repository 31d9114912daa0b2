"""`meshwright watch`: show one or several runs on a live page on this machine, or write the page as a file. No
torch."""

from __future__ import annotations

import argparse
import json
import time
import webbrowser
from pathlib import Path

from meshwright.disk import write
from meshwright.errors import UserError, notice
from meshwright.record.run_folder import is_run, no_run, runs_in
from meshwright.watch.server import Runs, Server, whole_page

EXAMPLES = """example:
  meshwright watch runs/mine                          (a page that follows the run; Ctrl-C ends it)
  meshwright watch runs/first runs/second             (their curves over each other, and what differs in their configs)
  meshwright watch runs                               (a list of all runs in this folder)
  meshwright watch runs/mine --html run.html          (one file that you can send)
  meshwright watch runs/mine --cluster here.yaml      (planned times too, by a profile of `meshwright comm bench`)

On a cluster, watch from your own machine: ssh -L 8420:127.0.0.1:8420 HOST meshwright watch runs/mine"""

PORT = 8420
LOOK_EVERY_S = 0.5  # How often it is looked whether a run has begun.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run (its run.dir), or of several")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page that needs no server, and end")
    parser.add_argument("--port", type=int, metavar="N", help=f"port to listen on (default {PORT}, or a free one)")
    cluster = "plan with this cluster (default: by the device's name, where it is known)"
    parser.add_argument("--cluster", metavar="NAME|FILE", help=cluster)
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def run(args: argparse.Namespace) -> None:
    folders = [Path(folder) for folder in args.runs]
    if not (args.json or args.html):
        for folder in folders:
            wait_for(folder)
    runs = Runs.of(folders, args.cluster)
    if args.json:
        print(json.dumps({"runs": runs.documents(), "plans": runs.plans()}, allow_nan=False))
        return
    if args.html:
        write(args.html, lambda: whole_page(runs))
        return
    if args.port is not None and not 0 <= args.port < 1 << 16:
        raise UserError(f"--port {args.port} must be at least 0 and below 65536")
    with _server(runs, args.port) as server:
        notice(f"watching {runs.title} at {server.address} (Ctrl-C ends it)")
        if args.open:
            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def wait_for(folder: Path) -> None:
    """Wait until a run has begun in a folder."""
    if not (is_run(folder) or runs_in(folder)):
        notice(f"{no_run(folder)}; waiting for a run to begin in {folder} (Ctrl-C ends it)")
        while not (is_run(folder) or runs_in(folder)):
            time.sleep(LOOK_EVERY_S)


def _server(runs: Runs, port: int | None) -> Server:
    """Return a server on the given port. Without one, use the usual port, or a free one if that is taken."""
    try:
        return Server(runs, PORT if port is None else port)
    except OSError as error:
        if port is not None:
            raise UserError(f"--port {port} can't be used: {error.strerror}: choose another, or leave it out") from None
        return Server(runs, 0)
