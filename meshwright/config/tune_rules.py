"""The rules about losses over answers, between keys of several sections."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.config.sections import Config


def preferences_fit(c: Config, world: int) -> Iterator[str]:
    if c.objective != "preference":
        return
    if c.model.experts.aux_loss or c.model.experts.z_loss:
        yield "data.objective=preference takes no losses of experts: set model.experts.aux_loss=0 and z_loss=0"
    if c.compares and (not c.tune.adapts or c.tune.modules_to_save):
        yield (
            f"tune.loss={c.tune.loss} compares with the frozen weights, and the run changes them: set tune.kind=lora "
            "without modules_to_save, or use orpo or simpo"
        )
