"""Compares random models on random layouts with one process.

Use `python -m tests.fuzz.layouts --seed S --cases N [--case K]`. Every case is drawn from the seed and its number
alone, so `--case K` runs case K of a seed again and shows its whole output. The exit code is 1 if a case ended in a
traceback, a mismatch or a hang.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz.layout_cases import Case, draw
from tests.fuzz.layout_runs import Runner, Verdict

WORDS = ("equal", "refused", "TRACEBACK", "MISMATCH", "HANG")


def warm_up() -> None:
    """Import everything and exclude it from garbage collection, so that forks of this process are cheap."""
    import torch._dynamo  # noqa: F401 (the first trainer imports it)

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def judged(seed: str, numbers: range, folder: Path) -> Iterator[tuple[int, Case, Verdict, float]]:
    """Yield each case with its number, its verdict and the seconds that it took."""
    for number in numbers:
        case, begin = draw(seed, number), time.monotonic()
        verdict = Runner(case, folder / str(number)).judge()
        yield number, case, verdict, time.monotonic() - begin


def words_of(case: Case) -> str:
    """Describe a case in one line."""
    shown = {name: keys for name, keys in case.sections.items() if name not in ("data", "run") and keys}
    then = f" then {case.then}" if case.then else ""
    other = f" {case.other[0]} ranks {json.dumps(case.other[1])}" if case.other else ""
    return f"{case.name}: {case.world} ranks, {case.against}{then}{other} {json.dumps(shown)}"


def summary(counts: Counter[str], followed: int, seconds: float) -> str:
    """Return the table of verdicts."""
    lines = [f"{word:<10} {counts[word]:>6}" for word in WORDS]
    return "\n".join([*lines, f"advice followed {followed}; {seconds:.0f} s"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--case", type=int, help="run this case alone, and keep its folder")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after this many seconds")
    args = parser.parse_args()
    warm_up()
    numbers = range(args.first, args.first + args.cases) if args.case is None else range(args.case, args.case + 1)
    counts, followed, begin = Counter[str](), 0, time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="layouts-"))
    for number, case, verdict, seconds in judged(args.seed, numbers, scratch):
        counts[verdict.word] += 1
        followed += verdict.advice > 0
        text = verdict.text if args.case is not None else verdict.text[-600:]
        print(f"{number:>5} {verdict.word:<9} {seconds:5.1f} s  {words_of(case)[:160]}  {text}", flush=True)
        if verdict.is_bad or args.case is not None:
            print(f"      {words_of(case)}\n      python -m tests.fuzz.layouts --seed {args.seed} --case {number}")
        if args.case is None:
            shutil.rmtree(scratch / str(number), ignore_errors=True)
        if time.monotonic() - begin > args.seconds:
            break
    if args.case is None:
        shutil.rmtree(scratch, ignore_errors=True)
    else:
        print(f"its folder: {scratch}")
    print(summary(counts, followed, time.monotonic() - begin))
    return int(any(counts[word] for word in WORDS if word.isupper()))


if __name__ == "__main__":
    sys.exit(main())
