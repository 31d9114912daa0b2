"""Keys of `comm` without effect on the given number of ranks get a one-line remark, and no other keys do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.config.load import config_from, to_yaml
from meshwright.config.rules import check
from meshwright.plan.effects import without_effect

SMALL = {"model": {"layers": 4, "hidden": 64, "heads": 4, "vocab": 100, "seq": 32}, "data": {"prefixes": ["a"]}}
EXPERTS = {"model": SMALL["model"] | {"experts": {"count": 8, "ffn": 32}}}
SILENT: dict[str, tuple[dict[str, Any], int]] = {
    "torch's": ({}, 4),
    "a ring": ({"comm": {"algorithm": "ring"}}, 4),
    "nodes": ({"comm": {"algorithm": "hierarchical"}, "layout": {"node_size": 2}}, 4),
    "one word, and ep is inside nodes": (
        EXPERTS | {"comm": {"algorithm": "hierarchical"}, "layout": {"ep": 2, "node_size": 2}}, 4),
    "one word, and only ep has several ranks on a node": (
        EXPERTS | {"comm": {"algorithm": "hierarchical"}, "layout": {"tp": 2, "ep": 4, "etp": 1, "node_size": 2}}, 4),
    "experts by node": (
        EXPERTS | {"comm": {"algorithm": {"ep": "hierarchical"}}, "layout": {"ep": 4, "node_size": 2}}, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
def test_algorithms_that_change_something_are_not_remarked_on(name: str) -> None:
    sections, world = SILENT[name]
    config = config_from(SMALL | {"train": {"global_batch": 24}} | sections)
    check(config, world)
    assert without_effect(config, world) == []


@pytest.mark.parametrize(("sections", "world", "sentence"), [
    ({"comm": {"algorithm": {"dp": "ring"}}, "layout": {"pp": 2}}, 2, "dp=ring has no effect, since no gradient is"),
    ({"comm": {"algorithm": "hierarchical"}}, 4, "sums as ring does, since its 4 ranks are on one node .*is not given"),
    ({"comm": {"algorithm": "hierarchical"}, "layout": {"node_size": 1}}, 4, "its 4 ranks are not several"),
    ({"comm": {"algorithm": "mesh"}}, 3, "dp=mesh sums as ring does, since 3 ranks are no mesh"),
    ({"comm": {"algorithm": {"ep": "hierarchical"}}}, 4, "has no effect, since the model has no experts"),
    (EXPERTS | {"comm": {"algorithm": {"ep": "hierarchical"}}}, 4, "has no effect, since layout.ep is 1"),
    (EXPERTS | {"comm": {"algorithm": {"ep": "hierarchical"}}, "layout": {"ep": 4, "node_size": 4}}, 4,
     "has no effect, since its 4 ranks are on one node .layout.node_size=4"),
    ({"comm": {"switches": [0, 1]}, "layout": {"node_size": 2}}, 4, "switches has no effect with"),
    ({"comm": {"links": {"link_gb_s": 1.0}, "algorithm": "ring"}}, 4, "links has no effect, since only"),
])  # fmt: skip
def test_algorithms_that_change_nothing_are_remarked_on(sections: dict[str, Any], world: int, sentence: str) -> None:
    config = config_from(SMALL | {"train": {"global_batch": 24}} | sections)
    check(config, world)
    (said,) = without_effect(config, world)
    assert re.search(sentence, said), said


def test_config_check_remarks_on_keys_without_effect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(to_yaml(config_from(SMALL)))
    assert main(["config", "check", str(path), "--world", "2", "comm.algorithm.ep=hierarchical", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["ok"] and err == (
        "meshwright: note: comm.algorithm.ep=hierarchical has no effect, since the model has no experts\n"
    )
