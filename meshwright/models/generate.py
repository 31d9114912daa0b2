"""Text from a model, token by token, with a key-value cache; on one rank or cut over tp."""

from __future__ import annotations

from collections.abc import Container, Iterator

import torch
from torch import Tensor

from meshwright.comm.ops import all_gather
from meshwright.errors import UserError
from meshwright.models.gpt import GPTStage
from meshwright.nn.attention import KVCache


class Generator:
    """A whole model (one stage, no sequence parallelism) and the keys and values of one sequence."""

    def __init__(self, module: GPTStage, vocab: int, longest: int) -> None:
        assert module.embedding is not None and module.head is not None and not module.parallel.splits_tokens
        self.module, self.vocab, self.longest = module.eval(), vocab, longest
        self.past = {number: KVCache(longest) for number in module.blocks}
        self.length = 0

    @torch.no_grad()
    def next_logits(self, ids: list[int]) -> Tensor:
        """Returns the logits [vocab] after `ids`, which continue the tokens given before. Every rank gets the same."""
        module, end = self.module, self.length + len(ids)
        if end > self.longest:
            raise UserError(f"{end} tokens are more than the model's {self.longest}: give a shorter prompt")
        tokens = torch.tensor([ids], device=module.parallel.device)
        positions = torch.arange(self.length, end, device=tokens.device)[None]
        hidden, _ = module.trunk({"tokens": tokens, "positions": positions}, past=self.past)
        self.length = end
        assert module.head is not None
        part, tp = module.head.logits(hidden[-1:])[0], module.parallel.tp
        return all_gather(part, tp.name, tp.size)[: self.vocab].double()


def choose_token(logits: Tensor, temperature: float, top_p: float, random: torch.Generator) -> int:
    """Chooses the next token: the likeliest at temperature 0, else one drawn from the likeliest tokens that together
    have probability `top_p`."""
    if temperature == 0:
        return int(logits.argmax())
    shares, order = torch.softmax(logits / temperature, 0).sort(descending=True)
    shares = shares.masked_fill(shares.cumsum(0) - shares >= top_p, 0.0).cpu()
    return int(order[torch.multinomial(shares, 1, generator=random)])


def generate(
    generator: Generator,
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
