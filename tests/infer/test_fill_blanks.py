"""Blanks are filled token by token with a cache, and the logits are those of whole samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.data.blanks import BlankOptions, BlankStream
from meshwright.data.stream import build_datasets
from meshwright.infer.fill_blanks import BlankGenerator, fill_blanks
from meshwright.models.graph_stage import GraphStage
from tests.support.oracle import make_trainer, small_config
from tests.support.token_files import write_documents

GLM = {"kind": "glm", "layers": 2, "hidden": 32, "heads": 4, "vocab": 61, "seq": 32, "ffn": 48}
SCHEMES: dict[str, dict[str, Any]] = {
    "one position": {},
    "two positions": {"position": "learned", "norm_place": "pre", "mlp": "gelu"},
}
MASK, GMASK, SOP, EOP, PAD = SPECIALS = (56, 57, 58, 59, 60)


def made(scheme: str) -> tuple[GraphStage, Any]:
    config = small_config(model=GLM | SCHEMES[scheme])
    stage = make_trainer(config).modules[0]
    assert isinstance(stage, GraphStage) and stage.head is not None
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    return stage, config.model


@pytest.mark.parametrize("short", [1.0, 0.0])
@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_logits_are_those_of_whole_samples(scheme: str, short: float, tmp_path: Path) -> None:
    stage, model = made(scheme)
    write_documents(tmp_path / "a", [[*np.random.default_rng(n).integers(1, 50, 21).tolist(), 0] for n in range(4)])
    options = BlankOptions(model.seq, short, 0.3, 2.0, 0.4, SPECIALS, bool(model.token_types))
    stream = build_datasets([str(tmp_path / "a")], None, (1.0, 0.0, 0.0), model.seq, 7, blanks=options)[0]
    assert isinstance(stream, BlankStream)
    spans = 0
    for n in range(4):
        sample = stream.sample(n)
        with torch.no_grad():
            whole = stage.eval().trunk({key: torch.as_tensor(value)[None] for key, value in sample.items()})[0]
            assert stage.head is not None
            expected = stage.head.logits(whole).double()
        ids, segments = sample["tokens"], sample["segments"]
        begins = np.flatnonzero((ids == SOP) & (segments == 1))
        source = ids[segments == 0].tolist()
        # Positions in a span of [gMASK] count on from it.
        places = [int(sample["positions"][at]) - int(short == 0.0) for at in begins]
        assert sorted(places) == [at for at, id in enumerate(source) if id in (MASK, GMASK)]
        generator = BlankGenerator(stage, model, source, places, short == 0.0)
        end = int((segments < 2).sum())
        for blank, (low, high) in enumerate(zip(begins, [*begins[1:], end], strict=True)):
            spans += 1
            for at in range(low, high):
                found = generator.next_logits(int(ids[at]), blank, at - int(low) + 1)
                torch.testing.assert_close(found, expected[at, : model.vocab], rtol=1e-9, atol=1e-9)
        assert generator.length == end
    assert spans > 4 or short == 0.0


def test_a_blank_ends_at_its_end_token_or_when_nothing_fits() -> None:
    stage, model = made("one position")
    source, places = [3, MASK, 9, MASK, 4], [1, 3]

    def fill(most: int, eop: int = EOP) -> list[list[int]]:
        return fill_blanks(BlankGenerator(stage, model, source, places, False), SOP, eop, most)

    three = fill(3)
    assert [len(span) for span in three] == [3, 3]
    ended = fill(3, eop=three[0][1])
    assert ended[0] == three[0][: three[0].index(three[0][1])] and three[0][1] not in ended[1]
    assert [len(span) for span in fill(100)] == [model.seq - len(source), 0]  # the second blank finds the context full
    drawn = [
        fill_blanks(BlankGenerator(stage, model, source, places, False), SOP, EOP, 4, 1.0, 0.9, seed)
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
