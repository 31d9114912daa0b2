"""The sections of a model that stand for special parts of it: a mixture of experts, latent attention, rotary positions
beyond the length that it was first trained on."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from meshwright.errors import UserError, divisors, either

MOST_BLOCKS = 2**16  # also of heads and experts: what loops go through one by one
LONGEST_S = 365 * 24 * 3600.0


def positive(section: str, values: object, *keys: str) -> None:
    for key in keys:
        if not getattr(values, key) > 0:
            raise UserError(f"{section}.{key}={getattr(values, key)} must be greater than zero")


def not_negative(section: str, values: object, *keys: str) -> None:
    for key in keys:
        if not getattr(values, key) >= 0:
            raise UserError(f"{section}.{key}={getattr(values, key)} must not be negative")


def at_most(section: str, values: object, most: int, *keys: str) -> None:
    for key in keys:
        if getattr(values, key) > most:
            raise UserError(f"{section}.{key}={getattr(values, key)} is too large: use {most} at most")


def seconds_of(key: str, text: str) -> float:
    """The seconds of a time such as 90s, 30min or 1h30min."""
    found = re.fullmatch(r"(?:([\d.]+)h)?(?:([\d.]+)min)?(?:([\d.]+)s)?", text)
    try:
        hours, minutes, rest = (float(part or 0) for part in found.groups()) if found else (0.0, 0.0, 0.0)
        seconds = 3600 * hours + 60 * minutes + rest
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= LONGEST_S:
        raise UserError(f"{key}={text} is not a time: give it as 90s, 30min or 1h30min")
    return seconds


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of the MLP of some blocks. With `count` 0 the model is dense."""

    count: int = 0
    top_k: int = 2  # experts that each token goes to
    ffn: int = 0  # inner features of one expert; 0: model.ffn
    shared: int = 0  # experts that every token goes to, as one MLP of `shared` x `ffn` features
    every: int = 1  # every n-th block has experts: blocks n, 2n, 3n, ...
    first_dense: int = 0  # blocks before the first that may have experts
    router: Literal["softmax", "sigmoid"] = "softmax"  # how logits become scores; sigmoid has a balancing bias
    normalise: bool = True  # the scores of the chosen experts are divided by their sum
    scale: float = 1.0  # of the chosen experts' scores, after that
    groups: int = 1  # experts are chosen from the best `groups_used` of so many groups
    groups_used: int = 1
    bias_balance: float = 0.0  # per update, how far the balancing bias moves (DeepSeek-V3: 0.001); 0: it stays
    aux_loss: float = 0.0  # weight of the balance loss
    aux_level: Literal["sequence", "batch"] = "sequence"  # balance within each sequence, or each rank's micro-batch
    z_loss: float = 0.0  # weight of the mean squared log-sum of the router's logits
    capacity: float | None = None  # rows of an expert over its even share; beyond it tokens are dropped. None: dropless

    def __post_init__(self) -> None:
        not_negative(
            "model.experts", self, "count", "ffn", "shared", "first_dense", "bias_balance", "aux_loss", "z_loss"
        )
        positive("model.experts", self, "top_k", "every", "scale", "groups", "groups_used")
        at_most("model.experts", self, MOST_BLOCKS, "count")
        if self.capacity is not None and not self.capacity > 0:
            raise UserError(
                f"model.experts.capacity={self.capacity:g} leaves no room for any token: give e.g. 1.25, or leave it "
                "out to drop none"
            )
        if self.count:
            self._check_choice()
        for key in ("shared", "bias_balance", "aux_loss", "z_loss") if not self.count else ():
            if getattr(self, key):
                value = getattr(self, key)
                raise UserError(f"model.experts.{key}={value:g} needs experts, and there are none: set its count")

    def _check_choice(self) -> None:
        if self.top_k > self.count:
            raise UserError(
                f"model.experts.top_k={self.top_k} is more than model.experts.count={self.count}: "
                f"set it to {self.count} or less"
            )
        if self.count % self.groups:
            raise UserError(
                f"model.experts.groups={self.groups} does not divide model.experts.count={self.count}: "
                f"try {either(divisors(self.count))}"
            )
        if self.groups_used > self.groups:
            raise UserError(
                f"model.experts.groups_used={self.groups_used} is more than model.experts.groups={self.groups}: "
                f"set it to {self.groups} or less"
            )
        if self.top_k > self.count // self.groups * self.groups_used:
            raise UserError(
                f"model.experts.top_k={self.top_k} is more than the {self.count // self.groups * self.groups_used} "
                f"experts of {self.groups_used} of {self.groups} groups: raise model.experts.groups_used"
            )

    @property
    def has_bias(self) -> bool:
        """Whether a bias, which balances the experts, is added to the scores that experts are chosen by."""
        return self.router == "sigmoid" or self.bias_balance > 0

    def in_block(self, layer: int) -> bool:
        """Whether this block has experts."""
        return self.count > 0 and layer >= self.first_dense and (layer + 1) % self.every == 0


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention, as DeepSeek has it: queries, keys and values come from short vectors. With `kv_rank`
    0, attention is the usual one."""

    kv_rank: int = 0  # elements of the vector that keys and values are made of
    q_rank: int = 0  # the same of queries; 0: they are made of the token itself
    nope_dim: int = 128  # elements of a query's and a key's head without a position
    rope_dim: int = 64  # those that turn with the position; all heads share the key's
    v_dim: int = 128  # elements of a value's head

    def __post_init__(self) -> None:
        not_negative("model.latent", self, "kv_rank", "q_rank")
        positive("model.latent", self, "nope_dim", "rope_dim", "v_dim")
        if self.q_rank and not self.kv_rank:
            raise UserError(f"model.latent.q_rank={self.q_rank} has no effect without model.latent.kv_rank: give both")
        if self.kv_rank and self.rope_dim % 2:
            raise UserError(f"model.latent.rope_dim={self.rope_dim} must be even: positions turn pairs of elements")
        if self.kv_rank and self.v_dim > self.nope_dim + self.rope_dim:
            raise UserError(
                f"model.latent.v_dim={self.v_dim} must not be above nope_dim + rope_dim = "
                f"{self.nope_dim + self.rope_dim}: lower it"
            )


# Which keys each kind of rotary scaling has, in the order of the numbers that older configs hold.
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original"),
    "llama3": ("factor", "low", "high", "original"),
    "yarn": (
        "factor", "original", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class RopeScalingConfig:
    """How rotary positions are slowed for sequences longer than those a model was first trained on. A `factor` slows
    all frequencies (linear) or, of those that turn seldom over `original` tokens, some (llama3, yarn); dynamic raises
    rope_theta by how much model.seq is longer than `original`."""

    kind: Literal["none", "linear", "dynamic", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original: int = 0  # tokens of a sequence that the model was first trained on
    low: float = 1.0  # llama3: frequencies that turn fewer times over `original` tokens are slowed by the factor
    high: float = 4.0  # llama3: those that turn more often stay as they are
    beta_fast: float = 32.0  # yarn: those that turn more often than this stay as they are
    beta_slow: float = 1.0  # yarn: those that turn fewer times are slowed by the factor
    truncate: bool = True  # yarn: the two bounds are rounded to whole frequencies
    attention_factor: float = 0.0  # yarn: of cosines and sines; 0: 0.1 ln(factor) + 1
    mscale: float = 0.0  # yarn, with mscale_all_dim: attention_factor is the quotient of 0.1 mscale ln(factor) + 1, ...
    mscale_all_dim: float = 0.0  # ... by the same of this, whose square multiplies latent attention's scores

    def __post_init__(self) -> None:
        name, given = "model.rope_scaling", ROPE_KEYS[self.kind]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if field.name not in given and value != field.default:
                raise UserError(f"{name}.{field.name}={value} has no effect with {name}.kind={self.kind}: leave it out")
        positive(name, self, "factor", *(key for key in given if key in ("original", "low", "beta_slow")))
        not_negative(name, self, "attention_factor", "mscale", "mscale_all_dim")
        for low, high in (("low", "high"), ("beta_slow", "beta_fast")):
            if getattr(self, low) >= getattr(self, high):
                raise UserError(
                    f"{name}.{low}={getattr(self, low):g} must be below {name}.{high}={getattr(self, high):g}: "
                    "change one of them"
                )

    @classmethod
    def from_list(cls, numbers: Sequence[float]) -> RopeScalingConfig:
        """Returns the section that older configs wrote as numbers: one factor, or Llama 3.1's four."""
        kind = {0: "none", 1: "linear", 4: "llama3"}.get(len(numbers))
        if kind is None:
            raise UserError(
                f"model.rope_scaling={list(numbers)} must hold keys and values, e.g. {{kind: yarn, factor: 4, "
                "original: 8192}"
            )
        values = dict(zip(ROPE_KEYS[kind], numbers, strict=True))
        values |= {"original": int(values["original"])} if "original" in values else {}
        return cls(kind, **values)  # type: ignore[arg-type]

    def attention_factors(self, latent: bool) -> tuple[float, float]:
        """Returns what yarn multiplies cosines and sines by, and what the scores of latent attention."""
        if self.kind != "yarn":
            return 1.0, 1.0
        of_all = self._magnitude(self.mscale_all_dim)
        own = self._magnitude(self.mscale) / of_all if self.mscale and self.mscale_all_dim else self._magnitude(1.0)
        return self.attention_factor or own, of_all**2 if latent else 1.0

    def _magnitude(self, scale: float) -> float:
        return 1.0 if self.factor <= 1.0 else 0.1 * scale * math.log(self.factor) + 1.0
