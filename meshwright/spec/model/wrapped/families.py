"""What the comparison of every family's plan with one process found: which families may be cut, which plans lack
something that can be added, and which are refused, with the reason. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.config.yaml_text import read_yaml
from meshwright.errors import UserError
from meshwright.spec.model.wrapped.parts import PlannedModel

_TABLE: dict[str, Any] = read_yaml(Path(__file__).with_name("families.yaml"))
VERIFIED: dict[str, list[str]] = _TABLE["verified"] or {}  # the axes that were found right
REFUSED: dict[str, dict[str, str]] = _TABLE["refused"] or {}  # by axis: why
ADDED: dict[str, dict[str, Any]] = _TABLE["added"] or {}  # styles that a plan lacks, and why it needs them


def mended(family: str, plan: dict[str, str]) -> dict[str, str]:
    """Return a family's plan with what it lacks for gradients."""
    return {name: style for name, style in (plan | ADDED.get(family, {}).get("plan", {})).items() if style}


def check_plan(model: PlannedModel, tp: int, pp: int) -> None:
    """Refuse a layout on which a family's gradients are not those of one process, or were never compared."""
    family = model.family
    for axis, ranks in (("tp", tp), ("pp", pp)):
        if ranks > 1 and axis not in VERIFIED.get(family, ()):
            reason = REFUSED.get(family, {}).get(axis) or "its plan was never compared with one process"
            raise UserError(
                f"layout.{axis}={ranks} can't be used with the family {family}: {reason}; set layout.{axis}=1 (ZeRO "
                "stage 3 divides any model)"
            )
    if pp > 1 and model.beside:
        raise UserError(
            f"layout.pp={pp}: {family} has parameters beside its embedding and blocks ({model.beside[0]}), which every "
            "stage would need: set layout.pp=1"
        )
