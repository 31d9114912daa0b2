"""The config section `model.t5`, which applies to encoder-decoders only, and the rules about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from meshwright.config.blocks import not_negative, positive
from meshwright.data.span_lengths import span_lengths, tokens_for
from meshwright.errors import UserError

if TYPE_CHECKING:
    from meshwright.config.sections import Config

# The shortest sequence of an encoder: from fewer tokens no spans can be taken out.
MIN_TOKENS = 8


@dataclass(frozen=True)
class T5Config:
    """The additional keys of an encoder-decoder. model.layers counts the blocks of both stacks, and model.seq is the
    length of the encoder's sequence."""

    encoder_layers: int = 0  # 0: half of model.layers
    # Tokens of a target; 0: as many as a sample of model.seq needs if 15 % of it are taken out in spans of 3 tokens.
    decoder_seq: int = 0
    buckets: int = 32  # rows of each stack's table of relative positions
    distance: int = 128  # all larger distances share one bucket
    # Multiply the output layer's input by 1 / sqrt(hidden); auto: if embeddings are tied.
    scale_output: Literal["auto", "true", "false"] = "auto"
    start: int = 0  # the first token of the decoder's input

    @property
    def scales_output(self) -> bool:
        return self.scale_output == "true"

    def __post_init__(self) -> None:
        not_negative("model.t5", self, "encoder_layers", "decoder_seq", "start")
        positive("model.t5", self, "buckets", "distance")
        if self.buckets % 4:
            raise UserError(
                f"model.t5.buckets={self.buckets} must be a multiple of 4: half of them for each direction, of which "
                "half for single distances"
            )
        if self.distance <= self.buckets // 2:
            raise UserError(
                f"model.t5.distance={self.distance} must be above buckets / 2 = {self.buckets // 2}: raise it, or "
                "lower model.t5.buckets"
            )

    def with_derived_values(self, layers: int, seq: int, tied: bool) -> T5Config:
        """Return the section with all derived values filled in."""
        if seq < MIN_TOKENS:
            raise UserError(f"model.seq={seq} is too short for model.kind=t5: use {MIN_TOKENS} or more")
        encoder_layers = self.encoder_layers or layers // 2
        if not 0 < encoder_layers < layers:
            raise UserError(
                f"model.t5.encoder_layers={encoder_layers} leaves one of the two stacks without blocks: "
                f"model.layers={layers} counts both"
            )
        scales = self.scale_output
        if scales == "auto":
            scales = "true" if tied else "false"
        target = self.decoder_seq or span_lengths(tokens_for(seq))[1]
        return replace(self, encoder_layers=encoder_layers, decoder_seq=target, scale_output=scales)


def t5_fits(config: Config, world: int) -> Iterator[str]:
    """Check the keys that apply to encoder-decoders only."""
    model = config.model
    if not model.kind_facts.is_encoder_decoder:
        given = [f"model.t5.{key}" for key, value in vars(T5Config()).items() if getattr(model.t5, key) != value]
        given += ["pipeline.encoder_stages"] if config.pipeline.encoder_stages else []
        given += ["model.position=relative"] if model.position == "relative" else []
        for key in given:
            yield f"{key} needs an encoder-decoder, and model.kind is {model.kind}: set model.kind=t5, or leave it out"
        return
    if model.t5.start >= model.vocab:
        yield f"model.t5.start={model.t5.start} is no token of model.vocab={model.vocab}: use one below that"
    yield from _lengths_fit(config)
    yield from _stages_fit(config)


def _lengths_fit(config: Config) -> Iterator[str]:
    """Check the decoder's sequence: it must hold the targets, and must be divisible in the same ways as the encoder's,
    which other rules check."""
    model, s = config.model, config.data.spans
    target = span_lengths(tokens_for(model.seq, s.share, s.mean), s.share, s.mean)[1]
    if target > model.t5.decoder_seq:
        yield (
            f"the targets of data.spans have {target} tokens, and model.t5.decoder_seq={model.t5.decoder_seq}: "
            "set it to "
            f"{target} or more"
        )
    tokens = config.train.micro_batch * model.t5.decoder_seq
    if config.layout.sequence_parallel and tokens % config.layout.tp:
        yield (
            f"sequence parallelism cuts the {tokens} tokens of a micro-batch's targets into "
            f"tp={config.layout.tp} equal "
            "parts: change model.t5.decoder_seq or train.micro_batch, or set layout.sequence_parallel=false"
        )
    if config.recompute.pieces > tokens:
        yield f"recompute.pieces={config.recompute.pieces} is more than the {tokens} tokens of a target: lower it"
    if config.train.precision == "fp8" and tokens % (16 * config.recompute.pieces):
        yield (
            f"train.precision=fp8 multiplies multiples of 16 tokens, and train.micro_batch x model.t5.decoder_seq is "
            f"{tokens}: change one of them, or set train.precision=bf16"
        )


def _stages_fit(config: Config) -> Iterator[str]:
    """Check that both stacks have stages, and that every stage has blocks."""
    own = config.pipeline.encoder_stages
    stages = config.layout.pp * config.layout.chunks
    model = config.model
    if not own:
        return
    if config.pipeline.split:
        yield "pipeline.split already says where the decoder begins: leave one of the two out"
    if own >= stages:
        yield (
            f"pipeline.encoder_stages={own} leaves the decoder none of the pp x chunks = {stages} stages: use "
            f"{stages - 1} at most, or leave it out"
        )
    encoder = model.t5.encoder_layers
    decoder = model.layers - model.t5.encoder_layers
    if own > encoder or stages - own > decoder:
        yield (
            f"pipeline.encoder_stages={own} of {stages} stages leaves a stage without blocks: the encoder has "
            f"{encoder}, the decoder {decoder}"
        )
