"""States of reducers if tp ranks hold copies of key-value heads.

The key and value rows of a tensor then have more rows of state than its query rows, or they have state and the query
rows have none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.replica_runs import replicas
from tests.engine.test_compressed_checkpoints import check_goes_on, check_moves, check_same_losses
from tests.engine.test_compression import Sections, compressed
from tests.lab.test_server import served

# Every side, and each rank's part of it, is a multiple of 32, so no layout here cuts a block.
MODEL = {"layers": 1, "hidden": 64, "heads": 2, "kv_heads": 1, "ffn": 64, "vocab": 64, "seq": 8, "position": "rope",
         "tied_embeddings": False}  # fmt: skip
COPIED: Sections = {"model": MODEL, "layout": {"tp": 2}}
TOKENS_SPLIT: Sections = {"model": MODEL, "layout": {"tp": 2, "sequence_parallel": True}}
# The two factors are smaller than the query rows, but not smaller than the rows of the single key-value head.
FEW_ROWS: Sections = {"model": MODEL | {"heads": 16, "hidden": 64, "kv_heads": 1}, "layout": {"tp": 2}}


def reducing(kind: str, **more: Any) -> Sections:
    return compressed(kind, COPIED, **more)


CASES: dict[str, Sections] = {
    "topk": reducing("topk"),
    "topk, ZeRO 2": reducing("topk") | {"zero": {"stage": 2}},
    "threshold": reducing("threshold"),
    "onebit": reducing("onebit"),
    "int8 with feedback": reducing("int8", error_feedback=True),
    "powersgd": reducing("powersgd"),
    "powersgd, kv as it is": compressed("powersgd", FEW_ROWS, rank=8),
    "adaptive": COPIED | {"comm": {"bucket_mib": 0.02, "reduce": {"adaptive": True}}},
    "server": served(1, 1) | COPIED,
    "server with bias": served(1, 2) | {"model": MODEL | {"bias": True}, "layout": {"tp": 2}},
    "replicas": replicas(2, {"compress": {"kind": "topk"}}, {"tp": 2}, model=MODEL),
}


def test_a_run_with_copied_heads_goes_on_to_the_bit(tmp_path: Path) -> None:
    check_goes_on(4, list(CASES.values()), tmp_path)


@pytest.mark.wide
@pytest.mark.parametrize("name", [name for name in CASES if "powersgd" not in name and name != "replicas"])
def test_it_goes_on_with_the_same_losses_on_another_layout(name: str, tmp_path: Path) -> None:
    sections = CASES[name]
    there = sections | {"layout": {"tp": 2, "sequence_parallel": True}}
    check_same_losses(sections, [(4, sections), (4, there)], tmp_path, dp=4)


def test_what_is_kept_moves_to_and_from_copied_heads(tmp_path: Path) -> None:
    """Residuals move from copied heads to whole ones and to another number of copies, and back."""
    whole = {"model": MODEL, "layout": {}}
    check_moves(4, [reducing("topk"), compressed("topk", whole), compressed("topk", TOKENS_SPLIT)], tmp_path / "from")
    check_moves(4, [compressed("topk", whole), reducing("topk"), reducing("topk") | {"zero": {"stage": 1}}],
                tmp_path / "to")  # fmt: skip
