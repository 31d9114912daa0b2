"""The config sections of special parts of a model: a mixture of experts, latent attention, and rotary positions beyond
the length that the model was first trained on. Also the checks that all sections share."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from meshwright.errors import UserError, divisors, either, nearest

# The most blocks, heads and experts. Loops visit each of them, so a larger number would seem to hang.
MAX_BLOCKS = 2**16
# The longest time that a key may name: a year.
LONGEST_S = 365 * 24 * 3600.0


def one_of(key: str, value: str, names: Collection[str]) -> None:
    if value not in names:
        raise UserError(f"{key}={value} is not one of {', '.join(names)}{nearest(value, names)}")


def positive(section: str, values: object, *keys: str) -> None:
    """Refuse keys of a section that are not above zero. NaN is refused too, because no comparison with it holds."""
    for key in keys:
        if not getattr(values, key) > 0:
            raise UserError(f"{section}.{key}={getattr(values, key)} must be greater than zero")


def not_negative(section: str, values: object, *keys: str) -> None:
    """Refuse keys of a section that are below zero."""
    for key in keys:
        if not getattr(values, key) >= 0:
            raise UserError(f"{section}.{key}={getattr(values, key)} must not be negative")


def at_most(section: str, values: object, most: int, *keys: str) -> None:
    """Refuse keys of a section that are above `most`."""
    for key in keys:
        if getattr(values, key) > most:
            raise UserError(f"{section}.{key}={getattr(values, key)} is too large: use {most} at most")


def seconds_of(key: str, text: str) -> float:
    """Return the seconds of a time such as 90s, 30min or 1h30min."""
    match = re.fullmatch(r"(?:([\d.]+)h)?(?:([\d.]+)min)?(?:([\d.]+)s)?", text)
    try:
        hours, minutes, rest = (float(part or 0) for part in match.groups()) if match else (0.0, 0.0, 0.0)
        seconds = 3600 * hours + 60 * minutes + rest
    except ValueError:
        # The pattern also matches digits with several points, such as 1.2.3s.
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
    shared: int = 0  # experts that every token goes to, computed as one MLP of `shared` x `ffn` features
    every: int = 1  # every n-th block has experts: blocks n, 2n, 3n, ...
    first_dense: int = 0  # the number of blocks at the beginning that have no experts
    router: Literal["softmax", "sigmoid"] = "softmax"  # turns logits into scores; sigmoid has a balancing bias
    normalise: bool = True  # divide the scores of the chosen experts by their sum
    scale: float = 1.0  # factor on the chosen experts' scores, after `normalise`
    groups: int = 1  # experts are divided into this many groups and chosen from the best `groups_used` of them
    groups_used: int = 1
    bias_balance: float = 0.0  # step of the balancing bias per update (DeepSeek-V3: 0.001); 0: the bias is constant
    aux_loss: float = 0.0  # weight of the balance loss
    aux_level: Literal["sequence", "batch"] = "sequence"  # balance within each sequence, or each rank's micro-batch
    z_loss: float = 0.0  # weight of the router's z-loss: the mean squared log-sum-exp of its logits
    # The most tokens that an expert takes, relative to its even share; later tokens are dropped. None: no limit.
    capacity: float | None = None

    def __post_init__(self) -> None:
        not_negative(
            "model.experts", self, "count", "ffn", "shared", "first_dense", "bias_balance", "aux_loss", "z_loss"
        )
        positive("model.experts", self, "top_k", "every", "scale", "groups", "groups_used")
        at_most("model.experts", self, MAX_BLOCKS, "count")
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
    def sums_two_best(self) -> bool:
        """True if the score of a group of experts is the sum of its two best (DeepSeek-V3), instead of the best."""
        return self.router == "sigmoid"

    @property
    def has_bias(self) -> bool:
        """True if a balancing bias is added to the scores by which experts are chosen."""
        return self.sums_two_best or self.bias_balance > 0

    def in_block(self, layer: int) -> bool:
        """Return whether this block has experts. Blocks are counted from 0."""
        return self.count > 0 and layer >= self.first_dense and (layer + 1) % self.every == 0


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention, as in DeepSeek: queries, keys and values are projected from short latent vectors.
    With `kv_rank` 0, attention is the usual one."""

    kv_rank: int = 0  # elements of the latent vector of keys and values
    q_rank: int = 0  # elements of the latent vector of queries; 0: they are projected from the token itself
    nope_dim: int = 128  # elements of a query or key head that carry no position
    rope_dim: int = 64  # elements of a query or key head that rotary positions turn; all heads share the key's
    v_dim: int = 128  # elements of a value head

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


# The keys of each kind of rotary scaling. `from_list` relies on the order of those of linear and llama3.
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
    """The scaling of rotary positions for sequences longer than those a model was first trained on. `factor` slows all
    frequencies down (linear), or only the low ones, which make few turns over `original` tokens (llama3, yarn).
    dynamic raises rope_theta instead, by how much model.seq is longer than `original`."""

    kind: Literal["none", "linear", "dynamic", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original: int = 0  # tokens of a sequence that the model was first trained on
    low: float = 1.0  # llama3: frequencies with fewer turns over `original` tokens are slowed by the whole factor
    high: float = 4.0  # llama3: frequencies with more turns over `original` tokens are unchanged
    beta_fast: float = 32.0  # yarn: frequencies with more turns over `original` tokens are unchanged
    beta_slow: float = 1.0  # yarn: frequencies with fewer turns over `original` tokens are slowed by the whole factor
    truncate: bool = True  # yarn: round these two bounds to whole frequencies
    attention_factor: float = 0.0  # yarn: factor on cosines and sines; 0: 0.1 ln(factor) + 1
    # yarn: with both keys and m(s) = 0.1 s ln(factor) + 1, cosines and sines are multiplied by
    # m(mscale) / m(mscale_all_dim), and the scores of latent attention by m(mscale_all_dim)^2.
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        name = "model.rope_scaling"
        given = ROPE_KEYS[self.kind]
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

    @property
    def raises_theta(self) -> bool:
        """True if rope_theta depends on the length of samples."""
        return self.kind == "dynamic"

    @classmethod
    def from_list(cls, numbers: Sequence[float]) -> RopeScalingConfig:
        """Return the section for a list of numbers, which older configs have: one factor, or Llama 3.1's four."""
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
        """Return yarn's factor on cosines and sines and its factor on the scores of latent attention."""
        if self.kind != "yarn":
            return 1.0, 1.0
        all_dims = self._magnitude(self.mscale_all_dim)
        usual = self._magnitude(self.mscale) / all_dims if self.mscale and self.mscale_all_dim else self._magnitude(1.0)
        return self.attention_factor or usual, all_dims**2 if latent else 1.0

    def _magnitude(self, scale: float) -> float:
        """Return 0.1 scale ln(factor) + 1, the correction of attention's temperature in the YaRN paper."""
        return 1.0 if self.factor <= 1.0 else 0.1 * scale * math.log(self.factor) + 1.0
