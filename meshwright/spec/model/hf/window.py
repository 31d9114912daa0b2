"""Attention windows in a config.json: one length, and the blocks that have it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.config.sections import ModelConfig
from meshwright.errors import UserError
from meshwright.spec.model.hf.rotary import read_length

KINDS = {"full_attention": 0, "sliding_attention": 1}
TYPES, FIRST = "layer_types", "max_window_layers"  # the kind of each block; the first block that has the window


def read_window(config: Mapping[str, Any], key: str, switch: str, by_layer: bool, layers: object) -> dict[str, Any]:
    """Return our keys of the window from a config.json.

    Its length is under `key`. If `switch` is not empty, the length is ignored unless that key is true. With `by_layer`,
    config.json lists the blocks that have the window.
    """
    window = read_length(config, key) if not switch or config.get(switch) else None
    if window is None or type(layers) is not int:
        return {"window": 0, "window_pattern": []}
    pattern = _pattern(config, layers) if by_layer else [1]
    if not any(pattern):
        return {"window": 0, "window_pattern": []}
    return {"window": window, "window_pattern": [] if all(pattern) else pattern}


def _pattern(config: Mapping[str, Any], layers: int) -> list[int]:
    """Return the shortest repeating pattern of the blocks, with 1 for each block that has the window.

    The blocks are listed, or all blocks from a first one on have the window.
    """
    listed = config.get(TYPES)
    if listed is None:
        first = config.get(FIRST, 0)
        if type(first) is not int:
            raise UserError(f"{FIRST}={first!r} in config.json must be a whole number: correct it")
        windowed = [int(layer >= first) for layer in range(layers)]
    elif not isinstance(listed, list) or len(listed) != layers or any(str(kind) not in KINDS for kind in listed):
        kinds = " or ".join(KINDS)
        raise UserError(f"{TYPES} in config.json must name {kinds} for each of {layers} layers: correct it")
    else:
        windowed = [KINDS[kind] for kind in listed]
    shortest = next(n for n in range(1, layers + 1) if windowed == (windowed[:n] * layers)[:layers])
    return windowed[:shortest]


def write_window(model: ModelConfig, key: str, switch: str, by_layer: bool) -> dict[str, Any]:
    """Return the keys of config.json for our window."""
    written: dict[str, Any] = {key: model.window or None}
    if switch:
        written[switch] = bool(model.window)
    if by_layer and model.window:
        pattern = model.window_pattern or (1,)
        kinds = [pattern[layer % len(pattern)] for layer in range(model.layers)]
        names = {number: name for name, number in KINDS.items()}
        written[TYPES] = [names[kind] for kind in kinds]
        written[FIRST] = kinds.index(1) if 1 in kinds else model.layers
    return written
