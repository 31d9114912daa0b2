"""Options, tables, ranks and made-up text that all benchmarks share.

A benchmark prints a table for people and, as its last line, its result as JSON. `--json FILE` also writes that to a
file. With `--quick` it runs on tiny sizes, in seconds and without a GPU, to show that it works and not to measure.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


class BenchParser(argparse.ArgumentParser):
    """A parser with the options that every benchmark has."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--quick", action="store_true", help="tiny sizes, to see that it works")
        self.add_argument("--json", type=Path, metavar="FILE", help="write the result here too")

    def parse(self, **quick: Any) -> argparse.Namespace:
        """Return the arguments. With --quick these values are the defaults, and no argument is required."""
        if "--quick" in sys.argv:
            for action in self._actions:
                if action.dest in quick:
                    action.required = False
                    action.nargs = action.nargs if action.option_strings else "?"
            self.set_defaults(**quick)
        return self.parse_args()


def finish(args: argparse.Namespace, result: Any, *, rows: Sequence[Row] = ()) -> None:
    """Print `rows` as a table, and the result as one line of JSON; write it to the file that --json names."""
    if rows:
        print(table(rows))
    text = json.dumps(result)
    if isinstance(args.json, Path):
        args.json.write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table of numbers, strings and booleans. Nested values are only in the JSON."""
    plain = {name: None for row in rows for name, value in row.items() if isinstance(value, (int, float, str))}
    cells = [list(plain), *([_cell(row.get(name, "")) for name in plain] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(plain))]
    return "\n".join("  ".join(f"{text:>{width}}" for text, width in zip(line, widths, strict=True)) for line in cells)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def gpu_or_leave(args: argparse.Namespace) -> None:
    """End the benchmark with a sentence if there is no GPU. The exit code is then 0 under --quick."""
    import torch

    if not torch.cuda.is_available():
        print("this benchmark needs a GPU, and there is none: nothing was measured")
        sys.exit(0 if args.quick else 2)


@contextmanager
def tokens(args: argparse.Namespace) -> Iterator[str]:
    """Yield the prefix of token files: the given one, or with --quick that of a few made-up words."""
    if args.prefix is not None:
        yield args.prefix
        return
    from meshwright.cli.main import main

    with tempfile.TemporaryDirectory() as folder:
        text, prefix = Path(folder) / "text.jsonl", Path(folder) / "tokens"
        documents = ("".join(f"word {n % 97} and {n * m % 13} more of it\n" for n in range(40)) for m in range(100))
        text.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
        assert main(["data", "prepare", str(text), "--out", str(prefix), "--tokenizer", "train:300"]) == 0
        yield str(prefix)


def _rank(rank: int, world: int, port: int, queue: Any, work: Callable[..., Any], *args: Any) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    result = work(*args)
    if rank == 0:
        queue.put(json.dumps(result))


def with_ranks(world: int, work: Callable[..., Any], *args: Any) -> Any:
    """Return what `work` returns on the first of `world` ranks."""
    import torch.multiprocessing as mp

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    queue = mp.get_context("spawn").SimpleQueue()
    given = (world, port, queue, work, *args)
    ranks = mp.start_processes(_rank, given, nprocs=world, join=False, start_method="spawn")
    text, have_ended = "", False
    while not have_ended:
        # The first rank can't end before its result is read, if that is larger than a pipe holds. `join` raises if a
        # rank dies.
        have_ended = ranks.join(timeout=0.1)
        if not text and not queue.empty():
            text = queue.get()
    return json.loads(text)
