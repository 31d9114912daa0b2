"""`meshwright predict`: step time and memory of published runs, beside what was measured. Needs no torch.

The code that reads the table is specific to these papers and not part of the package: it is benchmarks/predict.py.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from meshwright.errors import UserError

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "predict.py"
EXAMPLES = """example:
  meshwright predict --csv published_runs.csv --out predictions.csv

Needs a checkout of the repository, whose benchmarks/predict.py reads the table and says what its columns mean."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--csv", type=Path, required=True, metavar="FILE", help="a table of runs, one per line")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the predictions here, as CSV")


def run(args: argparse.Namespace) -> int:
    spec = importlib.util.spec_from_file_location("meshwright_benchmarks_predict", SCRIPT)
    if spec is None or spec.loader is None or not SCRIPT.is_file():
        raise UserError("meshwright predict needs benchmarks/predict.py: install from a checkout of the repository")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return int(module.run(args))
