"""The section `model.t5`, which only an encoder-decoder has, and the rules about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from meshwright.config.blocks import not_negative, positive
from meshwright.data.span_lengths import span_lengths, tokens_for
from meshwright.errors import UserError

if TYPE_CHECKING:
    from meshwright.config.sections import Config

FEWEST_TOKENS = 8  # of an encoder's sequence, so that spans can be taken out of it


@dataclass(frozen=True)
class T5Config:
    """What an encoder-decoder has beside other models. model.layers counts the blocks of both stacks, and model.seq the
    tokens of the encoder."""

    encoder_layers: int = 0  # 0: half of model.layers
    decoder_seq: int = 0  # tokens of a target; 0: what a sample of model.seq leaves of 15 % in spans of 3 tokens
    buckets: int = 32  # rows of each stack's table of relative positions
    distance: int = 128  # all that is farther away has one bucket
    scale_output: Literal["auto", "true", "false"] = "auto"  # what the output layer takes, by 1 / sqrt(hidden)
    start: int = 0  # the token that the decoder's input begins with

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

    def completed(self, layers: int, seq: int, tied: bool) -> T5Config:
        """Returns the section without a value that still has to be derived."""
        if seq < FEWEST_TOKENS:
            raise UserError(f"model.seq={seq} is too short for model.kind=t5: use {FEWEST_TOKENS} or more")
        own = self.encoder_layers or layers // 2
        if not 0 < own < layers:
            raise UserError(
                f"model.t5.encoder_layers={own} leaves one of the two stacks without blocks: model.layers={layers} "
                "counts both"
            )
        scales = ("true" if tied else "false") if self.scale_output == "auto" else self.scale_output
        target = self.decoder_seq or span_lengths(tokens_for(seq))[1]
        return replace(self, encoder_layers=own, decoder_seq=target, scale_output=scales)


def t5_fits(c: Config, world: int) -> Iterator[str]:
    """Check the keys that only an encoder-decoder has."""
    m = c.model
    if not m.kind_facts.is_encoder_decoder:
        own = [f"model.t5.{key}" for key, value in vars(T5Config()).items() if getattr(m.t5, key) != value]
        own += ["pipeline.encoder_stages"] if c.pipeline.encoder_stages else []
        own += ["model.position=relative"] if m.position == "relative" else []
        for key in own:
            yield f"{key} needs an encoder-decoder, and model.kind is {m.kind}: set model.kind=t5, or leave it out"
        return
    if m.t5.start >= m.vocab:
        yield f"model.t5.start={m.t5.start} is no token of model.vocab={m.vocab}: use one below that"
    yield from _lengths_fit(c)
    yield from _stages_fit(c)


def _lengths_fit(c: Config) -> Iterator[str]:
    """The decoder's tokens must be divided as the encoder's are, for which other rules speak."""
    m, s = c.model, c.data.spans
    target = span_lengths(tokens_for(m.seq, s.share, s.mean), s.share, s.mean)[1]
    if target > m.t5.decoder_seq:
        yield (
            f"the targets of data.spans have {target} tokens, and model.t5.decoder_seq={m.t5.decoder_seq}: set it to "
            f"{target} or more"
        )
    tokens = c.train.micro_batch * m.t5.decoder_seq
    if c.layout.sequence_parallel and tokens % c.layout.tp:
        yield (
            f"sequence parallelism cuts the {tokens} tokens of a micro-batch's targets into tp={c.layout.tp} equal "
            "parts: change model.t5.decoder_seq or train.micro_batch, or set layout.sequence_parallel=false"
        )
    if c.recompute.pieces > tokens:
        yield f"recompute.pieces={c.recompute.pieces} is more than the {tokens} tokens of a target: lower it"
    if c.train.precision == "fp8" and tokens % (16 * c.recompute.pieces):
        yield (
            f"train.precision=fp8 multiplies multiples of 16 tokens, and train.micro_batch x model.t5.decoder_seq is "
            f"{tokens}: change one of them, or set train.precision=bf16"
        )


def _stages_fit(c: Config) -> Iterator[str]:
    own, stages, m = c.pipeline.encoder_stages, c.layout.pp * c.layout.chunks, c.model
    if not own:
        return
    if c.pipeline.split:
        yield "pipeline.split already says where the decoder begins: leave out it or pipeline.encoder_stages"
    if own >= stages:
        yield (
            f"pipeline.encoder_stages={own} leaves the decoder none of the pp x chunks = {stages} stages: use "
            f"{stages - 1} at most, or leave it out"
        )
    encoder, decoder = m.t5.encoder_layers, m.layers - m.t5.encoder_layers
    if own > encoder or stages - own > decoder:
        yield (
            f"pipeline.encoder_stages={own} of {stages} stages leaves a stage without blocks: the encoder has "
            f"{encoder}, the decoder {decoder}"
        )
