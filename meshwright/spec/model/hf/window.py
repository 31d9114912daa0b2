"""How far back attention looks, as config.json has it: one length, and which blocks have it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.config.sections import ModelConfig
from meshwright.errors import UserError
from meshwright.spec.model.hf.rotary import read_length

KINDS = {"full_attention": 0, "sliding_attention": 1}
TYPES, FIRST = "layer_types", "max_window_layers"  # the kind of each block; the first block that has the window


def read_window(config: Mapping[str, Any], key: str, switch: str, by_layer: bool, layers: object) -> dict[str, Any]:
    """Return our keys of the window. Its length is under `key`, and ignored unless `switch` is set, if there is one.
    `by_layer`: config.json says which blocks have it."""
    window = read_length(config, key) if not switch or config.get(switch) else None
    if window is None or type(layers) is not int:
        return {"window": 0, "window_pattern": []}
    pattern = _pattern(config, layers) if by_layer else [1]
    if not any(pattern):
        return {"window": 0, "window_pattern": []}
    return {"window": window, "window_pattern": [] if all(pattern) else pattern}


def _pattern(config: Mapping[str, Any], layers: int) -> list[int]:
    """Return which blocks have the window: as listed, or all from one on; the shortest run of them that repeats."""
    listed = config.get(TYPES)
    if listed is None:
        first = config.get(FIRST, 0)
        if type(first) is not int:
            raise UserError(f"{FIRST}={first!r} in config.json must be a whole number: correct it")
        found = [int(layer >= first) for layer in range(layers)]
    elif not isinstance(listed, list) or len(listed) != layers or any(str(each) not in KINDS for each in listed):
        kinds = " or ".join(KINDS)
        raise UserError(f"{TYPES} in config.json must name {kinds} for each of {layers} layers: correct it")
    else:
        found = [KINDS[each] for each in listed]
    shortest = next(n for n in range(1, layers + 1) if found == (found[:n] * layers)[:layers])
    return found[:shortest]


def write_window(model: ModelConfig, key: str, switch: str, by_layer: bool) -> dict[str, Any]:
    """Return the keys of config.json for our window."""
    written: dict[str, Any] = {key: model.window or None}
    if switch:
        written[switch] = bool(model.window)
    if by_layer and model.window:
        pattern = model.window_pattern or (1,)
        kinds = [pattern[layer % len(pattern)] for layer in range(model.layers)]
        names = {number: name for name, number in KINDS.items()}
        written[TYPES] = [names[each] for each in kinds]
        written[FIRST] = kinds.index(1) if 1 in kinds else model.layers
    return written
