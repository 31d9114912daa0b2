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
    from meshwright.library.model import LoadedModel as LoadedModel
    from meshwright.library.model import load as load
    from meshwright.library.planning import MemoryUse as MemoryUse
    from meshwright.library.planning import Plan as Plan
    from meshwright.library.planning import PlannedLayout as PlannedLayout
    from meshwright.library.planning import memory as memory
    from meshwright.library.planning import plan as plan
    from meshwright.library.pretraining import pretrain as pretrain
    from meshwright.library.training import Evaluation as Evaluation
    from meshwright.library.training import Training as Training
    from meshwright.library.training import evaluate as evaluate
    from meshwright.library.training import train as train
    from meshwright.run.wrap import wrap as wrap
    from meshwright.spec.layout import Layout as Layout

__version__ = "0.1.0"
__all__ = [
    "Config", "Evaluation", "Layout", "LoadedModel", "MemoryUse", "Plan", "PlannedLayout", "StageOutput",
    "Term", "Training",
    "UserError", "evaluate", "load", "load_config", "memory", "plan", "pretrain", "state_dicts", "train", "wrap",
]  # fmt: skip

# The module of each public name, imported on first use: layout, config and the schedule tables must not pay for torch.
_HOMES = {
    "Config": "meshwright.config.sections",
    "Evaluation": "meshwright.library.training",
    "Layout": "meshwright.spec.layout",
    "MemoryUse": "meshwright.library.planning",
    "LoadedModel": "meshwright.library.model",
    "Plan": "meshwright.library.planning",
    "PlannedLayout": "meshwright.library.planning",
    "StageOutput": "meshwright.engine.output",
    "Term": "meshwright.engine.output",
    "Training": "meshwright.library.training",
    "UserError": "meshwright.errors",
    "evaluate": "meshwright.library.training",
    "load": "meshwright.library.model",
    "load_config": "meshwright.config.load",
    "memory": "meshwright.library.planning",
    "plan": "meshwright.library.planning",
    "pretrain": "meshwright.library.pretraining",
    "state_dicts": "meshwright.engine.own_models",
    "train": "meshwright.library.training",
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
