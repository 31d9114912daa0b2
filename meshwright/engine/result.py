"""What one step did: the line of metrics.jsonl, and what displays show of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from meshwright.config.tune import BETTER
from meshwright.engine.output import LOSS
from meshwright.record.rank_figures import RankFigures
from meshwright.spec.traffic.counts import LEARNED


@dataclass
class StepResult:
    """What one step did, the same on every rank. `tokens` went through the model, and `counted` is what the loss is a
    mean over, in units of `counted_as`. `losses` are the terms' own means, where the loss has several; `exposed_s` are,
    by axis, the seconds for which communication held up a rank, in the mean over all of them."""

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
    phases: dict[str, float] = field(default_factory=dict)
    comm: dict[str, dict[str, int]] = field(default_factory=dict)
    exposed_s: dict[str, float] = field(default_factory=dict)
    ranks: RankFigures | None = None
    time: float = 0.0  # when it ended
    step_time_s: float = 0.0
    tflops: float | None = None  # of the model, all ranks together
    mfu: float | None = None
    stop: bool = False
    save: bool = False
    held: bool = False  # the update was held back, since the numbers are bad
    bounds: tuple[float, float] = (math.inf, math.inf)  # of loss and norm, above which it is
    consumed: int = 0  # samples before it

    @property
    def why_skipped(self) -> str:
        if not self.counted:
            return "no token counted in the loss"
        if self.held and math.isfinite(self.loss) and math.isfinite(self.grad_norm):
            return "the loss or the gradient's norm stood out"
        return "the loss or the gradient was not finite" if self.held else "the gradient was not finite"

    @property
    def counted_words(self) -> list[str]:
        """Says which share of the tokens is learned, where not all are."""
        if self.counted_as != LEARNED or self.counted == self.tokens or not self.tokens:
            return []
        return [f"{100 * self.counted / self.tokens:.3g} % learned"]

    @property
    def shown(self) -> list[str]:
        """What is shown of a step beside its loss and norm: terms of the loss, the busiest expert and rank over the
        mean, dropped choices, monitored values; of pairs, in how many the chosen answer is the likelier one."""
        found = {name: value for name, value in self.losses.items() if name != LOSS}
        for key, name in (("busiest", "busiest expert"), ("busiest_rank", "busiest rank")):
            if max(self.experts.get(key, [1.0])) > 1.0:
                found[name] = max(self.experts[key])
        if self.experts.get("dropped"):
            found["dropped"] = self.experts["dropped"]
        found |= {name: value for name, value in self.monitored.items() if name != BETTER}
        words = [f"{name} {value:.4g}" for name, value in found.items()]
        if BETTER in self.monitored:
            likelier = round(self.monitored[BETTER] * self.counted)
            words.append(f"{likelier} of {self.counted} chosen answers likelier")
        return words

    def line(self) -> dict[str, Any]:
        """The line of metrics.jsonl, numbers unrounded."""
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
        found = {"exposed_s": self.exposed_s, "ranks": ranks, "losses": self.losses, "monitored": self.monitored}
        return out | {name: values for name, values in (found | {"experts": self.experts}).items() if values}
