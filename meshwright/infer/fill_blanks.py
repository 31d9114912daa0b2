"""Blanks filled in by a model that was trained to: a source with masks, and for each a span, token by token, with a
key-value cache. What a span's tokens see and their two positions are those of training (`data/blanks.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.comm.ops import all_gather
from meshwright.config.sections import ModelConfig
from meshwright.data.blanks import SOURCE, SPANS
from meshwright.infer.generate import choose_token
from meshwright.models.graph_stage import GraphStage
from meshwright.nn.attention.attention import KVCache


class BlankGenerator:
    """A whole model (one stage, no sequence parallelism) and the keys and values of one source and its spans. `places`
    are those of the source's masks, in the order in which they are filled in; `whole` says that they are [gMASK]s,
    whose spans count on in the source's positions."""

    def __init__(
        self, module: GraphStage, model: ModelConfig, source: Sequence[int], places: Sequence[int], whole: bool
    ) -> None:
        assert module.embedding is not None and module.head is not None and not module.parallel.splits_tokens
        self.module, self.model, self.source = module.eval(), model, list(source)
        self.places, self.whole = list(places), whole
        self.past = {layer: KVCache(model.seq) for layer in module.layers}
        self.length = 0

    @property
    def room(self) -> int:
        """The tokens that the model can still read."""
        return self.model.seq - max(self.length, len(self.source))

    @torch.no_grad()
    def next_logits(self, token: int, blank: int, inner: int) -> Tensor:
        """Returns the logits [vocab] after a token of a blank's span, whose place in the span is `inner`, from 1 on.
        Every rank gets the same."""
        assert self.room > 0
        first = self.source if not self.length else []
        place = self.places[blank] + (inner if self.whole else 0)
        fields = {
            "tokens": [*first, token], "positions": [*range(len(first)), place],
            "token_types": [*[0] * len(first), inner],
        }  # fmt: skip
        if first:  # later, a token sees all that was read
            fields["segments"] = [*[SOURCE] * len(first), SPANS]
        device, module = self.module.parallel.device, self.module
        hidden, _ = module.trunk({k: torch.tensor([v], device=device) for k, v in fields.items()}, past=self.past)
        self.length += len(first) + 1
        assert module.head is not None
        part, tp = module.head.logits(hidden[-1:])[0], module.parallel.tp
        return all_gather(part, tp.name, tp.size)[: self.model.vocab].double()


def fill_blanks(
    generator: BlankGenerator, sop: int, eop: int, most: int, temperature: float = 0.0, top_p: float = 1.0,
    seed: int = 0,
) -> list[list[int]]:  # fmt: skip
    """Returns the tokens of each blank, at most `most`, without the one that ends them. A blank that finds no room in
    the model's context stays short, or empty."""
    random = torch.Generator().manual_seed(seed)
    found: list[list[int]] = []
    for blank in range(len(generator.places)):
        found.append([])
        token = sop
        while generator.room > 0:
            logits = generator.next_logits(token, blank, len(found[-1]) + 1)
            token = eop if len(found[-1]) == most else choose_token(logits, temperature, top_p, random)
            if token == eop:
                break
            found[-1].append(token)
    return found
