"""Meshwright trains transformer language models on any mesh of devices.

Shard your own module over the ranks of a job and train it:

    trained = meshwright.wrap(module, {"layout": {"tp": 2}, "zero": {"stage": 1}})
    result = trained.step(batch)
    trained.save("runs/mine")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# Editors and type checkers read these imports. At run time each name is imported on first use, see _HOMES.
if TYPE_CHECKING:
    from meshwright.config.load import load_config as load_config
    from meshwright.config.sections import Config as Config
    from meshwright.engine.output import StageOutput as StageOutput
    from meshwright.engine.output import Term as Term
    from meshwright.engine.own_models import state_dicts as state_dicts
    from meshwright.errors import UserError as UserError
    from meshwright.library.model import Model as Model
    from meshwright.library.model import load as load
    from meshwright.library.pretraining import pretrain as pretrain
    from meshwright.run.wrap import wrap as wrap
    from meshwright.spec.layout import Layout as Layout

__version__ = "0.1.0"
__all__ = [
    "Config", "Layout", "Model", "StageOutput", "Term", "UserError", "load", "load_config", "pretrain", "state_dicts",
    "wrap",
]  # fmt: skip

# The module of each public name, imported on first use: layout, config and the schedule tables must not pay for torch.
_HOMES = {
    "Config": "meshwright.config.sections",
    "Layout": "meshwright.spec.layout",
    "Model": "meshwright.library.model",
    "StageOutput": "meshwright.engine.output",
    "Term": "meshwright.engine.output",
    "UserError": "meshwright.errors",
    "load": "meshwright.library.model",
    "load_config": "meshwright.config.load",
    "pretrain": "meshwright.library.pretraining",
    "state_dicts": "meshwright.engine.own_models",
    "wrap": "meshwright.run.wrap",
}


def __dir__() -> list[str]:
    """Return the public names, so that Tab completes them before they are imported."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'meshwright' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
