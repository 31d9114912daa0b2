"""An encoder-decoder (model.kind=t5) gives the same results on every layout as one process.

Encoder and decoder are on different ranks or on the same ones, two tensors pass between the decoder's stages, and
several stages share tables. The classic bugs are found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from meshwright.config.rules import check
from meshwright.engine.step import Trainer
from meshwright.models.graph_stage import GraphStage
from tests.parity.cases import HEADS, MUON, Case, case_of_kind
from tests.parity.launches import Launches, quick_or_wide
from tests.parity.planted import Bug, assert_found
from tests.support.oracle import complaints, small_config

GPT = {"model.norm": "rmsnorm", "model.mlp": "relu", "model.position": "relative", "model.bias": False}
NEWER = {"model.mlp": "tanh_geglu", "model.ffn": 48}  # T5 v1.1 has these.


BY_HEAD = {key.replace("__", "."): value for key, value in {**MUON, **HEADS}.items()}


def seq2seq(label: str, dp: int, tp: int, pp: int, data: dict[str, Any] | None = None, **more: Any) -> Case:
    given = {"model.kind": "t5", "model.head_dim": 6, "model.t5.decoder_seq": 8, "model.t5.distance": 18, **GPT, **more}
    return case_of_kind(f"t5-{label}", dp, tp, pp, data, given)


def stages(encoder: int, layers: int = 0, blocks: int = 0) -> dict[str, Any]:
    found = {"pipeline.encoder_stages": encoder, "model.layers": layers, "model.t5.encoder_layers": blocks}
    return {key: value for key, value in found.items() if value}


CASES = [
    seq2seq("dp", 2, 1, 1, {"blind": True}),
    seq2seq("tp-sp", 1, 2, 1, sp=True, **NEWER),
    seq2seq("pp", 1, 1, 2, **stages(1, 3, 1)),
    seq2seq("tp", 1, 2, 1, tied=False),
    seq2seq("tp4-sp", 1, 4, 1, sp=True, **{"recompute.mode": "full"}),
    seq2seq("vocabulary", 1, 4, 1, **{"model.vocab": 9}),
    seq2seq("pp-in-one-stage", 1, 1, 2, **stages(0, 5, 2)),  # The first stage also begins the decoder.
    seq2seq("pp-late", 1, 1, 2, **stages(0, 5, 4)),  # The second stage also ends the encoder.
    seq2seq("pp4", 1, 1, 4, **stages(1, 5, 2)),  # Two tensors pass between three stages.
    seq2seq("pp4-untied", 1, 1, 4, tied=False, schedule="gpipe", **stages(2), **NEWER),
    seq2seq("pp4-encoder", 1, 1, 4, **stages(3, 5, 4), **{"recompute.mode": "every:2"}),
    seq2seq("chunks", 1, 1, 2, schedule="interleaved", **stages(2), **{"recompute.mode": "selective"}),
    seq2seq("chunks-decoder", 1, 1, 2, schedule="interleaved", **stages(1, 4, 1), **{"recompute.mode": "full"}),
    seq2seq("chunks-tp-sp", 1, 2, 2, sp=True, schedule="interleaved", tied=False, **stages(3, 6, 4)),
    seq2seq("all", 2, 2, 2, sp=True, **{"zero.stage": 1}, **stages(1)),
    seq2seq("zero2", 2, 1, 2, **stages(1, 4, 2), **{"zero.stage": 2, "recompute.mode": "every:2"}),
    seq2seq("zero3", 2, 2, 1, sp=True, **{"zero.stage": 3, "recompute.mode": "full"}, **NEWER),
    seq2seq("zero3-pp", 2, 1, 2, **stages(0, 5, 2), **{"zero.stage": 3}),
    seq2seq("zero3-chunks", 2, 1, 2, schedule="interleaved", **stages(2), **{"zero.stage": 3}),
    seq2seq("muon-zero2-heads", 2, 2, 1, **{"zero.stage": 2}, **BY_HEAD),
    seq2seq("muon-zero1-pp", 2, 1, 2, **{"zero.stage": 1}, **stages(1), **BY_HEAD),
    seq2seq("head-alone", 1, 1, 2, **{"model.layers": 3, "pipeline.split": [3, 0]}),
    seq2seq("embedding-alone", 1, 1, 4, tied=False, **{"model.layers": 4, "pipeline.split": [0, 1, 2, 1]}),
]  # fmt: skip
# A case with pp runs too, without its bugs, in the test that plants them.
QUICK = {"t5-tp-sp"}


@pytest.mark.parametrize("case", quick_or_wide(CASES, QUICK))
def test_agrees_with_one_process(case: Case, launches: Launches) -> None:
    check(small_config(**case.sections("fp64")), case.world)
    assert complaints(launches.outcomes(case)) == []


@contextmanager
def _gradient_dropped(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: the last stage leaves out its own part of the gradient that flows back into the encoder."""
    for module in trainer.modules:
        if isinstance(module, GraphStage) and module.stage.last:
            real = module.forward
            module.forward = lambda batch, memory, real=real, **received: real(  # type: ignore[method-assign]
                batch, memory=memory.detach(), **received
            )
    yield


@contextmanager
def _summed_twice(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: the ranks that hold copies of the decoder's table of relative positions sum its gradients twice."""
    parallel = trainer.data_parallel
    real = parallel.finish

    def fake() -> None:
        real()
        for buffer in (each for each in parallel.trained if "decoder" in each.key.partial):
            for bucket in buffer.buckets:
                parallel.mesh.group("decoder").all_reduce(bucket.own_grads)

    parallel.finish = fake  # type: ignore[method-assign]
    yield


_BY_LABEL = {case.label: case for case in CASES}
BUGS = {
    "gradient-into-the-encoder-dropped": Bug(_BY_LABEL["t5-pp-in-one-stage"], _gradient_dropped),
    "table-summed-twice": Bug(_BY_LABEL["t5-pp-in-one-stage"], _summed_twice),
}


@pytest.mark.parametrize("name", list(BUGS))
def test_the_check_finds(name: str) -> None:
    assert_found(__name__, name)
