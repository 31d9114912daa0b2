"""The sections of a model that stand for special parts of its blocks: a mixture of experts, latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.errors import UserError, divisors, either

MOST_BLOCKS = 2**16  # also of heads and experts: what loops go through one by one


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
