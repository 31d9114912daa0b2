"""Generate text token by token with a key-value cache, on one rank or with tensor parallelism.

An encoder-decoder reads the prompt with its encoder and generates with its decoder.
"""

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
    """A whole model (one stage, no sequence parallelism) with the key-value cache of some sequences."""

    def __init__(self, module: GraphStage, vocab: int, longest: int) -> None:
        assert module.embedding is not None and module.head is not None and not module.parallel.splits_tokens
        self.module = module.eval()
        self.vocab = vocab
        self.longest = longest
        self.past = {layer: KVCache(longest) for layer in module.layers}
        self.lengths: list[int] = []

    def next_logits(self, ids: list[int]) -> Tensor:
        """Return the logits [vocab] after `ids`, which continue the tokens so far. Every rank gets the same logits."""
        return self.next_rows([ids])[0]

    @torch.no_grad()
    def next_rows(self, rows: list[list[int]]) -> Tensor:
        """Return the logits [sequences, vocab] after `rows`, which continue the tokens of each sequence.

        Shorter rows are padded at their ends. Attention is causal, so no real token sees the padding.
        """
        module, device = self.module, self.module.parallel.device
        before = self.lengths or [0] * len(rows)
        ends = [length + len(row) for length, row in zip(before, rows, strict=True)]
        if max(ends) > self.longest:
            raise UserError(f"{max(ends)} tokens are more than the model's {self.longest}: give a shorter prompt")
        width = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
        positions = torch.tensor(before, device=device)[:, None] + torch.arange(width, device=device)
        hidden, _ = module.trunk({"tokens": tokens, "positions": positions}, past=self.past)
        self._set_lengths(ends)
        assert module.head is not None
        last = torch.tensor([n * width + len(row) - 1 for n, row in enumerate(rows)], device=device)
        part = module.head.logits(hidden[last]).t().contiguous()
        tp = module.parallel.tp
        return all_gather(part, tp.name, tp.size)[: self.vocab].double().t()

    def _set_lengths(self, lengths: list[int]) -> None:
        """Set the lengths of the sequences in all caches."""
        self.lengths = lengths
        differ = len(set(lengths)) > 1
        per_sequence = torch.tensor(lengths, device=self.module.parallel.device) if differ else None
        for cache in self.past.values():
            cache.length = max(lengths, default=0)
            cache.lengths = per_sequence

    def keep(self, numbers: list[int]) -> None:
        """Continue with only these sequences."""
        rows = torch.tensor(numbers, dtype=torch.int64, device=self.module.parallel.device)
        for cache in self.past.values():
            cache.keep(rows)
        self._set_lengths([self.lengths[number] for number in numbers])


class EncoderDecoderGenerator:
    """A whole encoder-decoder with its encoder's output for one prompt and the decoder's key-value cache. The generated
    text begins after the token `start`."""

    def __init__(self, module: GraphStage, vocab: int, longest: int, start: int) -> None:
        assert module.stage.count == 1 and not module.parallel.splits_tokens
        self.module = module.eval()
        self.vocab = vocab
        self.longest = longest
        self.start = start
        layers = [node.layer for node in module.nodes if node.writes == DECODED]
        self.past = {layer: KVCache(longest) for layer in layers if layer is not None}
        self.memory: Tensor | None = None

    @torch.no_grad()
    def next_logits(self, ids: list[int]) -> Tensor:
        """Return the logits [vocab] of the next token. Every rank gets the same logits.

        On the first call, `ids` is the prompt. On later calls it holds only the last generated token.
        """
        module, device = self.module, self.module.parallel.device
        if self.memory is None:
            self.memory = module.stream(MEMORY, {"tokens": torch.tensor([ids], device=device)})
            ids = [self.start]
        assert len(ids) == 1 and module.head is not None
        batch = {"decoder_tokens": torch.tensor([ids], device=device)}
        given = {MEMORY: self.memory}
        hidden = module.stream(DECODED, batch, given, self.past)
        part = module.head.logits(hidden)[0]
        tp = module.parallel.tp
        return all_gather(part, tp.name, tp.size)[: self.vocab].double()


class PlannedGenerator:
    """A whole model that transformers builds, and the tokens so far. Without a cache, it reads all of them again for
    each new token."""

    def __init__(self, module: PlannedStage, vocab: int, longest: int, device: torch.device) -> None:
        self.module = module.eval()
        self.vocab = vocab
        self.longest = longest
        self.device = device
        self.ids: list[int] = []

    @torch.no_grad()
    def next_logits(self, ids: list[int]) -> Tensor:
        """Return the logits [vocab] after `ids`, which continue the tokens so far. Every rank gets the same logits."""
        self.ids += ids
        if len(self.ids) > self.longest:
            raise UserError(f"{len(self.ids)} tokens are more than the model's {self.longest}: give a shorter prompt")
        logits: Tensor = self.module({"tokens": torch.tensor([self.ids], device=self.device)})
        return logits[0, -1, : self.vocab].double()


def generator_of(module: nn.Module, model: ModelConfig, prompt: int, most: int) -> tuple[Generators, int]:
    """Return a generator for a prompt of `prompt` tokens, and the number of tokens, up to `most`, that it can give."""
    room = max(1, model.seq - prompt + 1)  # The last token is never fed back.
    if isinstance(module, PlannedStage):
        device = next(module.parameters()).device
        return PlannedGenerator(module, model.vocab, min(model.seq, prompt + most), device), min(most, room)
    assert isinstance(module, GraphStage)
    # Relative positions have no end, so the user may ask for more tokens than the model was trained on.
    if encodes(module):
        return EncoderDecoderGenerator(module, model.vocab, most, model.t5.start), most
    return Generator(module, model.vocab, min(model.seq, prompt + most)), min(most, room)


def encodes(module: GraphStage) -> bool:
    """Return True if a model reads the prompt with an encoder, so that it has two source nodes."""
    return len(module.sources) > 1


def logits_of(module: nn.Module, tokens: Tensor, decoder_tokens: Tensor | None = None) -> Tensor:
    """Return the logits [sequences, tokens, vocabulary] of a whole model in one process, at every token.

    With an encoder-decoder, `tokens` are those of the encoder, and the logits are of `decoder_tokens`. The vocabulary
    is the padded one.
    """
    if isinstance(module, PlannedStage):
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        planned: Tensor = module({"tokens": tokens, "positions": positions})
        return planned
    assert isinstance(module, GraphStage) and module.head is not None
    if decoder_tokens is not None:
        given = {MEMORY: module.stream(MEMORY, {"tokens": tokens})}
        hidden, tokens = module.stream(DECODED, {"decoder_tokens": decoder_tokens}, given), decoder_tokens
    else:
        fields = {name: torch.zeros_like(tokens) for name in ("segments", "token_types")}
        hidden, _ = module.trunk({"tokens": tokens} | ({} if module.model.causal else fields))
    return module.head.logits(hidden).unflatten(0, tokens.shape)


def choose_token(logits: Tensor, temperature: float, top_p: float, random: torch.Generator) -> int:
    """Choose the next token: the most likely one at temperature 0. Otherwise draw it from the smallest set of most
    likely tokens whose probabilities sum to at least `top_p`."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities, order = torch.softmax(logits / temperature, 0).sort(descending=True)
    probabilities = probabilities.masked_fill(probabilities.cumsum(0) - probabilities >= top_p, 0.0).cpu()
    return int(order[torch.multinomial(probabilities, 1, generator=random)])


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
    """Yield at most `most` tokens after `prompt`, and stop after a token in `ends`."""
    random = torch.Generator().manual_seed(seed)
    logits = generator.next_logits(prompt)
    for number in range(most):
        token = choose_token(logits, temperature, top_p, random)
        yield token
        if token in ends or number == most - 1:
            return
        logits = generator.next_logits([token])


def generate_all(
    module: nn.Module,
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
    """Return the tokens generated after each prompt, at most `most`, the same as if each prompt ran alone.

    Prompt n uses the seed `seed` + n. A text ends after a token in `ends`, or when `stops(tokens)` is True. With a
    decoder, `batch` prompts of similar length run together, and finished sequences leave the batch. Models that
    transformers builds run one prompt after the other.
    """
    if not isinstance(module, GraphStage) or encodes(module):
        singles = [generator_of(module, model, len(prompt), most) for prompt in prompts]
        return [
            list(generate(generator, prompt, room, temperature, top_p, seed + n, ends))
            for n, ((generator, room), prompt) in enumerate(zip(singles, prompts, strict=True))
        ]
    texts: list[list[int]] = [[] for _ in prompts]
    # Sort by length, so that the prompts of a batch need little padding.
    order = sorted(range(len(prompts)), key=lambda n: len(prompts[n]))
    for begin in range(0, len(order), batch):
        alive = order[begin : begin + batch]
        rooms = {n: min(most, max(1, model.seq - len(prompts[n]) + 1)) for n in alive}  # The last is never fed back.
        randoms = {n: torch.Generator().manual_seed(seed + n) for n in alive}
        longest = min(model.seq, max(len(prompts[n]) + rooms[n] for n in alive))
        generator = Generator(module, model.vocab, longest)
        rows = [prompts[n] for n in alive]
        while alive:
            for n, logits in zip(alive, generator.next_rows(rows), strict=True):
                texts[n].append(choose_token(logits, temperature, top_p, randoms[n]))
            finished = [texts[n][-1] in ends or len(texts[n]) == rooms[n] or stops(texts[n]) for n in alive]
            staying = [at for at, is_finished in enumerate(finished) if not is_finished]
            if len(staying) < len(alive):
                generator.keep(staying)
                alive = [alive[at] for at in staying]
            rows = [[texts[n][-1]] for n in alive]
    return texts
