"""`python -m tests.nccl.faulty ...` is `python -m meshwright ...` with a fault planted on one rank.

The rank causes the fault itself, at a place in the program rather than at a time, so that no machine is too slow or too
fast for it. Just before, it writes the time to a file. The seconds of the other ranks count from then on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PLANT, MARK = "MESHWRIGHT_TEST_PLANT", "MESHWRIGHT_TEST_MARK"
LONG = 3600.0


@dataclass(frozen=True)
class Plant:
    """A fault: the rank does `deed` at `place` in `step`.

    Places are `forward` (between two calls of it), `call` (in the tp call of `layer`), `save`, `validation` and `data`.
    Deeds are `kill` and `stop` (itself), `sleep`, `raise` and `leave`. Calls also have `skip`, `other` (an all_gather
    instead of an all_reduce) and `size` (twice as many numbers).
    """

    rank: int
    place: str
    deed: str
    step: int = 3
    layer: int = 0

    def text(self) -> str:
        return json.dumps(asdict(self))


def _do(plant: Plant) -> None:
    mark = Path(os.environ[MARK])
    mark.with_suffix(".part").write_text(str(time.monotonic()))
    mark.with_suffix(".part").rename(mark)
    if plant.deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if plant.deed == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if plant.deed == "sleep":
        time.sleep(LONG)
    if plant.deed == "raise":
        raise ValueError("a planted error in forward")
    if plant.deed == "leave":
        sys.exit(3)


def in_forward(plant: Plant) -> None:
    from meshwright.engine import providers as gpt

    real = gpt.forward_step

    def forward_step(ctx: Any, *more: Any) -> Any:
        if ctx.parallel.streams.where[0] == plant.step:
            _do(plant)
        return real(ctx, *more)

    gpt.forward_step = forward_step


def in_call(plant: Plant) -> None:
    """Plant the fault at the n-th all_reduce over tp of a layer in forward, where n is the plant's step."""
    import torch

    from meshwright.comm.group import DONE, Group

    real, seen = Group.all_reduce, 0

    def all_reduce(self: Any, x: Any, *more: Any, **named: Any) -> Any:
        nonlocal seen
        ledger = self.ledger
        seen += self.axis == "tp" and ledger.current_layer == plant.layer and ledger.current_phase == "forward"
        if seen != plant.step:
            return real(self, x, *more, **named)
        seen += 1
        _do(plant)
        if plant.deed == "skip":
            return DONE
        if plant.deed == "other":
            return self.all_gather(torch.empty(x.numel() * self.size, dtype=x.dtype, device=x.device), x.flatten())
        if plant.deed == "size":
            x = torch.cat([x.flatten(), x.flatten()])
        return real(self, x, *more, **named)

    Group.all_reduce = all_reduce  # type: ignore[method-assign]


def in_save(plant: Plant) -> None:
    """Plant the fault after training has continued, before this rank's part of the checkpoint is written."""
    from meshwright.checkpoint import save

    real = save.write_part
    count = 0

    def write_part(*given: Any) -> Any:
        nonlocal count
        count += 1
        if count == plant.step:
            _do(plant)
        return real(*given)

    save.write_part = write_part


def in_validation(plant: Plant) -> None:
    from meshwright.engine.step import Trainer

    real = Trainer.validate

    def validate(self: Any) -> Any:
        if self.step_number >= plant.step:
            _do(plant)
        return real(self)

    Trainer.validate = validate  # type: ignore[method-assign]


def in_data(plant: Plant) -> None:
    from meshwright.engine import providers as gpt

    real = gpt.datasets_provider

    class Late:
        def __init__(self, dataset: Any) -> None:
            self.dataset = dataset

        def __getattr__(self, name: str) -> Any:
            return getattr(self.dataset, name)

        def sample(self, n: int) -> Any:
            if n >= plant.step * 8:
                _do(plant)
            return self.dataset.sample(n)

    def datasets_provider(ctx: Any, samples: Any) -> Any:
        train, *others = real(ctx, samples)
        return (Late(train), *others)

    gpt.datasets_provider = datasets_provider


PLACES = {"forward": in_forward, "call": in_call, "save": in_save, "validation": in_validation, "data": in_data}


def main() -> int:
    from meshwright.cli.main import main as command

    text = os.environ.get(PLANT)
    if text:
        plant = Plant(**json.loads(text))
        if str(plant.rank) == os.environ["RANK"]:
            PLACES[plant.place](plant)
    return int(command() or 0)


if __name__ == "__main__":
    sys.exit(main())
