"""Compare a checkpoint with the Hugging Face folder that it was imported from or exported to.

It compares the logits of both models on real text, and the text that each generates, in float32 on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.engine.context import Context
from meshwright.infer.evaluate import with_model
from meshwright.infer.generate import EncoderDecoderGenerator, encodes, generate, generator_of, logits_of
from meshwright.models.graph_stage import GraphStage
from meshwright.record.companions import tokenizer_beside

TEXTS = (
    "The committee met on 14 March 1987 in Genoa; nobody had read the 212 pages of the report, and yet it was adopted.",
    "def merge(left: list[int], right: list[int]) -> list[int]:\n    out = []\n    while left and right:\n",
    "Der Zug hält nicht in Köln. 今日は雨が降っています。 Привет, мир! Ça va? \u00bfQuién es?",
)
LONGEST = 96  # The most tokens of a text that are read.
WRITTEN = 24  # The tokens that each model generates after the first text.
# The largest allowed difference of logits relative to the largest logit, by the dtype of the folder's weights.
TOLERANCES = {"float64": 1e-4, "float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}

ONE_PROCESS: dict[str, dict[str, Any]] = {
    "train": {"precision": "fp32"}, "run": {"device": "cpu"}, "tune": {"quantise": "none"},
}  # fmt: skip


@dataclass(frozen=True)
class ModelComparison:
    """The comparison of two models. Differences are relative to the largest logit."""

    maximum: float
    mean: float
    tolerance: float
    tokens: int
    ours: list[int]  # The tokens that each model generates.
    theirs: list[int]
    split: int | None  # The position of the first generated token that differs.
    texts: bool  # True if real text was read, because a tokenizer was found.
    written: tuple[str, str] | None = None

    @property
    def agree(self) -> bool:
        return self.maximum <= self.tolerance and self.split is None

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"agree": self.agree}

    def words(self) -> str:
        """Return the lines that a command prints."""
        read = "tokens of real text" if self.texts else "random tokens (the folder has no tokenizer)"
        lines = [
            f"logits of {self.tokens} {read}: differ by {self.maximum:.1e} at most and {self.mean:.1e} on average of "
            f"the largest, {self.tolerance:g} is allowed"
        ]
        if self.split is None:
            lines.append(f"greedy text: the same {len(self.ours)} tokens")
        else:
            lines.append(f"greedy text: differs from token {self.split + 1} on")
        if self.written is not None:
            lines += [f"  {name}: {text!r}" for name, text in zip(("here", "transformers"), self.written, strict=True)]
        return "\n".join([*lines, "both agree" if self.agree else "THEY DIFFER"])


def compare_folders(
    checkpoint: str, folder: Path, sections: dict[str, dict[str, Any]], tolerance: float
) -> ModelComparison:
    """Compare our checkpoint with transformers' model of a folder. With a `tolerance` of 0, the dtype's default is
    used."""
    import transformers

    layers = {name: {**sections.get(name, {}), **keys} for name, keys in ONE_PROCESS.items()}

    def use(ctx: Context, modules: list[nn.Module], place: Any) -> ModelComparison:
        return _compare_logits(ctx, modules[0].eval(), transformers, folder, tolerance)

    compared: ModelComparison = with_model(checkpoint, {**sections, **layers}, use)
    return compared


def theirs_of(transformers: Any, folder: Path, kind: str) -> Any:
    """Return the model that transformers loads, in float32."""
    loader = {"t5": transformers.AutoModelForSeq2SeqLM, "bert": transformers.AutoModelForMaskedLM}
    return loader.get(kind, transformers.AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def _compare_logits(
    ctx: Context, module: nn.Module, transformers: Any, folder: Path, tolerance: float
) -> ModelComparison:
    model = ctx.config.model
    theirs = theirs_of(transformers, folder, model.kind)
    tokenizer = tokenizer_beside(folder, ())
    longest = max(2, min(LONGEST, model.seq if not model.kind_facts.writes_text else model.seq - WRITTEN))
    texts = [_ids(text, tokenizer, model.vocab, longest, n) for n, text in enumerate(TEXTS)]
    largest = worst = total = 0.0
    count = 0
    for ids in texts:
        ours = our_logits(ctx, module, ids)
        their = their_logits(theirs, ids, model.kind, model.t5.start)
        off = (ours[:, : model.vocab].double() - their[:, : model.vocab].double()).abs()
        largest = max(largest, float(their.abs().max()))
        # NaN counts as an infinite difference.
        worst = max(worst, float(off.max().nan_to_num(torch.inf)))
        total = total + float(off.sum())
        count = count + off.numel()
    known = tolerance or TOLERANCES.get(_dtype_word(folder, transformers), TOLERANCES["float32"])
    written, wrote, split = _written(ctx, module, theirs, texts[0], known * largest)
    shown = None
    if tokenizer is not None and model.kind_facts.writes_text:
        shown = (tokenizer.decode(written), tokenizer.decode(wrote))
    return ModelComparison(
        worst / largest, total / count / largest, known, sum(map(len, texts)), written, wrote, split,
        tokenizer is not None, shown,
    )  # fmt: skip


def _dtype_word(folder: Path, transformers: Any) -> str:
    config = transformers.AutoConfig.from_pretrained(folder)
    return str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")


def _ids(text: str, tokenizer: Any, vocab: int, longest: int, number: int) -> list[int]:
    """Return the tokens of a text. Return random tokens if there is no tokenizer, or if it belongs to another model."""
    ids = [] if tokenizer is None else list(tokenizer.encode(text))
    if len(ids) < 2 or max(ids) >= vocab:
        ids = torch.randint(vocab, (longest,), generator=torch.Generator().manual_seed(number)).tolist()
    return ids[:longest]


def our_logits(ctx: Context, module: nn.Module, ids: Sequence[int]) -> Tensor:
    """Return our logits [tokens, vocab] at every token. For an encoder-decoder, the target repeats the text."""
    tokens = torch.tensor([list(ids)])
    if isinstance(module, GraphStage) and encodes(module):
        generator, _ = generator_of(module, ctx.config.model, len(ids), len(ids))
        assert isinstance(generator, EncoderDecoderGenerator)
        return torch.stack([generator.next_logits(list(ids) if n == 0 else [ids[n - 1]]) for n in range(len(ids))])
    return logits_of(module, tokens)[0]


def their_logits(model: Any, ids: Sequence[int], kind: str, start: int) -> Tensor:
    tokens = torch.tensor([list(ids)])
    more = {"decoder_input_ids": torch.tensor([[start, *ids[:-1]]])} if kind == "t5" else {}
    logits: Tensor = model(input_ids=tokens, **more).logits[0]
    return logits


def _written(
    ctx: Context, module: nn.Module, theirs: Any, ids: list[int], allowed: float
) -> tuple[list[int], list[int], int | None]:
    """Return (our generated tokens, theirs, the position of the first that differs beyond rounding or None).

    If the two best tokens are closer than the allowed difference, either is right, and later tokens mean nothing.
    """
    model = ctx.config.model
    if not model.kind_facts.writes_text:
        return [], [], None
    generator, room = generator_of(module, model, len(ids), min(WRITTEN, model.seq - len(ids)))
    ours = list(generate(generator, ids, room))
    context, answer = list(ids), [model.t5.start]
    wrote: list[int] = []
    for number in range(room):
        if model.kind_facts.is_encoder_decoder:
            logits = theirs(input_ids=torch.tensor([ids]), decoder_input_ids=torch.tensor([answer])).logits[0, -1]
        else:
            logits = theirs(input_ids=torch.tensor([context])).logits[0, -1]
        # Logits beyond the vocabulary are padding.
        token = int(logits[: model.vocab].argmax())
        wrote.append(token)
        if number < len(ours) and token != ours[number]:
            close = float(logits[token] - logits[ours[number]]) <= 2 * allowed
            return ours, wrote, None if close else number
        context.append(token)
        answer.append(token)
    return ours, wrote, None
