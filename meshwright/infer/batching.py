"""Continuous batching: sequences join and leave the batch between two forward passes, as requests come and end.

A pass computes either a piece of one prompt (so that a long prompt does not hold up the others for long) or the next
token of all running sequences. Both alternate. All ranks run the same passes, because each is given the same requests
before the same pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.comm.ops import all_gather
from meshwright.errors import UserError
from meshwright.infer.generate import choose_token
from meshwright.infer.paged import BEGINNING, PAGE, PagedCache, Pages, Pass, Row
from meshwright.models.graph_stage import GraphStage

CHUNK = 512  # The most tokens of a prompt in one pass.


@dataclass(frozen=True)
class Drawn:
    """One generated token. `likeliest` holds (token, log-probability) of the likeliest tokens, if asked for."""

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Order:
    """A prompt to continue, and how: at most `most` tokens, up to a token in `ends`."""

    key: int
    ids: tuple[int, ...]
    most: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    ends: tuple[int, ...] = ()
    likeliest: int = 0  # How many of the likeliest tokens to report with each token.


@dataclass(eq=False)
class BatchWork:
    """An order at work: its tokens so far, how many of them are in the cache, and its pages."""

    order: Order
    random: torch.Generator
    ids: list[int]
    cached: int = 0
    pages: list[int] = field(default_factory=list)
    # The full pages that are known to `Pages`, and the prefix that the last of them ends.
    named: int = 0
    prefix: int = BEGINNING

    @property
    def made(self) -> int:
        """The number of generated tokens."""
        return len(self.ids) - len(self.order.ids)


class Batcher:
    """The waiting and running sequences of one model. `report(key, drawn, is_last)` is called for each token."""

    def __init__(
        self, module: GraphStage, vocab: int, longest: int, pages: int, most_running: int,
        report: Callable[[int, Drawn, bool], None],
    ) -> None:  # fmt: skip
        assert module.embedding is not None and module.head is not None and not module.parallel.splits_tokens
        self.module, self.vocab, self.longest = module.eval(), vocab, longest
        self.pages, self.most_running, self.report = Pages(pages), most_running, report
        self.caches = {layer: PagedCache(pages) for layer in module.layers}
        self.waiting: deque[BatchWork] = deque()
        self.running: list[BatchWork] = []
        self._prompt_is_next = True
        self.reused = 0  # Tokens of prompts that were not computed again.

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def room_for(self, order: Order) -> int:
        """Return how many tokens an order can get: at most `most`, within the model's length and the cache."""
        whole = min(self.longest, (self.pages.count - 1) * PAGE)
        # The last token is never fed back.
        return min(order.most, whole - len(order.ids) + 1)

    def add(self, order: Order) -> None:
        if not order.ids or self.room_for(order) < 1:
            raise UserError(f"{len(order.ids)} tokens do not fit into {self.longest}: give a prompt that does")
        random = torch.Generator().manual_seed(order.seed)
        self.waiting.append(BatchWork(order, random, list(order.ids)))

    def cancel(self, key: int) -> None:
        """Drop an order, whatever its state. An order that has ended is ignored."""
        for sequence in [each for each in (*self.waiting, *self.running) if each.order.key == key]:
            self._leave(sequence)

    def step(self) -> None:
        """Run one forward pass, and report the tokens that it gives."""
        self._admit()
        prompts = [each for each in self.running if each.cached < len(each.ids) - 1 or not each.cached]
        texts = [each for each in self.running if each not in prompts]
        if prompts and (self._prompt_is_next or not texts):
            self._prompt_is_next = False
            self._run(prompts[:1])
        else:
            self._prompt_is_next = True
            self._run(texts)

    def _admit(self) -> None:
        """Let waiting sequences run while there is a place, and pages for the whole prompt."""
        while self.waiting and len(self.running) < self.most_running:
            sequence = self.waiting[0]
            shared, prefix = self.pages.known(sequence.ids)
            # Beside others, one page more than the prompt's, so that it need not give way at its first token.
            needed = -(-len(sequence.ids) // PAGE) + bool(self.running)
            if needed - len(shared) > self.pages.available:
                self.pages.release(shared)
                return
            self.waiting.popleft()
            sequence.pages, sequence.cached = shared, len(shared) * PAGE
            sequence.named, sequence.prefix = len(shared), prefix
            self.reused += sequence.cached
            self.running.append(sequence)

    def _run(self, sequences: Sequence[BatchWork]) -> None:
        chosen: list[tuple[BatchWork, Row]] = []
        for sequence in sequences:
            # An earlier sequence of this pass may have taken the pages of this one.
            if sequence not in self.running:
                continue
            new = sequence.ids[sequence.cached : sequence.cached + CHUNK]
            if self._grow(sequence, sequence.cached + len(new)):
                chosen.append((sequence, Row(new, sequence.cached, sequence.pages)))
        chosen = [(sequence, row) for sequence, row in chosen if sequence in self.running]
        if not chosen:
            return
        logits = self._forward([row for _, row in chosen])
        for (sequence, row), line in zip(chosen, logits, strict=True):
            sequence.cached += len(row.ids)
            self._name_full_pages(sequence)
            if sequence.cached == len(sequence.ids):
                self._draw(sequence, line)

    def _name_full_pages(self, sequence: BatchWork) -> None:
        while sequence.named < sequence.cached // PAGE:
            start = sequence.named * PAGE
            page, ids = sequence.pages[sequence.named], sequence.ids[start : start + PAGE]
            sequence.prefix = self.pages.name(page, sequence.prefix, ids)
            sequence.named += 1

    def _grow(self, sequence: BatchWork, tokens: int) -> bool:
        """Give a sequence pages for that many tokens. If none are left, the youngest sequence waits again."""
        while len(sequence.pages) * PAGE < tokens:
            if not self.pages.available:
                youngest = self.running[-1]
                self._leave(youngest)
                # It continues later from its prompt and the tokens so far.
                youngest.pages, youngest.cached = [], 0
                self.waiting.appendleft(youngest)
                if youngest is sequence:
                    return False
                continue
            sequence.pages.append(self.pages.take())
        return True

    @torch.no_grad()
    def _forward(self, rows: Sequence[Row]) -> Tensor:
        """Return the logits [rows, vocab] after each row's last token. Every rank gets the same logits."""
        module, tp = self.module, self.module.parallel.tp
        current = Pass(rows, module.parallel.device)
        for cache in self.caches.values():
            cache.current = current
        hidden, _ = module.trunk({"tokens": current.tokens, "positions": current.positions}, past=self.caches)
        assert module.head is not None
        part = module.head.logits(hidden[current.last]).t().contiguous()
        return all_gather(part, tp.name, tp.size)[: self.vocab].double().t()

    def _draw(self, sequence: BatchWork, logits: Tensor) -> None:
        order = sequence.order
        token = choose_token(logits, order.temperature, order.top_p, sequence.random)
        logprobs = torch.log_softmax(logits, 0)
        top = logprobs.topk(min(order.likeliest, len(logprobs))) if order.likeliest else None
        likeliest = () if top is None else tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        sequence.ids.append(token)
        is_last = token in order.ends or sequence.made >= self.room_for(order)
        if is_last:
            self._leave(sequence)
        self.report(order.key, Drawn(token, float(logprobs[token]), likeliest), is_last)

    def _leave(self, sequence: BatchWork) -> None:
        if sequence in self.running:
            self.running.remove(sequence)
            self.pages.release(sequence.pages)
        else:
            self.waiting.remove(sequence)
