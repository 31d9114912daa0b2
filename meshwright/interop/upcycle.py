"""Upcycle a dense model into a mixture of experts.

Every expert of a block begins as a copy of the block's MLP, and the router is drawn at random. If the experts' weights
sum to 1, as they do with `normalise`, the mixture computes the same function as the MLP. If experts have only a part of
the MLP's features, they are slices of it, assigned in turn. Their last product is multiplied by the number of slices,
so that experts of all slices with equal weights again sum to the MLP.
"""

from __future__ import annotations

from dataclasses import asdict, replace

import torch
from torch import Tensor

from meshwright.checkpoint.hf_files import NamedWeights
from meshwright.config.load import merge_sections
from meshwright.config.sections import ModelConfig, TrainConfig
from meshwright.config.yaml_text import parse_yaml
from meshwright.errors import UserError, divisors, either, nearest
from meshwright.nn.parallel import draw_parameter
from meshwright.spec.layout.params import slices_of
from meshwright.spec.model.description import describe
from meshwright.spec.model.hf.family import model_section
from meshwright.spec.model.part import SINGLE_RANK

WORDS = ("count", "top_k", "ffn", "every", "first_dense", "seed")


class Upcycled:
    """A view of a dense model's folder as the folder of a mixture of experts."""

    def __init__(self, folder: NamedWeights, words: str) -> None:
        given = parse_words(words)
        self.seed = given.pop("seed", TrainConfig().seed)
        self.folder, self.model = folder, mixture_of(folder.model, given)
        self.slices = folder.model.ffn // self.model.experts.ffn
        self.records = {record.name: record for record in describe(self.model).records(SINGLE_RANK).values()}
        self.shapes = {name: record.shape for name, record in self.records.items()}

    def stored_as(self, name: str, precision: str = "") -> str:
        """Return the dtype code of a tensor, like `NamedWeights.stored_as`. New tensors get that of the norm before
        them."""
        layer, _, _ = name.partition(".experts.")
        return self.folder.stored_as(name if name in self.folder.shapes else f"{layer}.norm2.weight", precision)

    def block(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Return the block of our global tensor `name` that begins at `start`."""
        if name in self.folder.shapes:
            return self.folder.block(name, start, shape)
        record = self.records[name]
        if name.endswith(".router.weight"):
            drawn = torch.empty(record.shape)
            draw_parameter(record, drawn, self.seed)
            return drawn[slices_of(start, shape)]
        experts = range(start[0], start[0] + shape[0])
        return torch.stack([self._expert(name, expert, start[1:], shape[1:]) for expert in experts])

    def _expert(self, name: str, expert: int, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Return a block of one expert's matrix, from the expert's slice of the MLP."""
        dense, ffn = name.replace(".experts.", ".mlp."), self.model.experts.ffn
        first = expert % self.slices * ffn
        if name.endswith(".down.weight"):
            return self.folder.block(dense, (start[0], first + start[1]), shape) * self.slices
        # A gated MLP has two halves, the gate's features and the others. The expert takes its slice of both.
        parts = []
        for half in range(self.records[name].shape[1] // ffn):
            low, high = max(start[0], half * ffn), min(start[0] + shape[0], (half + 1) * ffn)
            if low < high:
                row = half * self.folder.model.ffn + first + low - half * ffn
                parts.append(self.folder.block(dense, (row, start[1]), (high - low, shape[1])))
        return torch.cat(parts)


def parse_words(text: str) -> dict[str, int]:
    """Parse the numbers of --upcycle, e.g. `count=8,top_k=2`."""
    numbers: dict[str, int] = {}
    for word in text.split(","):
        key, equals, value = word.strip().partition("=")
        number = parse_yaml(value, f"--upcycle {word}") if equals else None
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise UserError(f"'{word}' in --upcycle is not of the form key=number: write e.g. count=8,top_k=2")
        if key not in WORDS or key in numbers:
            what = f"has {key} twice" if key in numbers else f"does not know '{key}'{nearest(key, WORDS)}"
            raise UserError(f"--upcycle {what}: give each of {', '.join(WORDS)} once at most")
        numbers[key] = number
    if not numbers.get("count"):
        raise UserError("--upcycle needs the number of experts: write e.g. count=8,top_k=2")
    return numbers


def mixture_of(dense: ModelConfig, given: dict[str, int]) -> ModelConfig:
    """Return the model section of a dense model with experts in place of MLPs. Raise if that is not possible."""
    if dense.experts.count:
        raise UserError(f"the model has {dense.experts.count} experts already: import it without --upcycle")
    if dense.bias:
        raise UserError("the model's MLPs have biases, which experts don't have: --upcycle needs a model without")
    ffn = given.get("ffn") or dense.ffn
    if dense.ffn % ffn:
        raise UserError(f"--upcycle ffn={ffn} does not divide the model's ffn of {dense.ffn}: {_tries(dense.ffn)}")
    slices = dense.ffn // ffn
    if given["count"] % slices:
        raise UserError(
            f"--upcycle count={given['count']} with ffn={ffn} would not give each of the MLP's {slices} slices to "
            f"equally many experts: make count a multiple of {slices}"
        )
    model = model_section(merge_sections(asdict(replace(dense, preset="")), {"experts": {**given, "ffn": ffn}}))
    if not any(model.experts.in_block(layer) for layer in range(model.layers)):
        raise UserError(f"--upcycle leaves none of the {model.layers} blocks with experts: lower every or first_dense")
    return model


def _tries(ffn: int) -> str:
    return f"try {either(n for n in divisors(ffn) if 8 * n >= ffn)}"
