"""Tests of settings that can't be combined with a kind of model or with adapters: each gets an error message."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.config.rules import check
from meshwright.errors import UserError
from tests.support.oracle import small_config

LORA = {"kind": "lora", "rank": 2, "base": "somewhere"}
GLM = {"kind": "glm", "position": "rope"}


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"tune": {**LORA, "dropout": 0.1}, "recompute": {"mode": "full", "pieces": 2}}, "pieces=2 would drop other"),
        ({"model": GLM, "data": {"objective": "causal", "reset_attention": True}}, "takes a first document for"),
        ({"model": {"kind": "glm", "position": "relative"}}, "needs an encoder-decoder"),
        ({"model": {"kind": "t5", "embedding_grad": 0.1}}, "model.embedding_grad=0.1 can't be combined"),
    ],
)
def test_it_says_so(sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check(small_config(**sections), 1)
