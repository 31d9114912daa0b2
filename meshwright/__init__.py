"""Meshwright trains transformer language models on any mesh of devices."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["Config", "Layout", "StageOutput", "Term", "UserError", "load_config", "pretrain", "state_dicts", "wrap"]

# Imported on first use: layout, config and the schedule tables must not pay for torch.
_HOMES = {
    "Config": "meshwright.config.sections",
    "Layout": "meshwright.layout",
    "StageOutput": "meshwright.pipeline.output",
    "Term": "meshwright.pipeline.output",
    "UserError": "meshwright.errors",
    "load_config": "meshwright.config.load",
    "pretrain": "meshwright.train.pretrain",
    "state_dicts": "meshwright.train.own_models",
    "wrap": "meshwright.train.wrap",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'meshwright' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
