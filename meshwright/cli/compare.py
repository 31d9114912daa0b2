"""The option `--compare` of `import` and `export`, which compares our model with transformers'. No torch unless it is
given."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from meshwright.errors import UserError, notice
from meshwright.infer.reading import sections_of


def add_compare(parser: argparse.ArgumentParser) -> None:
    compare = "run both models on real text, in float32 on the CPU; exit code 1 if logits or greedy text differ"
    parser.add_argument("--compare", action="store_true", help=compare)
    allowed = "with --compare: the largest difference of a logit, relative to the largest logit (default: by the dtype)"
    parser.add_argument("--tolerance", type=float, default=0.0, metavar="X", help=allowed)


def check_compare(args: argparse.Namespace) -> None:
    """Refuse a wrong tolerance or a missing transformers now, rather than after the model has been written."""
    if not args.compare:
        return
    if not 0.0 <= args.tolerance < 1.0:
        raise UserError(f"--tolerance {args.tolerance:g} must be at least 0 and below 1, e.g. 1e-4")
    if importlib.util.find_spec("transformers") is None:
        raise UserError("--compare runs the model in transformers too: pip install transformers")


def compare_with_folder(args: argparse.Namespace, checkpoint: str, folder: Path) -> dict[str, Any]:
    """Compare a checkpoint with a Hugging Face folder if --compare is given, and print the verdict on stderr. Return
    the keys that --json adds."""
    if not args.compare:
        return {}
    from meshwright.check.compare_hf import compare_folders

    notice(f"compares {checkpoint} with what transformers makes of {folder}")
    comparison = compare_folders(checkpoint, folder, sections_of([], 1), args.tolerance)
    notice(comparison.words())
    return {"compared": comparison.as_json()}


def exit_code(found: dict[str, Any]) -> int:
    """Return the exit code for the result of `compare_with_folder`: 1 if the models differ, else 0."""
    return int(bool(found) and not found["compared"]["agree"])
