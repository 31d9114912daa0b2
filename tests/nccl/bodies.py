"""The bodies that ranks run for the cases of one world."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from meshwright.check.made_samples import MadeAnswers
from meshwright.comm.group import DONE, Group
from meshwright.config.sections import Config
from meshwright.device import Device
from meshwright.engine.sharding.compression import low_rank
from meshwright.engine.step import Trainer
from meshwright.spec.layout.params import stream_seed
from tests.nccl.exact_cases import Exact
from tests.nccl.same_cases import Same
from tests.nccl.transports import Transport
from tests.support.oracle import (
    Outcome,
    Reference,
    compare_states,
    exact_reference,
    gather_global,
    made_for,
    make_trainer,
    parameters,
    small_config,
)

Plant = Any  # A context manager that takes the trainer of the rank.


def data_of(config: Config, case: Exact | None = None) -> Any:
    if config.objective == "preference":
        return MadeAnswers(config.model.vocab, config.model.seq, config.tune.loss == "kto")
    return made_for(config, **dict(case.case.data) if case else {})


def bytes_sent(trainer: Trainer) -> int:
    """Return the bytes that this rank put on the wire since the trainer's last step began."""
    return sum(totals.wire_bytes for totals in trainer.ctx.ledger.totals().values())


def find_reference(rank: int, world: int, case: Exact, transport: Transport) -> Reference:
    """Compute the reference of one process, with which every layout of a case is compared."""
    config = small_config(**case.alone(transport))
    device = Device.choose(transport.device)
    return exact_reference(make_trainer(config, data=data_of(config, case), device=device))


def compare_with_one(
    rank: int, world: int, case: Exact, transport: Transport, reference: Reference, plant: Plant | None = None
) -> tuple[Outcome, int]:
    """Return how far this rank is from one process, and the bytes of its last step."""
    config = small_config(**case.sections(transport))
    device = Device.choose(transport.device)
    trainer = make_trainer(config, rank, world, data_of(config, case), device=device)
    if plant is not None:
        with plant(trainer):
            return compare_states(trainer, reference), bytes_sent(trainer)
    return compare_states(trainer, reference), bytes_sent(trainer)


def few_steps(rank: int, world: int, case: Same, transport: Transport) -> dict[str, Any]:
    """Return the losses, norms and parameters of this rank, for a comparison with the same rank elsewhere."""
    config = small_config(**case.sections)
    device = Device.choose(transport.device)
    with _drawn_on_the_host():
        trainer = make_trainer(config, rank, world, data_of(config), device=device)
    steps = [trainer.step() for _ in range(case.steps)]
    return {
        "losses": [step.loss for step in steps], "norms": [step.grad_norm for step in steps],
        "parameters": gather_global(parameters(trainer)), "bytes": bytes_sent(trainer),
    }  # fmt: skip


@contextmanager
def _drawn_on_the_host() -> Iterator[None]:
    """Draw the first factors of PowerSGD on the host, because a GPU's generator gives other numbers for the same
    seed.
    """

    def draw(self: Any, slot: Any) -> None:
        factor, numbers = self.factors[id(slot)], torch.Generator()
        numbers.manual_seed(stream_seed(self.seed, "powersgd", slot.record.name))
        factor.copy_(torch.empty(factor.shape, dtype=factor.dtype).normal_(generator=numbers))

    with mock.patch.object(low_rank.LowRankReducer, "draw", draw):
        yield


@contextmanager
def dropped_sum(trainer: Trainer) -> Iterator[None]:
    """Plant a bug: the sum of the first bucket's gradients over the data-parallel ranks is left out."""
    bucket = trainer.data_parallel.trained[0].buckets[0].own_grads.data_ptr()
    real = Group.all_reduce

    def fake(self: Group, x: torch.Tensor, *more: Any, **named: Any) -> Any:
        return DONE if x.data_ptr() == bucket else real(self, x, *more, **named)

    with mock.patch.object(Group, "all_reduce", fake):
        yield
