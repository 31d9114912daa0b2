"""Continuous batching over a paged cache: texts are those of `generate`, whoever else is served, and pages return."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest
import torch

from meshwright.errors import UserError
from meshwright.infer import batching
from meshwright.infer.batching import Batcher, Drawn, Order
from meshwright.infer.generate import Generator, generate
from meshwright.infer.paged import BEGINNING, PAGE, Pages
from tests.support.oracle import make_trainer, small_config

SEQ, VOCAB = 96, 53


class Served:
    """A batcher with the tokens that it reported, by order."""

    def __init__(self, module: Any, pages: int = 64, most_running: int = 8) -> None:
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.drawn: dict[int, list[Drawn]] = defaultdict(list)
        self.ended: set[int] = set()
        self.batcher = Batcher(module, VOCAB, SEQ, pages, most_running, self.report)

    def report(self, key: int, drawn: Drawn, is_last: bool) -> None:
        assert key not in self.ended
        self.tokens[key].append(drawn.token)
        self.drawn[key].append(drawn)
        if is_last:
            self.ended.add(key)

    def run(self) -> None:
        for _ in range(5000):
            if self.batcher.is_idle:
                return
            self.batcher.step()
        raise AssertionError("the batcher does not come to an end")


def module_with(**model: Any) -> Any:
    torch.manual_seed(0)
    module = make_trainer(small_config(model={"seq": SEQ, **model})).modules[0]
    for parameter in module.parameters():
        # Larger weights make a text that does not settle on one token.
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def orders_of(count: int, seed: int = 0, **more: Any) -> list[Order]:
    chance = random.Random(seed)
    orders = []
    for key in range(count):
        ids = tuple(chance.randrange(VOCAB) for _ in range(chance.choice((1, 3, PAGE, PAGE + 1, 40))))
        orders.append(Order(key, ids, chance.randrange(1, 30), **more))
    return orders


def alone(module: Any, order: Order) -> list[int]:
    generator = Generator(module, VOCAB, SEQ)
    drawing = (order.temperature, order.top_p, order.seed, order.ends)
    return list(generate(generator, list(order.ids), min(order.most, SEQ - len(order.ids) + 1), *drawing))


@pytest.mark.parametrize("model", [
    {"position": "rope", "kv_heads": 2}, {"position": "alibi"}, {"position": "learned"},
    {"position": "rope", "kv_heads": 2, "window": 7},
], ids=["rope", "alibi", "learned", "window"])  # fmt: skip
@pytest.mark.parametrize("pages", [64, 9], ids=["enough pages", "few pages"])
def test_every_text_is_the_one_alone(model: dict[str, Any], pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences lose their pages in the middle, and begin again, if there are few pages."""
    monkeypatch.setattr(batching, "CHUNK", 10)
    module = module_with(**model)
    served, orders = Served(module, pages), orders_of(12)
    for number, order in enumerate(orders):
        served.batcher.add(order)
        # Later orders join while earlier ones run.
        for _ in range(number % 3):
            served.batcher.step()
    served.run()
    for order in orders:
        assert served.tokens[order.key] == alone(module, order)
    assert served.ended == set(range(12))
    assert served.batcher.pages.available == pages - 1, "every page is free again"


def test_pages_are_taken_away_and_given_back() -> None:
    module = module_with(position="rope")
    served = Served(module, pages=9)
    lost = []
    leave = served.batcher._leave
    served.batcher._leave = lambda work: (lost.append(work.order.key), leave(work))[1]  # type: ignore[method-assign]
    for key in range(4):
        served.batcher.add(Order(key, (key, 1, 2), 60))
    served.run()
    assert len(lost) > 4, "more leave the batch than end"


def test_drawn_texts_depend_on_their_seeds_alone() -> None:
    module = module_with(position="rope")
    served = Served(module)
    orders = orders_of(6, temperature=1.5, top_p=0.9, seed=7, likeliest=3)
    for order in orders:
        served.batcher.add(order)
    served.run()
    for order in orders:
        assert served.tokens[order.key] == alone(module, order)
        for drawn in served.drawn[order.key]:
            best = dict(drawn.likeliest)
            assert len(best) == 3 and drawn.logprob <= max(best.values()) <= 0
            assert drawn.token not in best or best[drawn.token] == drawn.logprob


def test_a_known_beginning_is_not_computed_again() -> None:
    module = module_with(position="rope")
    served = Served(module)
    beginning = tuple(n % VOCAB for n in range(3 * PAGE))
    for key, end in enumerate(((), (5,), (9, 9, 9))):
        served.batcher.add(Order(key, (*beginning, *end), 5))
        served.run()
        assert served.tokens[key] == alone(module, Order(key, (*beginning, *end), 5))
    # The first reads everything. The last token of a prompt is always computed, so its page is too.
    assert served.batcher.reused == 3 * PAGE + 3 * PAGE
    other = (1, *beginning[1:])
    served.batcher.add(Order(9, other, 5))
    served.run()
    assert served.tokens[9] == alone(module, Order(9, other, 5)) and served.batcher.reused == 6 * PAGE


def test_cancelled_orders_leave_no_pages_behind() -> None:
    module = module_with(position="rope")
    served = Served(module, most_running=2)
    for key in range(4):
        served.batcher.add(Order(key, (key, 2, 3), 40))
    for _ in range(7):
        served.batcher.step()
    for key in (0, 3, 3, 77):
        served.batcher.cancel(key)
    served.run()
    assert served.ended == {1, 2} and served.batcher.pages.available == 63
    assert served.tokens[1] == alone(module, Order(1, (1, 2, 3), 40))


def test_orders_that_do_not_fit_are_refused() -> None:
    served = Served(module_with(position="rope"), pages=4)
    with pytest.raises(UserError, match="49 tokens do not fit|do not fit into"):
        served.batcher.add(Order(0, tuple([1] * (3 * PAGE + 2)), 5))
    with pytest.raises(UserError):
        served.batcher.add(Order(0, (), 5))
    served.batcher.add(Order(1, tuple([1] * (3 * PAGE)), 50))
    served.run()
    assert len(served.tokens[1]) == 1


def test_pages_forget_the_oldest_prefix_first() -> None:
    pages = Pages(4)
    prefix = pages.name(first := pages.take(), BEGINNING, [1] * PAGE)
    pages.name(second := pages.take(), prefix, [2] * PAGE)
    pages.release([first, second])
    assert pages.available == 3 and pages.known([*[1] * PAGE, *[2] * PAGE, 3])[0] == [first, second]
    pages.release([first, second])
    pages.take()
    # Only idle pages are left, and the end of the prefix goes before its beginning.
    assert pages.take() == second
    assert pages.known([*[1] * PAGE, *[2] * PAGE, 3])[0] == [first]
