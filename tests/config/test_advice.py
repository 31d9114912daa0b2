"""The advice of a refused config, if it is followed, leads to a config that runs."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.config.load import config_from, flat, merge_sections, nest, to_mapping
from meshwright.config.rules import first_broken_rule
from meshwright.config.sections import Config
from meshwright.config.yaml_text import parse_yaml
from meshwright.errors import UserError
from tests.support.advice import advised

MODEL = {"layers": 2, "hidden": 24, "heads": 6, "vocab": 64, "seq": 16}
TRAIN = {"steps": 1, "global_batch": 8, "micro_batch": 1, "precision": "fp32"}


def made(*sections: dict[str, Any]) -> Config:
    """Return a small config with some sections changed."""
    changed: dict[str, Any] = {"model": MODEL, "train": TRAIN, "data": {"prefixes": ["made"]}}
    for section in sections:
        changed = merge_sections(changed, section)
    return config_from(changed)


# By name: (number of ranks, sections that are refused, the advice at the end of the message).
CASES: dict[str, tuple[int, dict[str, Any], str]] = {
    "hybrid": (4, {"context": {"kind": "hybrid", "inner": 2}, "layout": {"cp": 4}, "model": {"heads": 3}},
               "use context.kind=gather or ring, with context.inner=0"),
    "glm's second positions": (2, {"model": {"kind": "glm", "position": "learned"}, "data": {"objective": "blanks"},
                                   "layout": {"tp": 2, "tp_grid": [2, 1]}, "train": {"micro_batch": 2}},
                               "set model.position=rope or layout.tp_grid=[]"),
    "grid's parts": (2, {"layout": {"tp": 2, "tp_grid": [1, 1, 2], "tp_kind": "3d"},
                         "train": {"micro_batch": 3, "global_batch": 12}}, "set train.micro_batch=4"),
    "batch": (4, {"train": {"global_batch": 12, "micro_batch": 2}},
              "set train.micro_batch=1 (the training stays the same), or train.global_batch=16"),
    "ramp's start": (2, {"train": {"global_batch": 16, "micro_batch": 4, "ramp": [4, 4, 32]}},
                     "set train.ramp=[8,8,32] or train.micro_batch=2"),
    "ramp's increment": (2, {"train": {"global_batch": 20, "micro_batch": 2, "ramp": [8, 6, 32]}},
                         "set train.ramp=[8,4,32] or train.micro_batch=1"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_what_is_advised_runs(name: str) -> None:
    world, sections, advice = CASES[name]
    sentence = first_broken_rule(made(sections), world)
    assert sentence is not None and sentence.endswith(advice), sentence
    choices = advised(sentence)
    assert choices
    for keys in choices:
        assert first_broken_rule(made(sections, nest(keys)), world) is None, keys


def test_advice_is_read_from_its_sentence() -> None:
    assert advised("a.b=3 cuts c.d=16 into 6 equal parts: try c.d=18") == [{"c.d": 18}]
    assert advised("a.b=3 is not a multiple of c x d = 4: try 4") == [{"a.b": 4}]
    assert advised("a.b=x fails: use a.b=y or z, with a.c=0") == [{"a.b": "y", "a.c": 0}]
    assert advised("a.b=3: set a.b=1 (as before), or c.d=[1,2]") == [{"a.b": 1}, {"c.d": [1, 2]}]
    assert advised("leave it out") == [] == advised("a.b=1 needs c.d=2: change one of them")


def test_a_micro_batch_is_not_called_the_same_where_losses_are_of_micro_batches() -> None:
    experts = {"count": 4, "top_k": 2, "ffn": 8, "aux_loss": 0.01, "aux_level": "batch"}
    sections = {"train": {"global_batch": 12, "micro_batch": 2}, "model": {"experts": experts}}
    sentence = first_broken_rule(made(sections), 4)
    assert sentence is not None and "set train.micro_batch=1 (the balance loss is of each micro-batch)" in sentence


@pytest.mark.parametrize("key", ["layout.tp_kind", "checkpoint.dir", "model.preset"])
def test_a_word_left_out_is_an_empty_one(key: str) -> None:
    given = made(nest({key: parse_yaml("", key)}))
    assert flat(to_mapping(given))[key] == ""


def test_an_empty_word_is_not_one_of_the_choices() -> None:
    with pytest.raises(UserError, match="train.precision= is not one of fp64"):
        made({"train": {"precision": None}})
