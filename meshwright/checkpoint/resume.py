"""Where a run begins: at step 0, at its newest good checkpoint, or from another run's weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint import format as fmt
from meshwright.checkpoint.format import find
from meshwright.checkpoint.load import Reader, read_into, take_over
from meshwright.errors import UserError


def resume(trainer: Any, source: str | None) -> None:
    """Loads what this run goes on from. Every rank calls it; all load the same checkpoint or none.

    A damaged checkpoint is passed over, with a warning, for the one before it. A run that was begun from another
    one's weights goes on from its own checkpoints when it is started again; so do ranks after one of them died.
    """
    folder = fmt.checkpoint_folder(trainer.ctx.config)
    if trainer.writes:
        fmt.remove_unfinished(folder)
    path = find(source) if source is not None else None
    own = path is not None and path.resolve().parent == folder.resolve()
    begun = bool(fmt.checkpoints(folder)) and (fmt.restarted() or not own)
    if path is not None and not begun:
        damage = _attempt(trainer, path, model_only=not own)
        if damage is not None:
            raise damage
    else:
        _newest(trainer, folder)
    if trainer.writes:
        try:
            fmt.set_aside(folder, trainer.step_number)
        except OSError as error:
            raise UserError(f"{folder} can't be written: {error.strerror}") from None


def _newest(trainer: Any, folder: Path) -> None:
    found = [path for _, path in reversed(fmt.checkpoints(folder))]
    for number, path in enumerate(found):
        damage = _attempt(trainer, path, model_only=False)
        if damage is None:
            return
        if number == len(found) - 1:
            if isinstance(damage, SystemExit):
                raise damage
            raise UserError(f"{folder} holds no checkpoint that can be used: {damage}") from None
        if isinstance(damage, fmt.DamagedCheckpoint):
            warning = f"meshwright: warning: {damage}; going back to {found[number + 1].name}"
            print(warning, file=sys.stderr, flush=True)


def _attempt(trainer: Any, path: Path, model_only: bool) -> fmt.DamagedCheckpoint | SystemExit | None:
    """Loads on all ranks, or fails on all: a file that one rank finds damaged is damaged for all. Returns the damage,
    on the first rank that found some; on the others, who have nothing to add, a way to end."""
    error: UserError | None = None
    try:
        reader = Reader(path)
        read_into(trainer, reader, model_only)
    except UserError as caught:
        error = caught
    damaged = isinstance(error, fmt.DamagedCheckpoint)
    place = trainer.ctx.layout.world - trainer.ctx.rank  # the largest is the first rank's
    firsts = torch.tensor([place * (error is not None and not damaged), place * damaged])
    firsts = firsts.to(trainer.ctx.device.torch)
    trainer.ctx.mesh.world.all_reduce(firsts, op="max")
    mistaken, found = firsts.tolist()
    if mistaken:
        raise error if error is not None and mistaken == place else SystemExit(2)
    if not found:
        take_over(trainer, reader, model_only)
        return None
    return error if isinstance(error, fmt.DamagedCheckpoint) and found == place else SystemExit(2)
