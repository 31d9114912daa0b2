"""Fill in the blanks of a text with a model that was trained to do so.

For each mask in the source, the model generates a span token by token, with a key-value cache. The attention mask and
the two positions of a span's tokens are the same as in training (`data/blanks.py`).
"""

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
    """A whole model (one stage, no sequence parallelism) with the key-value cache of one source and its spans.

    `places`: the positions of the masks in the source, in the order in which they are filled in. `whole`: they are
    [gMASK] tokens, whose spans continue counting in the source's positions.
    """

    def __init__(
        self, module: GraphStage, model: ModelConfig, source: Sequence[int], places: Sequence[int], whole: bool
    ) -> None:
        assert module.embedding is not None and module.head is not None and not module.parallel.splits_tokens
        self.module = module.eval()
        self.model = model
        self.source = list(source)
        self.places, self.whole = list(places), whole
        self.past = {layer: KVCache(model.seq) for layer in module.layers}
        self.length = 0

    @property
    def room(self) -> int:
        """The number of tokens that the model can still read."""
        return self.model.seq - max(self.length, len(self.source))

    @torch.no_grad()
    def next_logits(self, token: int, blank: int, inner: int) -> Tensor:
        """Return the logits [vocab] after a token of a blank's span. `inner` is its place in the span, from 1 on. Every
        rank gets the same logits."""
        assert self.room > 0
        # The first call also reads the source.
        first = self.source if not self.length else []
        place = self.places[blank] + (inner if self.whole else 0)
        fields = {
            "tokens": [*first, token], "positions": [*range(len(first)), place],
            "token_types": [*[0] * len(first), inner],
        }  # fmt: skip
        if first:  # Later tokens see everything in the cache, so they need no segments.
            fields["segments"] = [*[SOURCE] * len(first), SPANS]
        device, module = self.module.parallel.device, self.module
        hidden, _ = module.trunk({k: torch.tensor([v], device=device) for k, v in fields.items()}, past=self.past)
        self.length += len(first) + 1
        assert module.head is not None
        part = module.head.logits(hidden[-1:])[0]
        tp = module.parallel.tp
        return all_gather(part, tp.name, tp.size)[: self.model.vocab].double()


def fill_blanks(
    generator: BlankGenerator, sop: int, eop: int, most: int, temperature: float = 0.0, top_p: float = 1.0,
    seed: int = 0,
) -> list[list[int]]:  # fmt: skip
    """Return the tokens of each blank, at most `most` each, without `eop`, which ends a span. `sop` starts it. If the
    model's context is full, a blank stays short or empty."""
    random = torch.Generator().manual_seed(seed)
    spans: list[list[int]] = []
    for blank in range(len(generator.places)):
        spans.append([])
        token = sop
        while generator.room > 0:
            logits = generator.next_logits(token, blank, len(spans[-1]) + 1)
            token = eop if len(spans[-1]) == most else choose_token(logits, temperature, top_p, random)
            if token == eop:
                break
            spans[-1].append(token)
    return spans
