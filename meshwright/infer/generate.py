"""Text from a model, token by token, with a key-value cache; on one rank or cut over tp. An encoder-decoder reads the
prompt with its encoder, and its decoder writes."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence

import torch
from torch import Tensor, nn

from meshwright.comm.ops import all_gather
from meshwright.config.sections import ModelConfig
from meshwright.errors import UserError
from meshwright.models.graph_stage import GraphStage
from meshwright.models.wrapped.stage import PlannedStage
from meshwright.nn.attention.attention import KVCache
from meshwright.spec.model.t5 import DECODED, MEMORY


class Generator:
    """A whole model (one stage, no sequence parallelism) and the keys and values of some sequences."""

    def __init__(self, module: GraphStage, vocab: int, longest: int) -> None:
        assert module.embedding is not None and module.head is not None and not module.parallel.splits_tokens
        self.module, self.vocab, self.longest = module.eval(), vocab, longest
        self.past = {layer: KVCache(longest) for layer in module.layers}
        self.lengths: list[int] = []

    def next_logits(self, ids: list[int]) -> Tensor:
        """Returns the logits [vocab] after `ids`, which continue the tokens given before. Every rank gets the same."""
        return self.next_rows([ids])[0]

    @torch.no_grad()
    def next_rows(self, rows: list[list[int]]) -> Tensor:
        """Returns the logits [sequences, vocab] after `rows`, which continue the tokens of each sequence. Shorter ones
        are filled up at their ends, which no token before can see."""
        module, device = self.module, self.module.parallel.device
        before = self.lengths or [0] * len(rows)
        ends = [length + len(row) for length, row in zip(before, rows, strict=True)]
        if max(ends) > self.longest:
            raise UserError(f"{max(ends)} tokens are more than the model's {self.longest}: give a shorter prompt")
        width = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
        positions = torch.tensor(before, device=device)[:, None] + torch.arange(width, device=device)
        hidden, _ = module.trunk({"tokens": tokens, "positions": positions}, past=self.past)
        self._go_on(ends)
        assert module.head is not None
        last = torch.tensor([n * width + len(row) - 1 for n, row in enumerate(rows)], device=device)
        part, tp = module.head.logits(hidden[last]).t().contiguous(), module.parallel.tp
        return all_gather(part, tp.name, tp.size)[: self.vocab].double().t()

    def _go_on(self, lengths: list[int]) -> None:
        self.lengths = lengths
        differ = len(set(lengths)) > 1
        there = torch.tensor(lengths, device=self.module.parallel.device) if differ else None
        for cache in self.past.values():
            cache.length, cache.lengths = max(lengths, default=0), there

    def keep(self, numbers: list[int]) -> None:
        """Goes on with some of the sequences."""
        rows = torch.tensor(numbers, dtype=torch.int64, device=self.module.parallel.device)
        for cache in self.past.values():
            cache.keep(rows)
        self._go_on([self.lengths[number] for number in numbers])


class EncoderDecoderGenerator:
    """A whole encoder-decoder, the output of its encoder for one prompt, and the decoder's keys and values. The text
    begins after the token `start`."""

    def __init__(self, module: GraphStage, vocab: int, longest: int, start: int) -> None:
        assert module.stage.count == 1 and not module.parallel.splits_tokens
        self.module, self.vocab, self.longest, self.start = module.eval(), vocab, longest, start
        layers = [node.layer for node in module.nodes if node.writes == DECODED]
        self.past = {layer: KVCache(longest) for layer in layers if layer is not None}
        self.memory: Tensor | None = None

    @torch.no_grad()
    def next_logits(self, ids: list[int]) -> Tensor:
        """Returns the logits [vocab] of the first token of the answer to the prompt `ids`; later ones after the token
        that `ids` then holds. Every rank gets the same."""
        module, device = self.module, self.module.parallel.device
        if self.memory is None:
            self.memory, ids = module.stream(MEMORY, {"tokens": torch.tensor([ids], device=device)}), [self.start]
        assert len(ids) == 1 and module.head is not None
        batch, given = {"decoder_tokens": torch.tensor([ids], device=device)}, {MEMORY: self.memory}
        hidden = module.stream(DECODED, batch, given, self.past)
        part, tp = module.head.logits(hidden)[0], module.parallel.tp
        return all_gather(part, tp.name, tp.size)[: self.vocab].double()


class PlannedGenerator:
    """A whole model that transformers builds, and the tokens so far, all of which it reads again for each new one."""

    def __init__(self, module: PlannedStage, vocab: int, longest: int, device: torch.device) -> None:
        self.module, self.vocab, self.longest, self.device = module.eval(), vocab, longest, device
        self.ids: list[int] = []

    @torch.no_grad()
    def next_logits(self, ids: list[int]) -> Tensor:
        """Returns the logits [vocab] after `ids`, which continue the tokens given before. Every rank gets the same."""
        self.ids += ids
        if len(self.ids) > self.longest:
            raise UserError(f"{len(self.ids)} tokens are more than the model's {self.longest}: give a shorter prompt")
        logits: Tensor = self.module({"tokens": torch.tensor([self.ids], device=self.device)})
        return logits[0, -1, : self.vocab].double()


def generator_of(module: nn.Module, model: ModelConfig, prompt: int, most: int) -> tuple[Generators, int]:
    """Returns a generator for a prompt of so many tokens, and how many tokens of at most `most` it can give."""
    room = max(1, model.seq - prompt + 1)  # the last token is never fed back
    if isinstance(module, PlannedStage):
        device = next(module.parameters()).device
        return PlannedGenerator(module, model.vocab, min(model.seq, prompt + most), device), min(most, room)
    assert isinstance(module, GraphStage)
    if encodes(module):  # relative positions have no end; what was never trained is the user's choice
        return EncoderDecoderGenerator(module, model.vocab, most, model.t5.start), most
    return Generator(module, model.vocab, min(model.seq, prompt + most)), min(most, room)


def encodes(module: GraphStage) -> bool:
    """Return True if a model reads the prompt with an encoder, so that it has two source nodes."""
    return len(module.sources) > 1


def choose_token(logits: Tensor, temperature: float, top_p: float, random: torch.Generator) -> int:
    """Chooses the next token: the likeliest at temperature 0, else one drawn from the likeliest tokens that together
    have probability `top_p`."""
    if temperature == 0:
        return int(logits.argmax())
    shares, order = torch.softmax(logits / temperature, 0).sort(descending=True)
    shares = shares.masked_fill(shares.cumsum(0) - shares >= top_p, 0.0).cpu()
    return int(order[torch.multinomial(shares, 1, generator=random)])


Generators = Generator | EncoderDecoderGenerator | PlannedGenerator


def generate(
    generator: Generators,
    prompt: list[int],
    most: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    ends: Container[int] = (),
) -> Iterator[int]:
    """Yields at most `most` tokens after `prompt`; stops after a token in `ends`."""
    random = torch.Generator().manual_seed(seed)
    logits = generator.next_logits(prompt)
    for number in range(most):
        token = choose_token(logits, temperature, top_p, random)
        yield token
        if token in ends or number == most - 1:
            return
        logits = generator.next_logits([token])


def generate_all(
    module: GraphStage,
    model: ModelConfig,
    prompts: Sequence[list[int]],
    most: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    ends: Container[int] = (),
    batch: int = 8,
    stops: Callable[[list[int]], bool] = lambda tokens: False,
) -> list[list[int]]:
    """Returns what follows each prompt, at most `most` tokens, as it would alone: prompt n with the seed `seed` + n. A
    text also ends where `stops` says so of its tokens. Of a decoder, `batch` prompts of about one length run together,
    and those that end leave the others."""
    if encodes(module):
        singles = [generator_of(module, model, len(prompt), most) for prompt in prompts]
        return [
            list(generate(generator, prompt, room, temperature, top_p, seed + n, ends))
            for n, ((generator, room), prompt) in enumerate(zip(singles, prompts, strict=True))
        ]
    found: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda n: len(prompts[n]))
    for begin in range(0, len(order), batch):
        alive = order[begin : begin + batch]
        rooms = {n: min(most, max(1, model.seq - len(prompts[n]) + 1)) for n in alive}  # the last is never fed back
        randoms = {n: torch.Generator().manual_seed(seed + n) for n in alive}
        longest = min(model.seq, max(len(prompts[n]) + rooms[n] for n in alive))
        generator, rows = Generator(module, model.vocab, longest), [prompts[n] for n in alive]
        while alive:
            for n, logits in zip(alive, generator.next_rows(rows), strict=True):
                found[n].append(choose_token(logits, temperature, top_p, randoms[n]))
            ended = [found[n][-1] in ends or len(found[n]) == rooms[n] or stops(found[n]) for n in alive]
            staying = [at for at, gone in enumerate(ended) if not gone]
            if len(staying) < len(alive):
                generator.keep(staying)
                alive = [alive[at] for at in staying]
            rows = [[found[n][-1]] for n in alive]
    return found
