"""A table of features with the combinations that are not supported, and the rule that makes error sentences of it. No
torch.

Each feature lists those features above it in the table that it can't be combined with. A kind of model
(`config/kinds.py`) and a norm (`spec/layout/norms.py`) list all features that they support instead, so that by default
a new one supports none. `tests/config/test_features.py` tries every pair that is not refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.errors import either

if TYPE_CHECKING:
    from meshwright.config.sections import Config

# The planner accepts this combination, because published runs have it. Training does not support it.
PLANNED_ONLY = ("cp", "attention_dropout")


def always(c: Config) -> bool:
    """Return True: the key of a feature has an effect in every config."""
    return True


@dataclass(frozen=True)
class Feature:
    """A feature that one config key asks for.

    `refuses` maps each feature above it that it can't be combined with to a reason. A reason is a clause that follows
    the key of the other feature and may name this one as {this}. It is empty if the combination is only not built yet.
    """

    key: str
    plain: tuple[Any, ...]  # the values that don't ask for the feature; error sentences suggest the first
    refuses: Mapping[str, str]
    on: tuple[Any, ...] = ()  # the values that ask for the feature; empty: all but the plain ones
    where: Callable[[Config], bool] = always  # False for configs in which the key has no effect

    def is_used(self, c: Config) -> bool:
        """Return whether a config uses the feature."""
        value = attrgetter(self.key)(c)
        return (value in self.on if self.on else value not in self.plain) and self.where(c)

    def words(self, c: Config) -> str:
        """Return the key with its value, as a user writes it."""
        return _word(self.key, attrgetter(self.key)(c))

    @property
    def fix(self) -> str:
        """The key=value word that turns the feature off."""
        return _word(self.key, self.plain[0])


def _word(key: str, value: Any) -> str:
    """Return a key and its value as a user writes them."""
    if isinstance(value, bool):
        return f"{key}={str(value).lower()}"
    if isinstance(value, float):
        return f"{key}={value:g}"
    return f"{key}={list(value) if isinstance(value, tuple) else value}"


def none_of(*names: str) -> dict[str, str]:
    """Return refusals without a reason, for combinations that have not been built yet."""
    return dict.fromkeys(names, "")


DROPOUTS = ("dropout", "attention_dropout", "embedding_dropout", "adapter_dropout")
NOT_COMPILED = "draws from random streams of its own, which torch.compile can't take for {this}"
FEATURES: dict[str, Feature] = {
    "dropout": Feature("model.dropout", (0.0,), {}),
    "attention_dropout": Feature("model.attention_dropout", (0.0,), {}),
    "embedding_dropout": Feature("model.embedding_dropout", (0.0,), {}),
    "alibi": Feature("model.position", ("learned",), {}, on=("alibi",)),
    "window": Feature("model.window", (0,), {}),
    "latent": Feature("model.latent.kv_rank", (0,), none_of("window")),
    "experts": Feature("model.experts.count", (0,), {}),
    "aux_loss": Feature("model.experts.aux_loss", (0.0,), {}),
    "z_loss": Feature("model.experts.z_loss", (0.0,), {}),
    "bias_balance": Feature("model.experts.bias_balance", (0.0,), {}),
    # A glm with learned positions has a second position table, for the positions inside a blank.
    "second_positions": Feature(
        "model.position", ("rope",), {}, on=("learned",),
        where=lambda c: c.model.kind_facts.has_blank_positions,
    ),
    "token_types": Feature("model.token_types", (0,), {}, where=lambda c: not FEATURES["second_positions"].is_used(c)),
    "reset_attention": Feature("data.reset_attention", (False,), {}),
    "tp": Feature("layout.tp", (1,), {}),
    "pp": Feature("layout.pp", (1,), {}),
    "sequence_parallel": Feature("layout.sequence_parallel", (False,), {}),
    "cp": Feature("layout.cp", (1,), none_of("attention_dropout")),
    "ep": Feature("layout.ep", (1,), {}),
    "zero": Feature("zero.stage", (0,), {}),
    "zero3": Feature("zero.stage", (2,), {}, on=(3,)),
    "node_shards": Feature("zero.shard_group", ("dp",), {}, where=lambda c: c.zero.stage > 0),
    "optimizer_offload": Feature("zero.offload.optimizer", ("none",), {}),
    "parameter_offload": Feature("zero.offload.params", ("none",), {}),
    "fp16": Feature("train.precision", ("bf16",), {}, on=("fp16",)),
    "fp8": Feature("train.precision", ("bf16",), {}, on=("fp8",)),
    "compile": Feature(
        "train.compile", ("auto",), dict.fromkeys(DROPOUTS[:3], NOT_COMPILED), on=("true",)
    ),
    "pieces": Feature("recompute.pieces", (1,), {}),
    "activation_offload": Feature("recompute.offload", (False,), {}),
    "some_recomputed": Feature("recompute.mode", ("none", "full"), {}),
    "tensor_overlap": Feature(
        "comm.overlap.tensor", (False,), none_of("fp8", "pieces"), where=lambda c: c.layout.tp > 1
    ),
    "adapters": Feature(
        "tune.kind", ("full",),
        none_of("tensor_overlap") | {"bias_balance": "moves weights that {this} leaves alone"},
    ),
    "dora": Feature("tune.kind", ("lora",), none_of("pieces"), on=("dora",)),
    "adapter_dropout": Feature(
        "tune.dropout", (0.0,),
        {
            "compile": "can't take the random streams of {this}",
            "pieces": "would drop other elements of {this} when it computes them again",
        },
        where=lambda c: c.tune.adapts,
    ),
    "preferences": Feature(
        "data.objective", ("auto",), dict.fromkeys(("aux_loss", "z_loss"), "is a loss that {this} does not take"),
        on=("preference",),
    ),
    "compression": Feature("comm.reduce.kind", ("plain",), {}),
    "adaptive": Feature("comm.reduce.adaptive", (False,), {}),
    "algorithm": Feature(
        "comm.algorithm.dp", ("torch",),
        {"node_shards": "sums inside the nodes first, which {this} does not do"}
        | dict.fromkeys(("compression", "adaptive"), "compresses gradients, which {this} sums as they are"),
    ),
    "node_copy": Feature("comm.gather.node_copy", (False,), none_of("cp", "node_shards", "parameter_offload")),
    "replicas": Feature(
        "layout.replicas", (1,),
        {"fp16": "has a loss scale that each replica of {this} would change for itself"}
        | dict.fromkeys(
            ("compression", "adaptive"), "compresses sums inside a replica of {this}, and train.local.compress.kind "
            "what replicas send"
        )
        | dict.fromkeys(
            ("optimizer_offload", "parameter_offload"), "moves states that {this} needs on the device to synchronise"
        ),
    ),
    "server": Feature(
        "train.server.ranks", (0,),
        none_of("zero", "compression", "adaptive", "algorithm", "replicas", "experts"),
    ),
    "elastic": Feature("faults.elastic", (False,), {"replicas": "is a number that {this} can't change"}),
    "grid": Feature(
        "layout.tp_grid", ((),),
        none_of(
            "cp", "ep", "experts", "latent", "token_types", "fp8", "tensor_overlap", "pieces", "adapters",
            "preferences",
        )
        | {
            "sequence_parallel": "cuts tokens that {this} has cut already",
            "second_positions": "needs a second table with model.kind=glm, which {this} can't cut yet",
        },
    ),
    "ema": Feature(
        "optimizer.ema", (0.0,), {"replicas": "has outer weights, of which {this} keeps no average"} | none_of("server")
    ),
    "noise_scale": Feature(
        "run.noise_scale", (False,),
        {"cp": "divides the tokens of one sample, so that {this} finds no small batches"}
        | none_of("replicas", "server"),
    ),
    # Between the blocks of one compiled graph nothing can be communicated, gathered or added to the loss.
    "compiled_together": Feature(
        "train.compile_together", ("auto", 1),
        none_of("tp", "cp", "zero3", "experts", "pieces") | dict.fromkeys(DROPOUTS, NOT_COMPILED),
    ),
}  # fmt: skip


class ModelChoice(NamedTuple):
    """A choice that every model makes, such as its kind or its norm, with the features that the choice supports."""

    words: str  # its key and value, for error sentences
    supports: frozenset[str]
    asked: frozenset[str]  # the features for which `supports` counts; the choice does not concern the others
    reasons: Mapping[str, str]  # reasons for some refusals, written as in `Feature.refuses`


def owners_of(c: Config) -> Iterator[ModelChoice]:
    """Yield the choices of a config that support only some features: the model's kind and its norm."""
    kind, norm = c.model.kind_facts, c.model.norm_facts
    yield ModelChoice(kind.words or f"model.kind={c.model.kind}", kind.supports, frozenset(FEATURES), kind.reasons)
    yield ModelChoice(f"model.norm={c.model.norm}", norm.supports, frozenset({"grid"}), {})


def exclusions(config: Config, planned: bool = False) -> Iterator[str]:
    """Yield a sentence for each two choices of a config that can't be combined. With `planned`, the combination that
    only the planner accepts is left out."""
    used = [name for name, feature in FEATURES.items() if feature.is_used(config)]
    for owner in owners_of(config):
        for name in used:
            if name in owner.asked - owner.supports:
                feature = FEATURES[name]
                yield _sentence(feature.words(config), owner.words, owner.reasons.get(name, ""), [feature.fix], True)
    for first, second in combinations(used, 2):
        above, below = FEATURES[first], FEATURES[second]
        if first in below.refuses and not (planned and (second, first) == PLANNED_ONLY):
            yield _sentence(
                above.words(config), below.words(config), below.refuses[first], [above.fix, below.fix], False
            )


def _sentence(one: str, other: str, reason: str, fixes: list[str], owned: bool) -> str:
    """Return the error sentence for two choices. With `owned`, `other` is a model's kind or norm, and `one` is the
    subject of the sentence."""
    fix = f"set {either(fixes)}"
    if reason:
        return f"{one} {reason.format(this=other)}: {fix}"
    subject, object_ = (one, other) if owned else (other, one)
    return f"{subject} can't be combined with {object_} yet: {fix}"


def keep_blocks_apart(c: Config) -> list[str]:
    """Return the features of a config that prevent compiling several blocks as one graph, as key=value words that turn
    them off."""
    refused = FEATURES["compiled_together"].refuses
    return [FEATURES[name].fix for name in refused if FEATURES[name].is_used(c)]
