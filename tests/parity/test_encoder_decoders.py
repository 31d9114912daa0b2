"""An encoder-decoder (model.kind=t5) gives on every layout what one process gives: encoder and decoder on different
ranks and on the same, two tensors between the decoder's stages, and tables that several stages share. The classic bugs
are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

from meshwright.config.rules import check
from meshwright.models.t5 import T5Stage
from meshwright.train.step import Trainer
from tests.parity.cases import Case
from tests.parity.launches import Launches, data_of, reference_of
from tests.support.oracle import Outcome, Reference, compare_steps, complaints, make_trainer, small_config
from tests.support.ranks import RankFailed, run_ranks

GPT = {"model.norm": "rmsnorm", "model.mlp": "relu", "model.position": "relative", "model.bias": False}
NEWER = {"model.mlp": "tanh_geglu", "model.ffn": 48}  # as T5 v1.1 has it


def seq2seq(label: str, dp: int, tp: int, pp: int, data: dict[str, Any] | None = None, **more: Any) -> Case:
    """Keys of a config are those with a dot."""
    keys = {key: value for key, value in more.items() if "." in key}
    own = {key: value for key, value in more.items() if "." not in key}
    extra = {"model.kind": "t5", "model.head_dim": 6, "model.t5.decoder_seq": 8, "model.t5.distance": 18, **GPT, **keys}
    return Case(dp, tp, pp, label=f"t5-{label}", extra=tuple(extra.items()), data=tuple((data or {}).items()), **own)


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
    seq2seq("pp-in-one-stage", 1, 1, 2, **stages(0, 5, 2)),  # the first stage also begins the decoder
    seq2seq("pp-late", 1, 1, 2, **stages(0, 5, 4)),  # the second stage also ends the encoder
    seq2seq("pp4", 1, 1, 4, **stages(1, 5, 2)),  # two tensors between three stages
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
    seq2seq("head-alone", 1, 1, 2, **{"model.layers": 3, "pipeline.split": [3, 0]}),
    seq2seq("embedding-alone", 1, 1, 4, tied=False, **{"model.layers": 4, "pipeline.split": [0, 1, 2, 1]}),
]  # fmt: skip
QUICK = {"t5-tp-sp"}  # and pp: the cases of the bugs are also run without them


def _params() -> list[object]:
    return [pytest.param(c, id=c.name, marks=[] if c.label in QUICK else [pytest.mark.wide]) for c in CASES]


@pytest.mark.parametrize("case", _params())
def test_agrees_with_one_process(case: Case, launches: Launches) -> None:
    check(small_config(**case.sections("fp64")), case.world)
    assert complaints(launches.outcomes(case)) == []


@contextmanager
def _gradient_dropped(trainer: Trainer) -> Iterator[None]:
    """The last stage's own part of the gradient that goes back into the encoder is left out."""
    for module in trainer.modules:
        if isinstance(module, T5Stage) and module.stage.last:
            real = module.decoded
            module.decoded = lambda hidden, memory, real=real: real(hidden, memory.detach())  # type: ignore[method-assign]
    yield


@contextmanager
def _summed_twice(trainer: Trainer) -> Iterator[None]:
    """The ranks that hold copies of the decoder's table of relative positions sum its gradients twice."""
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
BUGS: dict[str, tuple[Case, Callable[[Trainer], Any]]] = {
    "gradient-into-the-encoder-dropped": (_BY_LABEL["t5-pp-in-one-stage"], _gradient_dropped),
    "table-summed-twice": (_BY_LABEL["t5-pp-in-one-stage"], _summed_twice),
}


def measure(rank: int, world: int, references: list[Reference]) -> list[tuple[Outcome, Outcome]]:
    """On a rank, for each bug: the outcome without it and the one with it."""
    found = []
    for (case, plant), reference in zip(BUGS.values(), references, strict=True):
        config = small_config(**case.sections("fp64"))
        clean = compare_steps(make_trainer(config, rank, world, data_of(case)), reference)
        trainer = make_trainer(config, rank, world, data_of(case))
        with plant(trainer):
            found.append((clean, compare_steps(trainer, reference)))
    return found


@cache
def launched() -> dict[str, list[tuple[Outcome, Outcome]]] | RankFailed:
    try:
        by_rank = run_ranks(2, measure, [reference_of(case) for case, _ in BUGS.values()], deadline=120.0)
    except RankFailed as error:
        return error
    return {name: [rank[i] for rank in by_rank] for i, name in enumerate(BUGS)}


@pytest.mark.parametrize("name", list(BUGS))
def test_the_check_finds(name: str) -> None:
    found = launched()
    if isinstance(found, RankFailed):
        raise found
    assert complaints([clean for clean, _ in found[name]]) == []
    noticed = complaints([planted for _, planted in found[name]])
    assert any(": gradients: " in complaint for complaint in noticed), noticed
