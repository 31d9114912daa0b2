"""The families of transformers whose tensor-parallel plans were compared with a single process, with the result. No
torch.

A family may be cut along the axes on which its gradients were right. Some plans lack styles, which are added. Other
families are refused, with the reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.config.yaml_text import read_yaml
from meshwright.errors import UserError
from meshwright.spec.model.wrapped.parts import PlannedModel

_TABLE: dict[str, Any] = read_yaml(Path(__file__).with_name("families.yaml"))
VERIFIED: dict[str, list[str]] = _TABLE["verified"] or {}  # by family: the axes on which gradients were right
REFUSED: dict[str, dict[str, str]] = _TABLE["refused"] or {}  # by family and axis: the reason
ADDED: dict[str, dict[str, Any]] = _TABLE["added"] or {}  # by family: the styles that its plan lacks, and the reason


def with_added_styles(family: str, plan: dict[str, str]) -> dict[str, str]:
    """Return a family's plan with the styles added that its gradients need."""
    return {name: style for name, style in (plan | ADDED.get(family, {}).get("plan", {})).items() if style}


def check_plan(model: PlannedModel, tp: int, pp: int) -> None:
    """Raise for a layout on which a family's gradients differ from those of one process, or were never compared."""
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
