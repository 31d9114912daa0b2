"""The kinds of models that `model.kind` can name, with the facts about each that rules, data and commands need, and the
rules about them. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshwright.config.data import OBJECTIVES
from meshwright.config.features import FEATURES
from meshwright.errors import either
from meshwright.plugins import Registry

if TYPE_CHECKING:
    from meshwright.config.sections import Config

# The features that act around the blocks, whatever computation is in them.
OUTER_FEATURES = frozenset({
    "pp", "zero", "zero3", "node_shards", "optimizer_offload", "parameter_offload", "fp16", "compression", "adaptive",
    "algorithm", "node_copy", "replicas", "server", "elastic", "ema", "noise_scale",
})  # fmt: skip
# The features that blocks built from Meshwright's parts support, whichever tokens see each other in them.
BLOCKS = OUTER_FEATURES | {
    "dropout", "attention_dropout", "embedding_dropout", "tp", "sequence_parallel", "fp8", "compile", "pieces",
    "activation_offload", "some_recomputed", "tensor_overlap", "adapters", "dora", "adapter_dropout",
    "compiled_together", "token_types",
}  # fmt: skip
LOOKS_BOTH_WAYS = "looks back only, and {this} looks both ways"
NO_DOCUMENTS = "has no effect with {this}, whose samples are made otherwise"


@dataclass(frozen=True)
class ModelKind:
    """One kind of model. `describe` is a function that makes a `Model` from a `ModelConfig`, or the path of one as
    `package.module:name`. `objectives` are those that the kind can learn, the usual one first."""

    describe: str | Callable[..., Any]
    objectives: tuple[str, ...]
    supports: frozenset[str]  # the features of `config/features.py` that it works with
    reasons: Mapping[str, str] = field(default_factory=dict)  # for some other features, written as in `Feature.refuses`
    fixed: Mapping[str, Any] = field(default_factory=dict)  # model keys that must have this value
    unused: tuple[str, ...] = ()  # model keys that have no effect
    words: str = ""  # its name in error sentences; empty: the key and its value
    causal: bool = True  # a token sees only those before it, or a prefix of the sample
    predicts_chosen: bool = False  # only some tokens of a sample are predicted (`model.predictions`)
    writes_text: bool = True  # `generate` can ask it for text
    has_blank_positions: bool = False  # with learned positions, it has a second table for positions inside a blank
    is_encoder_decoder: bool = False
    is_foreign: bool = False  # transformers builds its modules


MODEL_KINDS = Registry("model.kind", {
    "gpt": ModelKind(
        "meshwright.spec.model.description:gpt", ("causal", "chat", "preference"), frozenset(FEATURES),
        unused=("token_types", "pooler", "predictions"),
    ),
    "bert": ModelKind(
        "meshwright.spec.model.description:bert", ("masked",), BLOCKS,
        {"alibi": LOOKS_BOTH_WAYS, "latent": LOOKS_BOTH_WAYS, "reset_attention": NO_DOCUMENTS},
        causal=False, predicts_chosen=True, writes_text=False,
    ),
    "t5": ModelKind(
        "meshwright.spec.model.description:t5", ("spans",),
        BLOCKS - {"adapters", "dora", "adapter_dropout", "activation_offload", "token_types"},
        {"reset_attention": NO_DOCUMENTS},
        fixed={
            "position": "relative", "bias": False, "qkv_bias": False, "qk_norm": False, "norm_place": "pre",
            "parallel_residual": False, "embedding_norm": False, "token_types": 0, "pooler": False, "predictions": 0,
            "embedding_grad": 1.0,
        },
        is_encoder_decoder=True,
    ),
    "glm": ModelKind(
        "meshwright.spec.model.description:glm", ("blanks", "causal"),
        (BLOCKS | {
            "experts", "aux_loss", "z_loss", "bias_balance", "ep", "grid", "second_positions"
        }) - {"attention_dropout"},
        {
            "alibi": LOOKS_BOTH_WAYS, "latent": LOOKS_BOTH_WAYS,
            "attention_dropout": "needs kernels that {this} does not have",
            "reset_attention": "can't be combined with {this}, which takes a first document for a prefix",
        },
        unused=("pooler", "predictions"), has_blank_positions=True,
    ),
    "hf": ModelKind(
        "meshwright.spec.model.description:hf", ("causal", "chat"),
        OUTER_FEATURES | {
            "tp", "dropout", "attention_dropout", "embedding_dropout", "window", "alibi", "experts", "aux_loss",
            "z_loss", "bias_balance", "latent", "token_types", "reset_attention",
        },
        words="a model that transformers builds (model.kind=hf)", is_foreign=True,
    ),
})  # fmt: skip


def kind_fits(config: Config, world: int) -> Iterator[str]:
    """Check that a kind can learn the objective, and the keys that it fixes, does not use or does not have."""
    kind, model = MODEL_KINDS.entry(config.model.kind), config.model
    if config.objective not in kind.objectives:
        others = [f"model.kind={name}" for name, other in MODEL_KINDS.items() if config.objective in other.objectives]
        learns = either([OBJECTIVES[name].learns for name in kind.objectives])
        yield (
            f"model.kind={model.kind} learns {learns}, and data.objective is {config.objective}: set "
            f"{either([f'data.objective={kind.objectives[0]}', *others])}"
        )
    fixed = {**kind.fixed, **({"kv_heads": model.heads} if kind.is_encoder_decoder else {})}
    for key, value in fixed.items():
        if getattr(model, key) != value:
            yield f"model.{key}={getattr(model, key)} can't be combined with model.kind={model.kind}: set it to {value}"
    for key in kind.unused:
        if getattr(model, key):
            yield f"model.{key}={getattr(model, key)} has no effect with model.kind={model.kind}: leave it out"
    for key in ("mask_eod", "reset_positions", "reset_attention"):
        if getattr(config.data, key) and not config.objective_facts.splits_documents:
            yield f"data.{key}=true has no effect with data.objective={config.objective}: leave it out"
    if kind.predicts_chosen and model.pooler and model.token_types == 1:
        yield "model.token_types=1 can't tell two segments apart: set it to 2, or to 0, or model.pooler=false"
    if model.predictions > model.seq:
        yield f"model.predictions={model.predictions} is more than model.seq={model.seq}: lower it"


def foreign_model_fits(config: Config, world: int) -> Iterator[str]:
    """Check the conditions that only a model built by transformers has."""
    if not config.model.kind_facts.is_foreign:
        return
    if not config.model.hf:
        yield "model.kind=hf builds the model of a folder: name it in model.hf"
    if not config.objective_facts.packed and config.data.reset_positions != config.data.reset_attention:
        yield (
            "transformers keeps attention within the tokens that positions count from 0: set data.reset_positions and "
            "data.reset_attention alike"
        )
