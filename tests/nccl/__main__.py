"""`python -m tests.nccl`: runs the suite on NCCL, or with `--transport gloo` on Gloo.

python -m tests.nccl                           all cases; every rank shares the first GPU
python -m tests.nccl --transport gloo          the same cases without a GPU
python -m tests.nccl --shard 1/3               every third case, for machines that allow ten minutes at a time
python -m tests.nccl algorithm/ fault/kill     the cases whose names contain one of these
python -m tests.nccl --json found.json         writes everything; --again found.json repeats the failed cases
python -m tests.nccl --limit 540               starts no case after this many seconds; --again also runs those left
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path

from tests.nccl.runner import Runner, all_cases, chosen, table
from tests.nccl.transports import TRANSPORTS


def shard_of(text: str) -> tuple[int, int]:
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text} is no shard: write e.g. 1/3")
    return int(number), int(of)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.nccl", description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("patterns", nargs="*", metavar="NAME", help="parts of the names of cases (default: all)")
    usual = os.environ.get("MESHWRIGHT_NCCL_SUITE", "nccl")
    parser.add_argument("--transport", choices=list(TRANSPORTS), default=usual)
    parser.add_argument("--shard", type=shard_of, default=shard_of(os.environ.get("SHARD", "1/1")), metavar="K/N")
    parser.add_argument("--lanes", type=int, default=0, metavar="N", help="worlds that run side by side")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure and message")
    again = "the cases that failed or were left in a file of --json"
    parser.add_argument("--again", type=Path, metavar="FILE", help=again)
    parser.add_argument("--limit", type=float, default=math.inf, metavar="S", help="seconds to begin cases in")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the logs of cases that start processes here")
    parser.add_argument("--list", action="store_true", help="only print the names")
    return parser.parse_args()


def main() -> int:
    args = parse()
    patterns = args.patterns
    if args.again:
        found = json.loads(args.again.read_text())
        patterns = [*(case["name"] for case in found["cases"] if not case["ok"]), *found["left"]]
        if not patterns:
            print(f"{args.again}: nothing failed, and nothing is left")
            return 0
    cases = chosen(all_cases(), patterns, args.shard)
    if args.list:
        print("\n".join(case.name for case in cases))
        return 0
    if not cases:
        print("no case has such a name: --list prints all", file=sys.stderr)
        return 2
    transport = TRANSPORTS[args.transport]
    if transport.device == "cuda":
        from meshwright.device import accelerator_count

        if not accelerator_count():
            print("skipped: there is no GPU here (--transport gloo runs the same cases without one)")
            return 0
    runner = Runner(transport, args.lanes, lambda text: print(text, flush=True), args.keep, args.limit, args.json)
    verdicts = runner.run(cases)
    failed = [verdict for verdict in verdicts if not verdict.ok]
    for verdict in failed:
        print(f"\n{verdict.name}\n{verdict.note}")
    print(f"\n{table(verdicts)}")
    print(f"{len(verdicts)} cases on {transport.name} in {runner.seconds:.0f} s, {len(failed)} failed")
    if runner.left:
        print(f"{len(runner.left)} cases were left: {' '.join(runner.left[:20])}")
    if failed:
        names = " ".join(verdict.name for verdict in failed[:20])
        print(f"again: python -m tests.nccl --transport {transport.name} {names}")
    return bool(failed or runner.left)


if __name__ == "__main__":
    sys.exit(main())
