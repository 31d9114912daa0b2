"""Where a run begins: at step 0, at its newest good checkpoint, or from another run's weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint import format as fmt
from meshwright.checkpoint.load import Reader, find, load_into
from meshwright.errors import UserError


def resume(trainer: Any, source: str | None) -> None:
    """Loads what this run goes on from. Every rank calls it; all load the same checkpoint or none.

    A damaged checkpoint is passed over, with a warning, for the one before it.
    """
    config = trainer.ctx.config
    folder = fmt.checkpoint_folder(config)
    if trainer.writes:
        fmt.remove_unfinished(folder)
    if source is not None:
        path = find(source)
        own = path.resolve().parent == folder.resolve()
        _attempt(trainer, path, model_only=not own)
    else:
        _newest(trainer, folder)
    if trainer.writes:
        fmt.set_aside(folder, trainer.step_number)


def _newest(trainer: Any, folder: Path) -> None:
    found = [path for _, path in reversed(fmt.checkpoints(folder))]
    for number, path in enumerate(found):
        try:
            _attempt(trainer, path, model_only=False)
            return
        except fmt.DamagedCheckpoint as error:
            if number == len(found) - 1:
                raise UserError(f"{folder} holds no checkpoint that can be used: {error}") from None
            if trainer.writes:
                warning = f"meshwright: warning: {error}; going back to {found[number + 1].name}"
                print(warning, file=sys.stderr, flush=True)


def _attempt(trainer: Any, path: Path, model_only: bool) -> None:
    """Loads on all ranks, or raises on all: a file that one rank finds damaged is damaged for all."""
    error: UserError | None = None
    try:
        load_into(trainer, Reader(path), model_only)
    except UserError as caught:
        error = caught
    kinds = torch.tensor([float(isinstance(error, fmt.DamagedCheckpoint)), float(error is not None)])
    kinds = kinds.to(trainer.ctx.device.torch)
    trainer.ctx.mesh.world.all_reduce(kinds)
    if error is not None:
        raise error
    if kinds[0].item():
        raise fmt.DamagedCheckpoint(f"{path} is damaged, as another rank found")
    if kinds[1].item():
        raise SystemExit(2)
