"""The ledger equals the plan exactly for every way to sum or gather, at every ZeRO stage and on every kind of layout,
in dry runs.
"""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest

from meshwright.config.comm import REDUCE_KINDS, GatherConfig, Summing
from meshwright.config.rules import RULES, first_broken_rule
from meshwright.device import Device
from meshwright.dryrun.run_rank import run_rank
from meshwright.lab.algorithms import ALGORITHMS
from meshwright.plan.communication import predict_rank
from tests.support.oracle import small_config

Sections = dict[str, Any]
SMALL = {"layers": 2, "hidden": 24, "heads": 4, "vocab": 53, "seq": 8}
EXPERTS = SMALL | {"experts": {"count": 4, "ffn": 16, "capacity": 1.0}}
LINKS = {"links": {"link_gb_s": 1.0, "network_gb_s": 0.1, "latency_us": 5.0}}

REDUCE: dict[str, Sections] = {f"reduce {kind}": {"reduce": {"kind": kind}} for kind in REDUCE_KINDS}
REDUCE["reduce topk, wide blocks"] = {"reduce": {"kind": "topk", "ratio": 0.05, "block": 512}}
REDUCE["reduce int8, kept"] = {"reduce": {"kind": "int8", "block": 64, "error_feedback": True}}
OWN: dict[str, Sections] = {f"own {kind}": {"algorithm": kind} | LINKS for kind in (*ALGORITHMS, "auto")}
GATHER: dict[str, Sections] = {f"gather {kind}": {"gather": {"kind": kind}} for kind in ("bf16", "fp8", "int8")}
GATHER["copy in the node"] = {"gather": {"kind": "int8", "node_copy": True}}
GATHER["no overlap"] = {"overlap": {"gradients": False, "weights": False, "tensor": False, "pipeline": False}}
WAYS = {"plain": {}} | REDUCE | OWN | GATHER

# The world, the layout and further sections.
LAYOUTS: dict[str, tuple[int, Sections]] = {
    "dp": (4, {"layout": {"node_size": 2}}),
    "dp-tp-pp": (8, {"layout": {"tp": 2, "pp": 2, "node_size": 4}}),
    "dp-tp-sp": (8, {"layout": {"tp": 2, "sequence_parallel": True, "node_size": 4},
                     "comm": {"overlap": {"tensor": True, "piece_gflop": 0.0}}}),
    "dp-cp": (8, {"layout": {"cp": 2, "node_size": 4}}),
    "experts": (8, {"layout": {"ep": 4, "node_size": 2}, "model": EXPERTS,
                    "comm": {"algorithm": {"ep": "hierarchical"}}}),
    "packed-base": (4, {"layout": {"node_size": 2}, "model": SMALL | {"hidden": 64},
                        "tune": {"kind": "lora", "base": "x", "quantise": "nf4"}}),
    "node-shards": (8, {"layout": {"node_size": 4}, "zero": {"shard_group": "node"}}),
}  # fmt: skip


def sections_of(way: str, stage: int, layout: str) -> tuple[int, Sections]:
    world, given = LAYOUTS[layout]
    comm: Sections = {"bucket_mib": 0.02} | given.get("comm", {})
    for key, value in WAYS[way].items():
        both = isinstance(value, dict) and isinstance(comm.get(key), dict)
        comm[key] = comm[key] | value if both else value
    # Gradients are summed by the given algorithm, and rows are exchanged by node.
    if isinstance(comm.get("algorithm"), str) and "model" in given:
        comm["algorithm"] = {"dp": comm["algorithm"], "ep": "hierarchical"}
    train = {"precision": "fp32", "global_batch": 2 * world, "micro_batch": 1, "compile": False}
    zero = {"stage": stage} | (given.get("zero", {}) if stage else {})
    return world, {"model": SMALL, "train": train} | given | {"comm": comm, "zero": zero}


def compare(way: str, stage: int, layout: str) -> bool:
    """Compare the calls of the last rank, and for a pipeline also those of the first one. Return whether the rules let
    this config train.
    """
    world, sections = sections_of(way, stage, layout)
    config = small_config(**sections)
    if first_broken_rule(config, world, RULES) is not None:
        return False
    for rank in {world - 1, 0 if config.layout.pp > 1 else world - 1}:
        planned = predict_rank(config, world, rank)
        found = run_rank(config, world, rank, Device("meta")).calls
        expected = {tuple(line): traffic._asdict() for line, traffic in planned.items()}
        assert found == expected, (way, stage, layout, rank)
    return True


def test_sums_of_every_kind_are_as_planned() -> None:
    assert all(compare(way, stage, "dp") for way, stage in zip(("reduce topk", "own tree"), (0, 2), strict=True))


@pytest.mark.wide
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stage", range(4))
def test_every_way_at_every_stage(stage: int, layout: str) -> None:
    refused = {way for way in WAYS if not compare(way, stage, layout)}
    expected = set()
    if stage < 3:  # Only stage 3 gathers weights for each use.
        expected |= {way for way in GATHER if way != "no overlap"}
    if stage and layout == "node-shards":  # Node shards are a hierarchy themselves.
        expected |= {*OWN, "copy in the node"}
    if layout == "dp-cp":
        expected |= {"copy in the node"}
    assert refused == expected


def test_the_matrix_has_every_word_of_the_config() -> None:
    gathers = get_args(get_type_hints(GatherConfig)["kind"])
    assert {name.split()[1] for name in OWN} == set(get_args(Summing)) - {"torch"}
    assert {way["reduce"]["kind"] for way in REDUCE.values()} == set(REDUCE_KINDS)
    assert {way["gather"]["kind"] for way in GATHER.values() if "gather" in way} == set(gathers) - {"plain"}
