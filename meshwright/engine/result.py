"""The result of one step: its line of metrics.jsonl, and the values that displays show."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from meshwright.config.tune import PREFERENCE_ACCURACY
from meshwright.engine.output import LOSS
from meshwright.record.rank_figures import RankFigures
from meshwright.spec.traffic.counts import LEARNED


@dataclass
class StepResult:
    """The result of one step, the same on every rank.

    `tokens` went through the model. The loss is a mean over `counted` items, in units of `counted_as`. `losses` are the
    means of the single terms if the loss has several. `exposed_s` are the seconds by axis that ranks waited for
    communication, averaged over all ranks.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    loss_scale: float | None
    skipped: bool
    tokens: int
    global_batch: int
    counted: int = 0
    counted_as: str = LEARNED
    losses: dict[str, float] = field(default_factory=dict)
    monitored: dict[str, float] = field(default_factory=dict)
    experts: dict[str, Any] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    comm: dict[str, dict[str, int]] = field(default_factory=dict)
    exposed_s: dict[str, float] = field(default_factory=dict)
    ranks: RankFigures | None = None
    time: float = 0.0  # Unix time at the end of the step
    step_time_s: float = 0.0
    tflops: float | None = None  # of the model, summed over all ranks
    mfu: float | None = None
    stop: bool = False
    save: bool = False
    held: bool = False  # The update was held back because the loss or the gradient norm is bad.
    bounds: tuple[float, float] = (math.inf, math.inf)  # of loss and norm; above them the update is held back
    consumed: int = 0  # samples consumed before the step

    @property
    def why_skipped(self) -> str:
        if not self.counted:
            return "no token counted in the loss"
        if not self.grad_norm:
            return "no gradient has reached the servers"
        if self.held and math.isfinite(self.loss) and math.isfinite(self.grad_norm):
            return "the loss or the gradient's norm stood out"
        return "the loss or the gradient was not finite" if self.held else "the gradient was not finite"

    @property
    def counted_words(self) -> list[str]:
        """The words for the share of the tokens that is learned; none if all are."""
        if self.counted_as != LEARNED or self.counted == self.tokens or not self.tokens:
            return []
        return [f"{100 * self.counted / self.tokens:.3g} % learned"]

    @property
    def shown(self) -> list[str]:
        """The values that displays show in addition to the loss and the norm.

        They are the terms of the loss, the load of the busiest expert and rank relative to the mean, the dropped
        choices and the monitored values. For preference pairs, the last is the number of pairs whose chosen answer is
        the more likely one.
        """
        values = {name: value for name, value in self.losses.items() if name != LOSS}
        for key, name in (("busiest", "busiest expert"), ("busiest_rank", "busiest rank")):
            if max(self.experts.get(key, [1.0])) > 1.0:
                values[name] = max(self.experts[key])
        if self.experts.get("dropped"):
            values["dropped"] = self.experts["dropped"]
        values |= {name: value for name, value in self.monitored.items() if name != PREFERENCE_ACCURACY}
        if "scale" in self.noise:
            values["noise scale"] = self.noise["scale"]
        words = [f"{name} {value:.4g}" for name, value in values.items()]
        if PREFERENCE_ACCURACY in self.monitored:
            likelier = round(self.monitored[PREFERENCE_ACCURACY] * self.counted)
            words.append(f"{likelier} of {self.counted} chosen answers likelier")
        return words

    def line(self) -> dict[str, Any]:
        """Return the step's line of metrics.jsonl, with unrounded numbers. Empty sections are left out."""
        out: dict[str, Any] = {
            "step": self.step, "time": self.time, "loss": self.loss, "grad_norm": self.grad_norm, "lr": self.lr,
            "loss_scale": self.loss_scale, "skipped": self.skipped, "tokens": self.tokens,
            "global_batch": self.global_batch, "step_time_s": self.step_time_s,
            "tokens_per_s": self.tokens / self.step_time_s, "consumed": self.consumed, "phases": self.phases,
            "comm": self.comm,
        }  # fmt: skip
        if self.counted_as != LEARNED or self.counted != self.tokens:
            out[self.counted_as] = self.counted
        if self.tflops is not None:
            out |= {"tflops": self.tflops, "mfu": self.mfu}
        ranks = self.ranks.summary() if self.ranks else {}
        sections = {
            "exposed_s": self.exposed_s, "ranks": ranks, "losses": self.losses, "monitored": self.monitored,
            "experts": self.experts, "noise": self.noise,
        }  # fmt: skip
        return out | {name: values for name, values in sections.items() if values}
