"""The cost of products in pieces (`comm.overlap.tensor`) on one device without any link, as evidence for their rule.

    python benchmarks/gpu_pieces.py

One rank's share of a step runs with and without pieces in turns (`meshwright bench step --overlap both`). The cases are
a 3b model with tp 2 and tp 8 under the rule of spec/model/pieces.py, the same with tp 8 and all products cut, and an 8b
model (8 layers) with tp 8 and twice the tokens, whose MLP the rule cuts.
"""

from __future__ import annotations

import json
import subprocess
import sys

from common import BenchParser, finish, gpu_or_leave

CASES: dict[str, list[str]] = {
    "3b, tp 2": ["--model", "3b", "--tp", "2"],
    "3b, tp 8": ["--model", "3b", "--tp", "8"],
    "3b, tp 8, all cut": ["--model", "3b", "--tp", "8", "--piece-gflop", "0"],
    "8b-8l, tp 8": ["--model", "8b-8l", "--tp", "8", "--micro-batch", "8"],
}


def main() -> None:
    args = BenchParser(__doc__).parse()
    gpu_or_leave(args)
    rows = []
    for name, words in CASES.items():
        command = [sys.executable, "-m", "meshwright", "bench", "step", *words, "--overlap", "both", "--json"]
        plain, pieces = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
        cut = [product for product, is_cut in pieces["in_pieces"].items() if is_cut]
        busy = [sum(ms for kind, ms in each["kinds_ms"].items() if kind != "idle") for each in (plain, pieces)]
        found = {
            "case": name, "cut": cut, "step_ms": [plain["step_ms"], pieces["step_ms"]], "busy_ms": busy,
            "longer": pieces["step_ms"] / plain["step_ms"] - 1.0, "kinds_ms": [plain["kinds_ms"], pieces["kinds_ms"]],
        }  # fmt: skip
        rows.append(found)
    finish(args, rows, rows=rows)


if __name__ == "__main__":
    main()
