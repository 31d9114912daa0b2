"""The sections of a config: nested frozen dataclasses. A section checks only itself; rules.py checks across sections.

Every key has a default except the model's sizes and `data.prefixes`. A size of 0 means "derived", and
`__post_init__` fills it in, so that a built config never holds a value that still has to be guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from meshwright.config.blocks import (
    MAX_BLOCKS,
    ExpertsConfig,
    LatentConfig,
    RopeScalingConfig,
    at_most,
    not_negative,
    one_of,
    positive,
    seconds_of,
)
from meshwright.config.comm import CommConfig
from meshwright.config.data import OBJECTIVES, DataConfig, Objective
from meshwright.config.faults import FaultsConfig
from meshwright.config.grid import check_grid
from meshwright.config.kinds import MODEL_KINDS, ModelKind
from meshwright.config.lr import LRConfig
from meshwright.config.memory import RecomputeConfig, ZeroConfig
from meshwright.config.optimizer import OptimizerConfig
from meshwright.config.precision import PRECISIONS, Precision, PrecisionFacts
from meshwright.config.replicas import LocalConfig, ServerConfig
from meshwright.config.t5 import T5Config
from meshwright.config.tune import NEED_REFERENCE, PREFERENCE_ACCURACY, TuneConfig
from meshwright.device_kinds import AUTO, DEVICE_KINDS, device_names
from meshwright.errors import UserError, divisors, either, nearest
from meshwright.spec.layout.context import CONTEXT_PLANS, WHOLE_SEQUENCES, ContextPlan
from meshwright.spec.layout.grid import Grid
from meshwright.spec.layout.norms import NORMS, NormKind
from meshwright.spec.schedule.kinds import AUTO_SCHEDULE, training_kinds

LOGGER_NAMES = ("tensorboard", "wandb", "mlflow", "trackio", "csv")
AUTO_SAVE_S = 900.0  # seconds between checkpoints with every=auto
FP8_UNIT = 16  # the sizes of products in fp8 must be multiples of this
# The keys of the model section that concern training only and don't change the model's function.
TRAINING_KEYS = {
    "preset", "hf", "dropout", "attention_dropout", "embedding_dropout", "embedding_grad", "init_std", "predictions",
    "t5.decoder_seq", "experts.bias_balance", "experts.aux_loss", "experts.aux_level", "experts.z_loss",
    "experts.capacity",
}  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a transformer; `preset`, and then `kind`, fill the keys that are not given."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    kind: str = "gpt"  # the kind of model, one of config/kinds.py
    preset: str = ""
    hf: str = ""  # a folder that transformers saved a model in: the source of sizes, and of a new run's first weights
    kv_heads: int = 0  # 0: as many as heads
    head_dim: int = 0  # 0: hidden / heads
    ffn: int = 0  # 0: 4 hidden, or for a gated MLP (...glu) 8/3 hidden rounded up to a multiple of 64
    norm: str = "layernorm"  # one of the kinds in spec/layout/norms.py
    norm_eps: float = 1e-5
    # pre: before attention and MLP. post: after their sums with the residual. deep (DeepNorm): as post, but the sums
    # multiply the residual by sqrt(2 layers), and values, output projections and MLPs are initialised with
    # init_std / sqrt(2 layers). sandwich: as pre, and once more before the results are added.
    norm_place: Literal["pre", "post", "deep", "sandwich"] = "pre"
    mlp: Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "swiglu", "geglu", "tanh_geglu", "reglu"] = "gelu"
    position: Literal["learned", "rope", "alibi", "relative", "none"] = "learned"  # relative: t5 only
    position_offset: int = 0  # rows of the position table before the first position (OPT: 2)
    rope_theta: float = 10000.0
    rotary_fraction: float = 1.0  # the fraction of each head that rotary positions turn
    window: int = 0  # tokens that attention looks back over, including the token itself; 0: all before it
    # One number per block, repeated over all blocks: 1 for a block with the window, 0 for one that sees all tokens
    # before it. Empty: all blocks have the window.
    window_pattern: tuple[int, ...] = ()
    bias: bool = True
    qkv_bias: bool = False  # with bias=false: a bias on queries, keys and values only
    qk_norm: bool = False  # RMS norm of queries and keys
    qk_norm_over: Literal["head", "all"] = "head"  # norm over each head, or over all heads of a token (OLMoE)
    parallel_residual: bool = False  # attention and MLP both take the block's input
    embedding_norm: bool = False  # a norm right after the embedding
    dropout: float = 0.0  # on the results of attention and MLP, before they are added to the residual
    attention_dropout: float | None = None  # on attention's probabilities; None: as dropout
    embedding_dropout: float | None = None  # None: as dropout
    embedding_grad: float = 1.0  # the token embedding gets this fraction of its gradient (GLM-130B: 0.1)
    tied_embeddings: bool = True
    init_std: float = 0.02  # t5: std of the token embedding; weights of products begin with init_std / sqrt(inputs)
    token_types: int = 0  # rows of a table of token types (BERT: 2 segments; GLM: positions in a blank)
    pooler: bool = False  # bert: pool the first token to learn the order of two segments
    predictions: int = 0  # bert: the most tokens of a sample that are masked; 0: 15 %
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    latent: LatentConfig = field(default_factory=LatentConfig)
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)
    t5: T5Config = field(default_factory=T5Config)

    def __post_init__(self) -> None:
        positive("model", self, "layers", "hidden", "heads", "vocab", "seq", "norm_eps", "rope_theta", "init_std")
        not_negative("model", self, "kv_heads", "head_dim", "ffn", "position_offset", "token_types", "predictions")
        at_most("model", self, MAX_BLOCKS, "layers", "heads")
        _ = self.kind_facts, self.norm_facts  # These raise an error for names that are not registered.
        for key in ("dropout", "attention_dropout", "embedding_dropout"):
            share = self.dropout if getattr(self, key) is None else getattr(self, key)
            if not 0.0 <= share < 1.0:
                raise UserError(f"model.{key}={share} must be at least 0 and below 1")
            object.__setattr__(self, key, share)
        if self.norm_place != "pre" and self.parallel_residual:
            raise UserError(
                f"model.norm_place={self.norm_place} can't be combined with model.parallel_residual: set it to false"
            )
        if not 0.0 < self.embedding_grad <= 1.0:
            raise UserError(f"model.embedding_grad={self.embedding_grad:g} must be above 0 and at most 1")
        if not self.head_dim and not self.latent.kv_rank and self.hidden % self.heads:
            raise UserError(
                f"model.heads={self.heads} does not divide model.hidden={self.hidden}: "
                "change one of them or give model.head_dim"
            )
        chosen = max(1, round(0.15 * self.seq)) if self.kind_facts.predicts_chosen else 0
        # 8/3 hidden gives the three weights of a gated MLP as many parameters as the two of a plain one.
        gated = -(-8 * self.hidden // 3 // 64) * 64
        latent_dim = self.latent.nope_dim + self.latent.rope_dim if self.latent.kv_rank else 0
        two_tables = self.kind_facts.has_blank_positions and self.position == "learned"
        derived = {
            "kv_heads": self.heads if self.latent.kv_rank else self.kv_heads or self.heads,
            "head_dim": latent_dim or self.head_dim or self.hidden // self.heads,
            "predictions": self.predictions or chosen,
            "token_types": self.token_types or (self.seq + 1 if two_tables else 0),
            "ffn": self.ffn or (gated if self.mlp.endswith("glu") else 4 * self.hidden),
        }
        for key, value in derived.items():
            object.__setattr__(self, key, value)
        if self.kind_facts.is_encoder_decoder:
            object.__setattr__(self, "t5", self.t5.with_derived_values(self.layers, self.seq, self.tied_embeddings))
        if self.experts.count and not self.experts.ffn:
            object.__setattr__(self, "experts", replace(self.experts, ffn=self.ffn))
        if self.heads % self.kv_heads:
            raise UserError(
                f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}: "
                f"try {either(divisors(self.heads))}"
            )
        if self.qk_norm_over != "head" and not self.qk_norm:
            raise UserError(f"model.qk_norm_over={self.qk_norm_over} needs model.qk_norm=true: set that")
        if self.qk_norm and self.latent.kv_rank:
            raise UserError("model.qk_norm has no effect with model.latent, which has norms of its own: leave it out")
        self._check_positions()
        self._check_window()

    @property
    def kind_facts(self) -> ModelKind:
        return MODEL_KINDS.entry(self.kind)

    @property
    def norm_facts(self) -> NormKind:
        return NORMS.entry(self.norm)

    @property
    def has_window(self) -> bool:
        """True if some block looks back over less than a sample."""
        return any(self.window_of(layer) for layer in range(self.layers))

    def window_of(self, layer: int) -> int:
        """Return the tokens that a block looks back over. 0 means all: its window is none, or holds a whole sample."""
        pattern = self.window_pattern or (1,)
        return self.window if self.window < self.seq and pattern[layer % len(pattern)] else 0

    @property
    def numbers_positions(self) -> bool:
        """True if blocks or the embedding read position numbers, which packed samples must then provide."""
        return self.has_rope or self.has_position_table

    @property
    def has_rope(self) -> bool:
        """True if rotary positions turn queries and keys."""
        return self.position == "rope"

    @property
    def has_alibi(self) -> bool:
        return self.position == "alibi"

    @property
    def has_position_table(self) -> bool:
        """True if the embedding adds a learned vector for each position."""
        return self.position == "learned"

    @property
    def scales_residual(self) -> bool:
        """True if sums multiply the residual, and some weights begin smaller (DeepNorm)."""
        return self.norm_place == "deep"

    @property
    def norms_results(self) -> bool:
        """True if the results of attention and MLP are normed before they are added."""
        return self.norm_place == "sandwich"

    @property
    def norm_first(self) -> bool:
        """True if blocks begin with a norm. Another norm must then follow the last block."""
        return self.norm_place == "pre" or self.norms_results

    @property
    def drops(self) -> bool:
        """True if there is any dropout in the model."""
        return bool(self.dropout or self.attention_dropout or self.embedding_dropout)

    @property
    def rotary_dim(self) -> int:
        """The number of elements of a head that rotary positions turn, in pairs."""
        return self.latent.rope_dim if self.latent.kv_rank else int(self.head_dim * self.rotary_fraction)

    def _check_window(self) -> None:
        not_negative("model", self, "window")
        if self.window_pattern and not self.window:
            raise UserError("model.window_pattern has no effect without model.window: give both, or neither")
        if any(each not in (0, 1) for each in self.window_pattern) or len(self.window_pattern) > MAX_BLOCKS:
            raise UserError(
                f"model.window_pattern={list(self.window_pattern)} must hold a 1 for each block with the window and a "
                "0 for each without, e.g. [1, 1, 1, 0]"
            )

    def _check_positions(self) -> None:
        if not 0.0 < self.rotary_fraction <= 1.0:
            raise UserError(f"model.rotary_fraction={self.rotary_fraction} must be above 0 and at most 1")
        if self.position == "rope" and self.rotary_dim % 2:
            of = f" x rotary_fraction={self.rotary_fraction}" if self.rotary_fraction < 1.0 else ""
            raise UserError(f"model.head_dim={self.head_dim}{of} must be even for model.position=rope")
        if self.position == "rope" and not self.rotary_dim:
            raise UserError(
                f"model.rotary_fraction={self.rotary_fraction} of head_dim={self.head_dim} is less than one pair: "
                "raise it or use model.position=none"
            )
        for key in ("bias", "qkv_bias", "qk_norm") if self.latent.kv_rank else ():
            if getattr(self, key):
                raise UserError(f"model.{key}=true has no effect on model.latent's attention: set model.{key}=false")
        if self.latent.kv_rank and self.position != "rope":
            raise UserError(f"model.latent needs model.position=rope, not {self.position}: change one of them")
        plain = RopeScalingConfig()
        kinds = (("position_offset", "learned", 0), ("rope_scaling", "rope", plain), ("rotary_fraction", "rope", 1.0))
        for key, of, default in kinds:
            if self.position != of and getattr(self, key) != default:
                raise UserError(f"model.{key} has no effect with model.position={self.position}: drop one of them")
        if self.rope_scaling.kind == "dynamic" and self.rotary_dim <= 2:
            raise UserError("model.rope_scaling.kind=dynamic needs more than one pair of elements to turn: use linear")
        if self.rope_scaling.kind == "yarn" and self.rope_theta <= 1.0:
            raise UserError(f"model.rope_theta={self.rope_theta:g} must be above 1 for model.rope_scaling.kind=yarn")


@dataclass(frozen=True)
class LayoutConfig:
    """The division of the ranks over the axes of parallelism. dp follows from the world size."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0  # tensor parallelism inside an expert; 0: tp
    order: str = "tp-cp-ep-dp-pp"
    sequence_parallel: bool = False
    chunks: int = 1
    node_size: int = 0  # 0: as many ranks as a node starts
    replicas: int = 1  # equal parts of the world that train separately and synchronise rarely (`train.local`)
    tp_grid: tuple[int, ...] = ()  # tp as a grid: [row, col] or [row, col, depth]; empty: tp cuts along one axis
    tp_kind: Literal["", "2d", "2.5d", "3d"] = ""  # empty: 2d if the grid has two numbers
    tp_keep_gathered: bool = False  # with a grid: save gathered factors for backward instead of gathering them again

    @property
    def grid(self) -> Grid | None:
        """The grid of tensor-parallel ranks, if there is one."""
        kind = self.tp_kind or "2d"
        return Grid.of(kind, self.tp_grid, self.tp_keep_gathered) if self.tp_grid else None

    @property
    def least_world(self) -> int:
        """The fewest ranks that the layout takes, with dp=1. Every world must be a multiple of it."""
        return self.tp * self.pp * self.cp * self.replicas

    def __post_init__(self) -> None:
        positive("layout", self, "tp", "pp", "cp", "ep", "chunks", "replicas")
        not_negative("layout", self, "node_size", "etp")
        if self.tp_grid or self.tp_kind or self.tp_keep_gathered:
            check_grid(self.tp, self.tp_grid, self.tp_kind, self.tp_keep_gathered)
        if self.pp * self.chunks > MAX_BLOCKS:
            raise UserError(
                f"layout.pp={self.pp} x layout.chunks={self.chunks} are more stages than any model has blocks: use "
                f"{MAX_BLOCKS} at most"
            )


@dataclass(frozen=True)
class ContextConfig:
    """Context parallelism (layout.cp): the way in which ranks attend to each other's tokens, and the tokens of each."""

    kind: Literal["auto", "gather", "ring", "ulysses", "hybrid"] = "auto"
    inner: int = 0  # with kind=hybrid: size of the groups that exchange heads; a ring connects the groups
    order: Literal["zigzag", "striped", "contiguous", "documents"] = "zigzag"

    def __post_init__(self) -> None:
        not_negative("context", self, "inner")
        if (self.kind == "hybrid") != (self.inner > 0):
            raise UserError(
                f"context.inner={self.inner} belongs to context.kind=hybrid, and kind is {self.kind}: give both, e.g. "
                "context.kind=hybrid context.inner=2, or neither"
            )


@dataclass(frozen=True)
class PipelineConfig:
    """The pipeline schedule and the division of layers over stages."""

    schedule: str = "1f1b"  # one of the kinds in spec/schedule/kinds.py, or auto
    split: tuple[int, ...] = ()  # layers of each virtual stage, in the order of the layers; empty: evenly
    encoder_stages: int = 0  # t5: virtual stages of the encoder; 0: blocks are split evenly, wherever the encoder ends

    def __post_init__(self) -> None:
        not_negative("pipeline", self, "encoder_stages")
        if any(count < 0 for count in self.split):
            raise UserError(f"pipeline.split={list(self.split)} must not hold a negative number of layers")
        one_of("pipeline.schedule", self.schedule, [*training_kinds(), AUTO_SCHEDULE])


@dataclass(frozen=True)
class TrainConfig:
    """Steps, batches, precision and compilation."""

    steps: int = 100
    global_batch: int = 8
    micro_batch: int = 1
    seed: int = 1234
    precision: Precision = "fp32"
    grad_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"  # dtype that gradients accumulate in: fp32 or train.precision
    fp8_scale: Literal["tensor", "row"] = "tensor"  # with precision=fp8: one scale per tensor, or per row
    clip: float = 1.0  # 0: no clipping
    compile: Literal["auto", "true", "false"] = "auto"  # torch.compile of the blocks; auto: on accelerators
    compile_together: int | str = "auto"  # neighbouring blocks that are compiled as one graph
    ramp: tuple[int, ...] = ()  # (first global batch, increment, samples over which it grows)
    gc_every: int = 50  # steps between garbage collections, which all ranks run at once; 0: when Python decides
    local: LocalConfig = field(default_factory=LocalConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    @property
    def precision_facts(self) -> PrecisionFacts:
        return PRECISIONS[self.precision]

    @property
    def compiles_on_host(self) -> bool:
        """True if blocks are compiled on request, which a CPU needs."""
        return self.compile == "true"

    @property
    def products(self) -> str:
        """The precision of linear layers' products (see nn/products.py), or "" for that of the weights."""
        if not self.precision_facts.scales_products:
            return ""
        return "fp8" if self.fp8_scale == "tensor" else "fp8-row"

    def __post_init__(self) -> None:
        positive("train", self, "steps", "global_batch", "micro_batch")
        if (together := self.compile_together) != "auto" and (isinstance(together, str) or together < 1):
            raise UserError(f"train.compile_together={together} must be auto or a number above zero")
        not_negative("train", self, "seed", "clip", "gc_every")
        if self.ramp:
            if len(self.ramp) != 3 or min(self.ramp) <= 0:
                raise UserError(
                    f"train.ramp={list(self.ramp)} must be three numbers above zero: first global batch, "
                    "increment, samples to grow over, e.g. [16, 16, 4096]"
                )
            start, increment, _ = self.ramp
            if start > self.global_batch or (self.global_batch - start) % increment:
                raise UserError(
                    f"train.ramp={list(self.ramp)} does not lead from {start} to "
                    f"train.global_batch={self.global_batch} in steps of {increment}: change one of them"
                )


@dataclass(frozen=True)
class LossScaleConfig:
    """Dynamic loss scaling, which is used with train.precision=fp16 only."""

    initial: float = 65536.0
    window: int = 1000  # good steps before the scale doubles
    hysteresis: int = 1  # overflows since the scale last doubled, before it is halved
    min: float = 1.0

    def __post_init__(self) -> None:
        positive("loss_scale", self, "initial", "window", "hysteresis", "min")
        if self.min > self.initial:
            raise UserError(f"loss_scale.min={self.min} must not be above loss_scale.initial={self.initial}")


@dataclass(frozen=True)
class RunConfig:
    """The folder of a run, the records that it writes, and the device."""

    dir: str = "runs/default"
    log_every: int = 1
    eval_every: int = 0  # 0: only after the last step
    eval_samples: int = 0  # 0: four global batches
    eval_first: bool = False  # also validate before the first step, to compare with
    tensorboard: bool = True
    loggers: tuple[str, ...] = ()  # further loggers of the numbers: tensorboard, wandb, mlflow, trackio, csv
    noise_scale: bool = False  # estimate the gradient noise scale in every step
    layers_every: int = 50  # steps between lines of norms by layer in layers.jsonl; 0: none
    peak_tflops: float = 0.0  # dense rate of one device in the run's precision, for MFU; 0: by its name, if known
    time_limit: str = ""  # a time such as 3h50min, before whose end the run is saved and stopped; empty: none
    trace: bool = False  # write one measured step to trace.json, which Perfetto opens
    device: str = AUTO  # auto, cpu, cuda, npu: a kind of `DEVICE_KINDS`
    plugins: tuple[str, ...] = ()  # Python modules that register norms, schedules and the like (docs/plugins.md)

    @property
    def on_cpu(self) -> bool:
        """True if ranks compute on CPUs whatever the machine has."""
        return self.device != AUTO and not DEVICE_KINDS[self.device].is_accelerator

    def __post_init__(self) -> None:
        one_of("run.device", self.device, device_names())
        positive("run", self, "log_every")
        not_negative("run", self, "eval_every", "eval_samples", "layers_every", "peak_tflops")
        for name in self.loggers:
            if name not in LOGGER_NAMES:
                raise UserError(f"run.loggers has '{name}'{nearest(name, LOGGER_NAMES)}: use {either(LOGGER_NAMES)}")
        if len(set(self.loggers)) < len(self.loggers):
            raise UserError(f"run.loggers={list(self.loggers)} names one twice: leave it out")
        if self.time_limit:
            seconds_of("run.time_limit", self.time_limit)
        if not self.dir:
            raise UserError("run.dir is empty: name a folder for the run")


@dataclass(frozen=True)
class CheckpointConfig:
    """The times and the place at which checkpoints are saved, and the number that is kept."""

    # Steps between checkpoints, or a time (2h); auto: about 15min, less often where saving is slow; 0: only at the end.
    every: int | str = "auto"
    keep: int = 2  # newest checkpoints to keep; 0: all
    asynchronous: bool = field(default=True, metadata={"key": "async"})  # write in the background
    busy: Literal["wait", "skip"] = "wait"  # if the previous checkpoint is still being written
    dir: str = ""  # empty: run.dir/checkpoints
    memory_every: int = 0  # steps between copies of each rank's shard into the memory of two nodes; 0: none

    def __post_init__(self) -> None:
        not_negative("checkpoint", self, "keep", "memory_every")
        if self.every_steps < 0:
            raise UserError(f"checkpoint.every={self.every} must not be negative")
        assert self.every_seconds >= 0  # The property raises an error for a text that is no time.

    @property
    def chooses_times(self) -> bool:
        """True if the times follow from the cost of saving and from the faults."""
        return self.every == "auto"

    @property
    def every_steps(self) -> int:
        """The steps between checkpoints; 0 if they are not saved by steps."""
        return self.every if isinstance(self.every, int) else 0

    @property
    def every_seconds(self) -> float:
        """The seconds between checkpoints; 0 if they are not saved by time."""
        if isinstance(self.every, int):
            return 0.0
        return AUTO_SAVE_S if self.chooses_times else seconds_of("checkpoint.every", self.every)


@dataclass(frozen=True)
class Config:
    """The config of a whole run. `extra` holds the additional sections of a user's program."""

    model: ModelConfig
    data: DataConfig
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    lr: LRConfig = field(default_factory=LRConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    run: RunConfig = field(default_factory=RunConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def objective(self) -> str:
        """The name of the training objective, one of OBJECTIVES. `auto` is the usual one of the model's kind."""
        if self.data.objective != "auto":
            return self.data.objective
        return self.model.kind_facts.objectives[0]

    @property
    def objective_facts(self) -> Objective:
        return OBJECTIVES[self.objective]

    @property
    def continues_text(self) -> bool:
        """True if the model has learned to continue texts, and looks back only."""
        return self.model.kind == "gpt" and self.objective_facts.continues

    @property
    def has_segments(self) -> bool:
        """True if samples say which of their tokens see each other: those of one document, or all but the padding."""
        return self.data.reset_attention or self.objective_facts.has_segments

    @property
    def drops(self) -> bool:
        """True if there is any dropout, in the model or in adapters."""
        return self.model.drops or bool(self.tune.adapts and self.tune.dropout)

    @property
    def compares(self) -> bool:
        """True if the loss compares with the frozen weights, which then run forward in addition to the trained ones."""
        return self.objective_facts.judges_answers and self.tune.loss in NEED_REFERENCE

    @property
    def monitored_names(self) -> tuple[str, ...]:
        """The names of the values that a step reports in addition to its loss, with Meshwright's own `forward_step`."""
        return (PREFERENCE_ACCURACY,) if self.objective_facts.judges_answers and not self.tune.judges_each else ()

    @property
    def context_kind(self) -> str:
        """The kind of context parallelism. `auto` is ulysses if heads can be divided over the cp ranks and exchanging
        them moves fewer bytes than gathering keys and values, else gather."""
        cp, tp = self.layout.cp, self.layout.tp
        if self.context.kind != "auto":
            return self.context.kind
        q, kv = self.model.heads // tp, max(1, self.model.kv_heads // tp)
        divides = q % cp == 0 and (kv % cp == 0 or cp % kv == 0)
        # The ratio of both kinds' bytes is 2 (q + kv') / (3 cp kv), where kv' = max(kv, cp) counts copied heads too.
        return "ulysses" if divides and 2 * (q + max(kv, cp)) < 3 * cp * kv else "gather"

    @property
    def context_plan(self) -> ContextPlan:
        return CONTEXT_PLANS[self.context_kind] if self.layout.cp > 1 else WHOLE_SEQUENCES

    @property
    def compiles(self) -> bool:
        """True if blocks are compiled on an accelerator. With dropout, `auto` means that they are not, because
        torch.compile does not support the separate random streams that dropout draws from."""
        return self.train.compiles_on_host or (self.train.compile == "auto" and not self.drops)
