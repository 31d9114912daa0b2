"""Score continuations of texts with a model, on any layout.

Texts are packed into samples, and no text sees another. Every rank gets all results.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.comm.ops import all_gather
from meshwright.data.packed import best_fit
from meshwright.engine.batches import MicroBatches, SampleSubset
from meshwright.engine.context import Context
from meshwright.engine.executor import Executor
from meshwright.engine.output import LOSS, StageOutput, Term
from meshwright.engine.step import fields_of, mean_loss, validation_unit
from meshwright.models.graph_stage import GraphStage
from meshwright.models.heads import Head
from meshwright.nn.grid.sides import gather_input
from meshwright.nn.loss import logit_tiles


class Continuation(NamedTuple):
    """The tokens of a text. The last `scored` tokens are the continuation to score."""

    ids: list[int]
    scored: int


class Score(NamedTuple):
    """The log-probability of a continuation, and whether each of its tokens is the most likely one."""

    logp: float
    greedy: bool


class PackedTexts:
    """Samples of concatenated texts. At scored tokens, `loss_mask` holds the number of the text plus 1."""

    def __init__(self, texts: Sequence[Continuation], seq: int, positions: bool) -> None:
        self.texts, self.seq, self.positions = texts, seq, positions
        self.bins = best_fit([len(text.ids) - 1 for text in texts], seq)

    def sample(self, n: int) -> dict[str, np.ndarray[Any, Any]]:
        fields = {key: np.zeros(self.seq, np.int64) for key in ("tokens", "labels", "loss_mask", "segments")}
        places, begin = np.arange(self.seq), 0
        for segment, number in enumerate(self.bins[n]):
            ids = np.array(self.texts[number].ids)
            scored = self.texts[number].scored
            here = slice(begin, begin + len(ids) - 1)
            fields["tokens"][here], fields["labels"][here], fields["segments"][here] = ids[:-1], ids[1:], segment
            fields["loss_mask"][here.stop - scored : here.stop] = number + 1
            places[here], begin = np.arange(len(ids) - 1), here.stop
        # The rest of the sample is padding, a separate segment.
        fields["segments"][begin:], places[begin:] = len(self.bins[n]), np.arange(self.seq - begin)
        return fields | ({"positions": places} if self.positions else {})


def scores(ctx: Context, modules: Sequence[nn.Module], texts: Sequence[Continuation]) -> list[Score]:
    """Return the score of each text. A text has at most one token more than the model's context. All ranks call this
    with the same texts."""
    if not texts:
        return []
    data = PackedTexts(texts, ctx.config.model.seq, ctx.config.model.numbers_positions)
    sums = torch.zeros(len(texts), 2, dtype=torch.float64, device=ctx.device.torch)

    def forward(module: nn.Module, batch: dict[str, Tensor], received: dict[str, Tensor]) -> StageOutput:
        assert isinstance(module, GraphStage)
        hidden, _ = module.trunk(batch, received.get("hidden"))
        if module.head is None:
            return StageOutput({"hidden": hidden})
        _score_rows(module.head, hidden, batch["labels"].flatten(), batch["loss_mask"].flatten(), sums)
        # The scores are collected in `sums`; the executor still expects a loss.
        return StageOutput({}, [Term(LOSS, sums.new_zeros(()), 1)])

    unit = validation_unit(ctx)
    executor = Executor(modules, ctx.mesh.pp, forward, ctx.parallel.streams)
    batches = MicroBatches(ctx, SampleSubset(data, range(len(data.bins))), fields_of(modules), ThreadPoolExecutor(1))
    mean_loss(executor, batches, -(-len(data.bins) // unit) * unit)
    # All tensor-parallel ranks hold the same sums. Count them only once.
    if ctx.mesh.tp.index > 0:
        sums.zero_()
    ctx.mesh.world.all_reduce(sums)
    return [Score(logp, not misses) for logp, misses in sums.tolist()]


def _score_rows(head: Head, hidden: Tensor, labels: Tensor, mask: Tensor, sums: Tensor) -> None:
    """Add to `sums`, by text, the log-probabilities of the scored tokens and the number of tokens that are not the most
    likely ones."""
    x = head.final_hidden(hidden)
    output = head.output
    tp = head.parallel.tp
    rows = (mask > 0).nonzero().flatten()
    for at, logits in logit_tiles(gather_input(x, output.sides)[rows], output.weight, output.bias, copies=tp.size):
        logits = all_gather(logits.t().contiguous(), tp.name, tp.size)[: head.vocab].t()
        wide = F.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), 1)
        label = labels[rows[at]]
        number = mask[rows[at]] - 1
        logp = wide.gather(1, label[:, None])[:, 0].double()
        missed = (wide.argmax(1) != label).double()
        sums.index_add_(0, number, torch.stack((logp, missed), 1))
        # Free the tile before the next one is computed.
        del logits, wide
