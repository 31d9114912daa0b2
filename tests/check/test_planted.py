"""`meshwright check` finds planted bugs: it exits with 1 and names the parameter.

The bugs are planted into the real code of the ranks that the command starts. The reference and the comparison are those
of the command itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import meshwright.check.checking as checking
import meshwright.cli.check as command
from meshwright.cli.main import main
from meshwright.engine.step import Trainer
from meshwright.models.views import TokenView
from tests.parity.planted import Plant, mean_of_means
from tests.parity.test_planted_bugs import BUGS
from tests.support.ranks import run_ranks

CONFIG = """
model: {layers: 4, hidden: 256, heads: 8, vocab: 1000, seq: 256, position: rope}
data: {prefixes: [nowhere/tokens]}
train: {global_batch: 16, micro_batch: 2, precision: bf16}
"""
MIXTURE = ("model.mlp=swiglu", "model.bias=false", "model.experts.count=8", "model.experts.top_k=2")


@dataclass(frozen=True)
class Planted:
    """A bug, the settings that it needs, and patterns of the parameters that the command must name.

    `first` is the first differing parameter in the order of the model, `worst` the one with the largest difference.
    """

    words: tuple[str, ...]
    plant: Plant
    first: str
    worst: str = ".*"


@contextmanager
def _swapped_box(trainer: Trainer) -> Iterator[None]:
    """Let each of two ranks record that it holds the other rank's rows of one weight."""
    for buffer in trainer.data_parallel.buffers:
        for slot in buffer.slots:
            if slot.record.name == "layers.1.mlp.up.weight":
                (box,) = slot.record.boxes
                other = (box.shape[0] - box.start[0], *box.start[1:])
                object.__setattr__(slot, "record", replace(slot.record, boxes=(replace(box, start=other),)))
    yield


@contextmanager
def _sum_over_cp_missing(trainer: Trainer) -> Iterator[None]:
    """Leave out the all-reduce of gradients over the ranks that share sequences."""
    reducer = trainer.data_parallel.reducer

    def nothing(bucket: Any, grads: torch.Tensor, group: Any) -> Any:
        return mock.Mock(wait=lambda: None)

    with mock.patch.object(reducer, "all_reduce", nothing):
        yield


@contextmanager
def _documents_unmasked(trainer: Trainer) -> Iterator[None]:
    """Let attention see all earlier tokens of a sample, across its documents."""
    with mock.patch.object(TokenView, "documents", lambda *given: None):
        yield


def _of(name: str) -> Plant:
    return BUGS[name].plant


PLANTED = {
    "dropped-all-reduce": Planted(("layout.tp=2",), _of("row-output-not-summed"), "embedding.weight"),
    "wrong-loss-divisor": Planted(("layout.cp=2",), _of("loss-divided-by-cp"), "embedding.weight"),
    "swapped-box": Planted(("layout.tp=2",), _swapped_box, r"layers\.1\.mlp\.up\.weight", r"layers\.1\.mlp.*"),
    "wrong-tie": Planted(("layout.pp=2",), _of("tied-embedding-not-summed"), "embedding.weight", "embedding.weight"),
    "no-sum-over-cp": Planted(("layout.cp=2",), _sum_over_cp_missing, "embedding.weight"),
    "expert-gradients-doubled": Planted(
        ("layout.ep=2", *MIXTURE), _of("expert-gradients-times-ep"), r"layers\.0\.experts\.down\.weight",
        r".*experts\.down.*",
    ),
    "norm-not-summed": Planted(
        ("layout.tp=2", "layout.sequence_parallel=true"), _of("sp-norms-not-summed-over-tp"),
        r"layers\.0\.norm1\.\w+", r".*norm.*|.*bias",
    ),
    "kv-copies-not-summed": Planted(
        ("layout.tp=2", "model.kv_heads=1"), _of("kv-copies-not-summed"), r"layers\.0\.attention\.qkv\.\w+", r".*qkv.*"
    ),
    "micro-batch-scale": Planted(("layout.tp=2",), mean_of_means(40.0), "embedding.weight"),
    "stale-zero-shard": Planted(("zero.stage=1",), _of("zero1-update-not-gathered"), ".*"),
    "stale-zero-weights": Planted(("zero.stage=3",), _of("zero3-stale-prefetch"), ".*"),
}  # fmt: skip
PACKED = ("data.reset_attention=true", "data.reset_positions=true", "data.eod=0")
PLANTED["documents-unmasked"] = Planted(("zero.stage=1", *PACKED), _documents_unmasked, "embedding.weight")
QUICK = ("swapped-box", "expert-gradients-doubled", "documents-unmasked")


def planted_rank(rank: int, world: int, name: str, args: Any) -> None:
    """Run a rank of the command with the bug planted into its trainer."""
    real = checking.GradientRecorder
    with ExitStack() as inside:

        def with_bug(trainer: Trainer, take: Any) -> checking.GradientRecorder:
            inside.enter_context(PLANTED[name].plant(trainer))
            return real(trainer, take)

        with mock.patch.object(checking, "GradientRecorder", with_bug):
            command.as_rank(args)


def starting(name: str) -> Any:
    """Return a stand-in for the launcher that starts ranks with the bug, but an unchanged reference."""

    def start(ranks: int, body: Any, args: Any) -> int:
        if body is command.reference:
            body(args)
        else:
            run_ranks(ranks, planted_rank, name, args, deadline=300.0)
        return 0

    return start


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.wide]) for name in PLANTED]
)
def test_a_planted_bug_is_found_and_its_parameter_named(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted, path = PLANTED[name], tmp_path / "mine.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    monkeypatch.setattr(command, "start", starting(name))
    assert main(["check", str(path), "--nproc", "2", *planted.words]) == 1
    stdout = capsys.readouterr().out
    match = re.search(r"the first is (\S+) \(off by \S+\), the worst (\S+) \(off by", stdout)
    assert match, stdout
    assert ("documents of a sample see each other" in stdout) == (name == "documents-unmasked")
    assert re.fullmatch(planted.first, match[1]) and re.fullmatch(planted.worst, match[2]), match[0]
