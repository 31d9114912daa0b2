"""The rules about losses over answers, between keys of several sections."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.config.sections import Config
from meshwright.config.tune import NEED_REFERENCE


def preferences_fit(c: Config, world: int) -> Iterator[str]:
    if c.objective != "preference":
        return
    cut = next((axis for axis in ("pp", "cp") if getattr(c.layout, axis) > 1), "")
    if cut:
        yield f"data.objective=preference can't be combined with layout.{cut} yet: set layout.{cut}=1"
    if c.layout.chunks > 1 or c.model.experts.aux_loss or c.model.experts.z_loss:
        yield "data.objective=preference takes no layout.chunks and no losses of experts: set them back"
    if c.tune.loss in NEED_REFERENCE and (not c.tune.adapts or c.tune.modules_to_save):
        yield (
            f"tune.loss={c.tune.loss} compares with the frozen weights, and the run changes them: set tune.kind=lora "
            "without modules_to_save, or use orpo or simpo"
        )
