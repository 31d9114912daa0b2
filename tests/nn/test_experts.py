"""The mixture of experts in one process and in float64, against a loop over tokens and experts in plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

import meshwright.nn.experts.experts as experts_module
from meshwright.nn.experts.experts import RoutedInputs, SavedRouting, replace_dropped, sort_by_expert
from meshwright.nn.experts.routing import Router
from meshwright.nn.unit import recompute
from meshwright.nn.weight_grad import sink_of
from meshwright.spec.layout.rows import by_key
from meshwright.spec.model.experts import Routing
from tests.nn.expert_runs import attach_sinks
from tests.nn.fused_cases import error
from tests.nn.plain_experts import (
    Mixture,
    Weights,
    built,
    drawn,
    gradients,
    plain_losses,
    plain_mlp,
    plain_norm,
    plain_pass,
    plain_weights,
)
from tests.support.oracle import make_trainer, small_config, true_gradients

EXACT = 1e-12
ROWS, HIDDEN = 14, 12
MASK = torch.tensor([0, 1, 1, 0, 1, 1, 1] + [1, 0, 0, 0, 1, 1, 0])  # Two sequences with different counts.

DEEPSEEK = {"router": "sigmoid", "scale": 2.5, "groups": 4, "groups_used": 2, "shared": 1}
KINDS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax not normalised": {"normalise": False},
    "softmax with a bias": {"bias_balance": 0.001},
    "softmax in groups": {"groups": 2, "groups_used": 1},
    "sigmoid": {"router": "sigmoid"},
    "sigmoid not normalised": {"router": "sigmoid", "normalise": False},
    "sigmoid in groups": {"router": "sigmoid", "groups": 2},
    "sigmoid in groups of one": {"router": "sigmoid", "groups": 8, "groups_used": 5},
    "scale": {"scale": 0.7},
    "one choice": {"top_k": 1, "normalise": False},
    "shared": {"shared": 2},
    "capacity": {"capacity": 0.8},
    "as DeepSeek-V3": DEEPSEEK,
}


def compared(mixture: Mixture, kind: str, x: Tensor, grad: Tensor) -> tuple[float, Weights]:
    """Return the largest error of the output and of every gradient of <output, grad>, and the gradients."""
    w, plain_x = plain_weights(mixture), x.clone().requires_grad_()
    expected, _ = plain_pass(mixture, plain_x, w, kind)
    (expected * grad).sum().backward()
    x = x.clone().requires_grad_()
    y, _ = mixture(x)
    (y * grad).sum().backward()
    found = gradients(mixture)
    assert x.grad is not None and plain_x.grad is not None
    trained = {name: p for name, p in w.items() if p.requires_grad}
    assert found.keys() == trained.keys()
    # A weight that nothing was sent to, such as that of an expert no token chose, has no gradient in the plain version.
    pairs = [(found[n], torch.zeros_like(p) if p.grad is None else p.grad) for n, p in trained.items()]
    return error([(y, expected), (x.grad, plain_x.grad), *pairs]), found


@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
@pytest.mark.parametrize("name", list(KINDS))
def test_it_is_a_loop_over_tokens_and_experts(name: str, kind: str) -> None:
    """The output agrees, and so do the gradients of the input, the norm, the router, both weights of the experts and
    the shared expert.
    """
    mixture = built(kind, **KINDS[name])
    assert compared(mixture, kind, drawn(ROWS, HIDDEN), drawn(ROWS, HIDDEN, seed=2))[0] <= EXACT


@pytest.mark.parametrize("targets", [["gate", "up", "down"], ["up"], ["down"]], ids="-".join)
def test_adapters_are_a_change_of_each_experts_weights(targets: list[str]) -> None:
    """The output with adapters agrees, and so do the gradients of both factors and of the input. Frozen weights have
    none.
    """
    mixture = built(tune={"kind": "lora", "rank": 2, "alpha": 3.0, "targets": [f"expert_{each}" for each in targets]})
    w, x, grad = plain_weights(mixture), drawn(ROWS, HIDDEN), drawn(ROWS, HIDDEN, seed=2)
    changed = dict(w)
    for weight, layer in (("experts.up", mixture.experts.up), ("experts.down", mixture.experts.down)):
        rows = list(w[f"{weight}.weight"].split(10 if weight.endswith("up") else HIDDEN, 1))
        for at, target in enumerate(("gate", "up") if weight.endswith("up") else ("down",)):
            name = f"{weight}.expert_{target}"
            assert (target in targets) == hasattr(layer, f"expert_{target}")
            if target in targets:
                rows[at] = rows[at] + 1.5 * w[f"{name}.up"] @ w[f"{name}.down"]
        changed[f"{weight}.weight"] = torch.cat(rows, 1)
    x, plain_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, _ = plain_pass(mixture, plain_x, changed, "swiglu")
    y, _ = mixture(x)
    for result in (expected, y):
        (result * grad).sum().backward()
    found = gradients(mixture)
    assert len(found) == 2 * len(targets) and x.grad is not None and plain_x.grad is not None
    pairs = [(value, w[name].grad) for name, value in found.items()]
    assert error([(y, expected), (x.grad, plain_x.grad), *pairs]) <= EXACT  # type: ignore[list-item]


@pytest.mark.parametrize("keys", [{"bias_balance": 0.001}, DEEPSEEK, {"groups": 2, "groups_used": 1}], ids=str)
def test_biases_and_groups_change_the_choice(keys: dict[str, Any]) -> None:
    """Otherwise the comparison with the loop would prove nothing about them."""
    mixture = built(**keys)
    scores = mixture.experts.router.scores(mixture.experts.router(mixture.norm(drawn(ROWS, HIDDEN)))).detach()
    chosen = mixture.experts.router.choose(scores)
    free = replace(mixture.routing, groups=1, groups_used=1)
    if mixture.experts.router.bias is not None:
        with mock.patch.object(mixture.experts.router, "bias", None):
            assert not torch.equal(mixture.experts.router.choose(scores), chosen)
    if mixture.routing.groups > 1:
        with mock.patch.object(mixture.experts.router, "routing", free):
            assert not torch.equal(mixture.experts.router.choose(scores), chosen)


def test_sinks_get_the_gradients_of_all_micro_batches() -> None:
    """Earlier contents of the buffer do not matter. In the first micro-batch only three experts get tokens."""
    mixture = built(**DEEPSEEK)
    views = attach_sinks(mixture)
    expected = plain_weights(mixture)
    for seed, rows in ((3, 1), (4, ROWS)):
        x, grad = drawn(rows, HIDDEN, seed=seed), drawn(rows, HIDDEN, seed=seed + 10)
        (mixture(x)[0] * grad).sum().backward()
        (plain_pass(mixture, x, expected, "swiglu")[0] * grad).sum().backward()
    assert set(views) == {name for name, p in mixture.named_parameters() if p.requires_grad} - {"norm.weight"}
    layers = [mixture.get_submodule(name.removesuffix(".weight")) for name in views]
    assert all(sink_of(layer.sinks["weight"]).contributions == 2 for layer in layers)
    assert all(mixture.get_parameter(name).grad is None for name in views)
    assert error([(view, expected[name].grad) for name, view in views.items()]) <= EXACT


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_with_all_choices_it_is_the_dense_mixture(router: str) -> None:
    mixture = built(top_k=8, router=router)
    w, x, grad = plain_weights(mixture), drawn(ROWS, HIDDEN), drawn(ROWS, HIDDEN, seed=2)
    normed = plain_norm(x, w["norm.weight"], mixture.eps)
    logits = normed @ w["experts.router.weight"].T
    scores = logits.softmax(1) if router == "softmax" else logits.sigmoid() / logits.sigmoid().sum(1, keepdim=True)
    gate, up = torch.einsum("td,eid->tei", normed, w["experts.up.weight"]).chunk(2, 2)
    results = torch.einsum("tei,edi->ted", torch.nn.functional.silu(gate) * up, w["experts.down.weight"])
    dense = torch.einsum("te,ted->td", scores, results)
    (dense * grad).sum().backward()
    y, _ = mixture(x)
    (y * grad).sum().backward()
    assert error([(y, dense), *((found, w[name].grad) for name, found in gradients(mixture).items())]) <= EXACT


@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_one_expert_is_the_mlp(router: str, kind: str) -> None:
    mixture, dense = built(kind, count=1, top_k=1, router=router), built(kind, count=0)
    weights = {name: p.squeeze(0) for name, p in mixture.named_parameters() if name != "norm.weight"}
    with torch.no_grad():
        dense.norm.weight.copy_(mixture.norm.weight)
        dense.experts.up.weight.copy_(weights["experts.up.weight"])
        dense.experts.down.weight.copy_(weights["experts.down.weight"])
    x, grad = drawn(ROWS, HIDDEN), drawn(ROWS, HIDDEN, seed=2)
    y, other = mixture(x)[0], dense(x)[0]
    (y * grad).sum().backward()
    (other * grad).sum().backward()
    found, expected = gradients(mixture), gradients(dense)
    assert float(found.pop("experts.router.weight").abs().max()) <= EXACT  # The only weight is always 1.
    assert error([(y, other), *((value.squeeze(0), expected[name]) for name, value in found.items())]) <= EXACT


def test_all_tokens_to_one_expert() -> None:
    """The other experts have gradients too, which are zero."""
    mixture = built(top_k=1, normalise=False, bias_balance=0.001)
    with torch.no_grad():
        mixture.experts.router.bias.copy_(100.0 * torch.eye(8)[5])
    worst, found = compared(mixture, "swiglu", drawn(ROWS, HIDDEN), drawn(ROWS, HIDDEN, seed=2))
    assert worst <= EXACT
    assert mixture.experts.tally[:8].tolist() == [0, 0, 0, 0, 0, ROWS, 0, 0]
    for name in ("experts.up.weight", "experts.down.weight"):
        used = found[name].flatten(1).abs().sum(1) > 0
        assert used.tolist() == [n == 5 for n in range(8)]
    assert found["experts.router.weight"].abs().sum() > 0


LOSSES = {
    "softmax": {},
    "sigmoid": DEEPSEEK,
    "batch": {"aux_level": "batch"},
    "one choice": {"top_k": 1},
}


@pytest.mark.parametrize("terms", [{"aux_loss": 0.1}, {"z_loss": 0.1}, {"aux_loss": 0.1, "z_loss": 0.2}], ids=str)
@pytest.mark.parametrize("name", list(LOSSES))
def test_the_losses_are_their_formulas(name: str, terms: dict[str, Any]) -> None:
    """They are computed per sequence. Masked tokens are balanced too, but have no loss themselves. Every gradient
    agrees.
    """
    mixture = built(**LOSSES[name], **terms)
    w, x = plain_weights(mixture), drawn(ROWS, HIDDEN).requires_grad_()
    plain_x = x.detach().clone().requires_grad_()
    _, routed = plain_pass(mixture, plain_x, w, "swiglu")
    both = plain_losses(routed, MASK.tolist(), 2, mixture.routing)
    expected = torch.stack([loss for loss, key in zip(both, ("aux_loss", "z_loss"), strict=True) if key in terms])
    factors = torch.tensor([0.3, 1.7], dtype=torch.float64)[: len(terms)]
    (expected * factors).sum().backward()
    _, losses = mixture(x, 2, RoutedInputs(MASK))
    assert losses is not None
    (losses * factors).sum().backward()
    assert x.grad is not None and plain_x.grad is not None
    pairs = [(mixture.get_parameter(n).grad, w[n].grad) for n in ("norm.weight", "experts.router.weight")]
    assert error([(losses, expected), (x.grad, plain_x.grad), *pairs]) <= EXACT
    # The losses do not depend on any product of an expert.
    for weights in (mixture.experts.up, mixture.experts.down):
        assert weights.weight.grad is None


def test_without_a_mask_every_token_counts() -> None:
    mixture = built(aux_loss=0.1, z_loss=0.1)
    found = [mixture(drawn(ROWS, HIDDEN), 2, RoutedInputs(counted))[1] for counted in (None, torch.ones(ROWS))]
    assert torch.equal(*found)


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_the_balance_loss_is_one_where_all_are_alike(router: str) -> None:
    """It is exactly one for each token that counts, if the router has no preference."""
    mixture = built(router=router, aux_loss=0.1)
    with torch.no_grad():
        mixture.experts.router.weight.zero_()
    _, losses = mixture(drawn(ROWS, HIDDEN), 2, RoutedInputs(MASK))
    assert losses.tolist() == [float(MASK.sum())]


def test_the_balance_loss_of_even_and_of_uneven_choices() -> None:
    """It is 1 if tokens prefer all experts equally often, and nearly the number of experts if all prefer one."""
    mixture = built(sizes={"hidden": 8, "ffn": 8}, top_k=1, aux_loss=0.1)
    with torch.no_grad():
        mixture.norm.weight.fill_(1.0)
        mixture.experts.router.weight.copy_(3.0 * torch.eye(8))
    even, one = torch.eye(8, dtype=torch.float64), torch.eye(8, dtype=torch.float64)[:1].expand(8, 8)
    assert mixture(even)[1].item() / 8 == pytest.approx(1.0, rel=1e-12)
    assert mixture(one)[1].item() / 8 > 7.9


def test_ties_are_broken_by_the_lower_number() -> None:
    choose = built().experts.router.choose
    assert choose(torch.full((3, 8), 0.5)).tolist() == [[0, 1, 2]] * 3
    tied = torch.tensor([[0.1, 0.4, 0.2, 0.4, 0.2, 0.4, 0.4, 0.2], [0.0, 0.1, 0.1, 0.9, 0.1, 0.1, 0.9, 0.1]])
    assert choose(tied).tolist() == [[1, 3, 5], [3, 6, 1]]
    grouped = built(router="sigmoid", groups=4, groups_used=2, bias_balance=0.001).experts.router
    with torch.no_grad():
        grouped.bias.zero_()
    assert grouped.choose(torch.full((1, 8), 0.5)).tolist() == [[0, 1, 2]]
    # The two best of each group add up to 3, 6, 6 and 6.
    best_two = torch.tensor([[1.0, 2.0, 3.0, 3.0, 1.0, 5.0, 2.0, 4.0]])
    assert grouped.choose(best_two).tolist() == [[5, 2, 3]]


@pytest.mark.parametrize(("router", "chosen"), [("softmax", [1, 0, 2]), ("sigmoid", [4, 5, 6])])
def test_a_group_is_as_good_as_its_best_or_its_two_best(router: str, chosen: list[int]) -> None:
    """DeepSeek-V2 rates a group by its best expert, DeepSeek-V3 by its two best."""
    found = built(router=router, groups=2).experts.router
    with torch.no_grad():
        scores = torch.tensor([[0.1, 0.5, 0.0, 0.0, 0.4, 0.3, 0.1, 0.0]], dtype=torch.float64)
        assert found.choose(scores if found.bias is None else scores - found.bias).tolist() == [chosen]


def test_a_zero_router_sends_every_token_to_the_first_experts() -> None:
    mixture = built()
    with torch.no_grad():
        mixture.experts.router.weight.zero_()
    assert compared(mixture, "swiglu", drawn(ROWS, HIDDEN), drawn(ROWS, HIDDEN, seed=2))[0] <= EXACT
    assert mixture.experts.tally[:8].tolist() == [ROWS] * 3 + [0] * 5


def test_what_does_not_fit_is_dropped_and_counted() -> None:
    """An expert takes the first rows that chose it. The results of the other rows stay as they were and are not
    renormalised.
    """
    free, limited = built(bias_balance=0.001), built(bias_balance=0.001, capacity=0.5)
    room = limited.routing.room(ROWS)
    assert room == 3  # Half of 14 x 3 / 8 = 5.25 rows, rounded up.
    x, given = drawn(ROWS, HIDDEN), RoutedInputs(saved=SavedRouting())
    limited(x, 1, given)
    chosen = given.saved.chosen
    order = sort_by_expert(replace_dropped(chosen[None], limited.routing, room)[0], limited.routing, room)
    rows = [[row for row in range(ROWS) if expert in chosen[row].tolist()] for expert in range(8)]
    for expert in range(8):
        held = order.choice_at[expert * room : (expert + 1) * room]
        kept = [choice // 3 for choice in held.tolist() if choice >= 0]
        assert kept == rows[expert][:room] and (held[len(kept) :] == -1).all()
    dropped = [(row, expert) for expert in range(8) for row in rows[expert][room:]]
    gone = {(row, int(chosen[row, k])) for row, k in (order.places < 0).nonzero().tolist()}
    assert gone == set(dropped) and dropped
    assert limited.experts.tally[-2] == len(dropped) and limited.experts.tally[:8].sum() == ROWS * 3
    whole, part = free(x)[0], limited(x)[0]
    untouched = [row for row in range(ROWS) if row not in {row for row, _ in dropped}]
    assert untouched and error([(part[untouched], whole[untouched])]) <= EXACT
    w = plain_weights(free)
    normed = plain_norm(x, w["norm.weight"], free.eps)
    lost = torch.zeros_like(whole)
    weights = free.experts.router.weights(free.experts.router.scores(free.experts.router(normed)), chosen)
    for row, expert in dropped:
        share = weights[row, chosen[row].tolist().index(expert)]
        lost[row] += share * plain_mlp(normed[row], w["experts.up.weight"][expert], w["experts.down.weight"][expert],
                                       "swiglu")  # fmt: skip
    assert error([(whole - part, lost)]) <= EXACT


def test_each_sequence_has_places_of_its_own() -> None:
    """The result of a token does not depend on the other sequences of its micro-batch."""
    mixture, x = built(capacity=0.5), drawn(ROWS, HIDDEN)
    half = ROWS // 2
    both = torch.cat([mixture(x[:half], 1)[0], mixture(x[half:], 1)[0]])
    assert mixture.experts.tally[-2] > 0
    assert error([(mixture(x, 2)[0], both)]) <= EXACT
    assert error([(mixture(x, 1)[0], both)]) > 1e-3


def test_a_large_capacity_drops_nothing() -> None:
    free, limited = built(), built(capacity=8.0)
    x = drawn(ROWS, HIDDEN)
    assert error([(limited(x)[0], free(x)[0])]) <= EXACT and limited.experts.tally[-2] == 0


@pytest.mark.parametrize("chosen", ["random", "one", "skewed"])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_rows_are_sorted_as_the_row_table_says(chosen: str, ranks: int) -> None:
    """Rows go to experts in the order of `by_key`, for any number of ranks that hold the experts."""
    routing = Routing(8, 2, "softmax")
    scores = torch.rand(37, 8, generator=torch.Generator().manual_seed(7))
    scores += {"random": 0.0, "one": torch.eye(8)[6], "skewed": torch.tensor([0.0, 2, 0, 0, 2, 0, 0, 0])}[chosen]
    picked = scores.argsort(1, descending=True)[:, :2]
    found = sort_by_expert(picked, routing)
    table = by_key(picked.flatten().numpy(), ranks, 8 // ranks)
    assert np.array_equal(found.choice_at, table.order)
    assert np.array_equal(found.places.flatten(), table.inverse)
    assert np.array_equal(found.counts.view(ranks, -1).sum(1), table.counts)
    assert found.counts.tolist() == [int((picked == expert).sum()) for expert in range(8)]


def test_the_tally_counts_rows_and_entropy_of_training_alone() -> None:
    mixture = built(**DEEPSEEK)
    x = drawn(ROWS, HIDDEN)
    _, routed = plain_pass(mixture, x, plain_weights(mixture), "swiglu")
    mixture.eval()(x)
    assert not mixture.experts.tally.any()
    for _ in range(2):
        mixture.train()(x)
    rows = [2 * sum(expert in token.chosen for token in routed) for expert in range(8)]
    shares = [token.scores.detach() / token.scores.detach().sum() for token in routed]
    entropy = 2 * sum(float(-(share * share.log()).sum()) for share in shares)
    assert mixture.experts.tally[:8].tolist() == rows
    assert mixture.experts.tally[8:].tolist() == pytest.approx([0.0, entropy], rel=1e-12)


MODEL = {
    "layers": 3, "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "position": "rope", "ffn": 48,
    "experts": {"count": 8, "top_k": 3, "ffn": 16, "first_dense": 1, "bias_balance": 0.01, "aux_loss": 0.1,
                "z_loss": 0.01, **DEEPSEEK},
}  # fmt: skip


@pytest.mark.parametrize("mode", ["full", "every:2", "selective"])
def test_recomputation_changes_no_bit(mode: str) -> None:
    """Gradients, updates and tallies of two steps of two micro-batches agree. Each row is tallied once."""
    found = []
    for each in ("none", mode):
        config = small_config(model=MODEL, train={"global_batch": 4, "micro_batch": 2}, recompute={"mode": each})
        trainer = make_trainer(config)
        grads = [grad for _, grad in true_gradients(trainer)]
        tallies = [part.tally.clone() for part in trainer.balance.held.values()]
        results = [trainer.step() for _ in range(2)]
        weights = [p.detach().clone() for p in trainer.modules[0].parameters()]
        found.append((grads + tallies + weights, [(r.loss, r.grad_norm, r.losses, r.experts) for r in results]))
    (tensors, numbers), (others, same) = found
    assert len(tensors) == len(others) and all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))
    assert numbers == same and numbers[1][3]["rows"][0] and sum(numbers[1][3]["rows"][0]) == 4 * 16 * 3


def test_recomputation_replays_the_choice() -> None:
    """This holds even if the recomputed scores would choose other experts."""
    mixture, saved = built(**DEEPSEEK, aux_loss=0.1), SavedRouting()
    real, seen = Router.scores, list[Tensor]()
    sorted_rows = list[Tensor]()

    def scores(router: Router, logits: Tensor) -> Tensor:
        seen.append(real(router, logits) if not seen else real(router, logits).flip(1))
        return seen[-1]

    def spy(chosen: Tensor, routing: Routing, room: int) -> Any:
        sorted_rows.append(chosen)
        return sort_by_expert(chosen, routing, room)

    def run(x: Tensor, again: bool) -> tuple[Tensor, ...]:
        y, losses = mixture(x, 2, RoutedInputs(MASK, saved, again))
        assert losses is not None
        return y, losses

    with (
        mock.patch.object(Router, "scores", scores),
        mock.patch.object(experts_module, "sort_by_expert", spy),
        mock.patch.object(Router, "choose", side_effect=Router.choose, autospec=True) as choose,
    ):
        y, losses = recompute(run, drawn(ROWS, HIDDEN))
        torch.autograd.backward((y, losses), (torch.ones_like(y), torch.ones_like(losses)))
    assert len(seen) == 2 and choose.call_count == 1
    assert torch.equal(sorted_rows[0], sorted_rows[1])
    other = mixture.experts.router.choose(seen[1].detach())
    assert not torch.equal(other.sort(1).values, sorted_rows[0].sort(1).values)
    assert mixture.experts.tally[:8].sum() == ROWS * 3
