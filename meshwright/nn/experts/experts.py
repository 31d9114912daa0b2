"""A mixture of experts in place of a block's MLP: route, send rows to their experts, compute, and send results back.

Every rank routes its local rows, gathers the rows of all ranks that hold shards of the same experts (etp), and sends
them to the ranks that hold the experts (ep). Rows are sorted by expert and then by token. The results of a token's
experts are summed in float32 in the order of its choices, so the result does not depend on which rank has an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.comm.by_node import NodeGroups, exchange_by_node, exchange_evenly
from meshwright.comm.group import Group
from meshwright.comm.ops import (
    all_gather,
    all_to_all,
    copy_to,
    gather_from,
    gather_rows,
    reduce_from,
    reduce_scatter_from,
    slice_rows,
)
from meshwright.nn.adapters.adapters import AdaptedLayer
from meshwright.nn.adapters.expert_adapters import (
    Spans,
    add_changes_,
    add_input_grad_,
    factor_grads,
    factors_of,
    short_grad,
)
from meshwright.nn.experts.grouped import (
    add_grouped_grad,
    collect,
    grouped_product,
    grouped_weight_grad,
    permute,
    spread,
    sum_rows,
    take_rows,
    weighted_activation,
    weighted_activation_backward,
)
from meshwright.nn.experts.routing import RoutedRows, Router, picks_of, router_losses
from meshwright.nn.inputs import Inputs
from meshwright.nn.mlp import MLP
from meshwright.nn.norm import Norm
from meshwright.nn.parallel import Parallel
from meshwright.spec.layout.params import ParamRecord, records_under
from meshwright.spec.model.experts import ExpertsPart, Routing


class ExpertWeights(AdaptedLayer):
    """One weight of all local experts, [experts, out, in]."""

    def __init__(self, parallel: Parallel, record: ParamRecord) -> None:
        super().__init__()
        self.weight = parallel.parameter(record)
        self.sinks: dict[str, Tensor] = {}
        self.add_adapters(parallel, record)


class SortedChoices(NamedTuple):
    """The choices of all rows, sorted by expert into places."""

    # The choice at each place, [places]: row * k + number of the choice, or -1 if the place is empty.
    choice_at: Tensor
    # The inverse, [rows, k]: the place of each choice, or -1 if it was dropped.
    places: Tensor
    # The number of places of each expert.
    counts: Tensor


@torch.no_grad()
def sort_by_expert(chosen: Tensor, routing: Routing, room: int = 0) -> SortedChoices:
    """Sort the choices [rows, k] by expert, then by row.

    With a capacity, each expert has `room` places. A dropped choice (`replace_dropped`) has the number after the last
    expert's, and gets no place.
    """
    flat, count = chosen.flatten(), routing.count
    order = flat.sort(stable=True)
    ends = torch.searchsorted(order.values, torch.arange(count, device=flat.device), right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    numbers = torch.arange(flat.shape[0], device=flat.device)
    if routing.capacity is None:
        places = torch.empty_like(flat).scatter_(0, order.indices, numbers)
        return SortedChoices(order.indices, places.view_as(chosen), counts)
    within = numbers - (ends - counts)[order.values.clamp(max=count - 1)]
    taken = order.values < count
    # Dropped choices go to one more place at the end, which is then cut off.
    place = torch.where(taken, order.values * room + within, count * room)
    choice_at = torch.full((count * room + 1,), -1, device=flat.device).scatter_(0, place, order.indices)[:-1]
    places = torch.empty_like(flat).scatter_(0, order.indices, torch.where(taken, place, -1))
    return SortedChoices(choice_at, places.view_as(chosen), torch.full_like(counts, room))


@torch.no_grad()
def replace_dropped(chosen: Tensor, routing: Routing, room: int) -> Tensor:
    """Return choices [sequences, tokens, k] of whole sequences with the number after the last expert's in place of
    those that are dropped.

    The tokens must be in the order of their sequence: an expert takes the first `room` tokens of a sequence that
    choose it, and drops the rest.
    """
    sequences, count = chosen.shape[0], routing.count
    first = torch.arange(0, sequences * count, count, device=chosen.device)
    order = (chosen + first[:, None, None]).flatten().sort(stable=True)
    begins = torch.searchsorted(order.values, order.values)
    within = torch.empty_like(begins).scatter_(
        0, order.indices, torch.arange(begins.shape[0], device=chosen.device) - begins
    )
    return torch.where(within.view_as(chosen) < room, chosen, count)


class Arrivals(NamedTuple):
    """The numbers of rows that a rank exchanges over ep."""

    # Rows to and from each rank.
    sends: list[int]
    receives: list[int]
    # The rows from each rank for each local expert, [ranks, experts].
    counts: Tensor
    # The rows that pass through this rank in a hierarchical exchange (`comm/by_node.py`).
    middle: list[int]


class SavedRouting:
    """Routing decisions that a recomputation takes from the first pass: the chosen experts, and the numbers of rows."""

    def __init__(self) -> None:
        # The choices of this rank's rows, and those of all rows that it sends to experts.
        self.chosen: Tensor | None = None
        self.all_chosen: Tensor | None = None
        # The number of places of each expert, if there is a capacity.
        self.room = 0
        self.arrivals: Arrivals | None = None


@dataclass
class RoutedInputs:
    """The inputs of a mixture's router for one micro-batch."""

    # A mask of the tokens that count in the loss; None: all of them.
    counted: Tensor | None = None
    # If blocks are recomputed, the decisions that the first pass saves. `again` is true in the recomputation.
    saved: SavedRouting | None = None
    again: bool = False
    # Under context parallelism, the position of each row in its sequence, [sequences, tokens], in the order of the
    # ranks.
    rows: Tensor | None = None


class Dispatch(NamedTuple):
    """The assignment of rows to the places that the local experts compute."""

    # The row at each place, [places], ordered by expert; negative if the place is empty.
    source: Tensor
    # The inverse, [rows, k]: the places of each row, negative where a choice was dropped.
    places: Tensor
    # The end of each expert's places, [experts].
    ends: Tensor


@dataclass(frozen=True)
class ExpertSettings:
    """The settings of the experts' two products: the activation between them and, for each product, the sink of its
    weight gradient and the rows of the weight that have adapters."""

    activation: str
    up_sink: Tensor | None
    down_sink: Tensor | None
    up_spans: Spans
    down_spans: Spans


class _ExpertProducts(torch.autograd.Function):
    """The MLPs of the local experts. The result of each place, times its routing weight, is added to the row that it
    came from.

    Only x and the inner features are saved for backward. `factors` are A and B of the adapters of the first product,
    then of the second.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, up: Tensor, down: Tensor, dispatch: Dispatch, settings: ExpertSettings,
        *factors: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.settings, (source, places, ends) = settings, dispatch
        count = 2 * len(settings.up_spans.rows)
        rows = take_rows(x, source)
        inner = add_changes_(grouped_product(rows, up, ends), rows, ends, settings.up_spans, factors[:count])
        del rows
        ctx.save_for_backward(x, weights, inner, up, down, *dispatch, *factors)
        value = weighted_activation(inner, weights, settings.activation)
        result = grouped_product(value, down, ends)
        return sum_rows(add_changes_(result, value, ends, settings.down_spans, factors[count:]), places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, inner, up, down, source, places, ends, *factors = ctx.saved_tensors
        settings: ExpertSettings = ctx.settings
        count = 2 * len(settings.up_spans.rows)
        up_factors = factors[:count]
        down_factors = factors[count:]

        # The second product and the activation. Large tensors are deleted as soon as they are no longer needed.
        rows = take_rows(grad, source)
        back = short_grad(rows, ends, settings.down_spans, down_factors)
        passed = add_input_grad_(grouped_product(rows, down, ends, transposed=True), back, ends, down_factors)
        grad_inner, value, grad_weights = weighted_activation_backward(inner, weights, passed, settings.activation)
        grad_down = _weight_grad(settings.down_sink, rows, value, ends) if ctx.needs_input_grad[3] else None
        down_grads = factor_grads(rows, value, back, ends, settings.down_spans, down_factors)
        del rows, value, passed

        # The first product.
        back = short_grad(grad_inner, ends, settings.up_spans, up_factors)
        grad_rows = add_input_grad_(grouped_product(grad_inner, up, ends, transposed=True), back, ends, up_factors)
        grad_x = sum_rows(grad_rows, places)
        del grad_rows
        grad_up, up_grads = None, []
        if ctx.needs_input_grad[2]:
            grad_up = _weight_grad(settings.up_sink, grad_inner, take_rows(x, source), ends)
        elif settings.up_spans.rows:
            up_grads = factor_grads(grad_inner, take_rows(x, source), back, ends, settings.up_spans, up_factors)
        return grad_x, grad_weights, grad_up, grad_down, None, None, *up_grads, *down_grads


def _weight_grad(sink: Tensor | None, grad: Tensor, x: Tensor, ends: Tensor) -> Tensor | None:
    if sink is None:
        return grouped_weight_grad(grad, x, ends)
    add_grouped_grad(sink, grad, x, ends)
    return None


class Experts(nn.Module):
    """The mixture of experts. Under tp without sequence parallelism, each tp rank routes a part of the tokens."""

    # Counts of this step so far: rows by expert, then dropped choices, then the sum of the router's entropies.
    tally: Tensor

    def __init__(self, parallel: Parallel, part: ExpertsPart, records: dict[str, ParamRecord]) -> None:
        super().__init__()
        assert parallel.experts is not None
        self.parallel, self.routing, self.kind = parallel, part.routing, part.mlp.kind
        self.etp, self.ep, self.by_node = parallel.experts.etp, parallel.experts.ep, parallel.experts.by_node
        self.alike = parallel.experts.alike
        self.cp = parallel.experts.cp
        self.router = Router(parallel, part.routing, records_under(records, "router"))
        self.up = ExpertWeights(parallel, records[f"{part.mlp.first}.weight"])
        self.down = ExpertWeights(parallel, records["down.weight"])
        shared = records_under(records, "shared")
        self.shared = MLP(parallel, part.shared, shared) if part.shared is not None else None
        tally = torch.zeros(part.routing.count + 2, dtype=torch.float64, device=parallel.device)
        self.register_buffer("tally", tally, persistent=False)

    def forward(self, x: Tensor, norm: Norm, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return x, for the residual, the mixture of norm(x), and the sums of the router's losses if it has any."""
        batch, given = inputs.sequences, inputs.routed
        assert given is not None
        normed = norm(x)
        rows = normed.shape[0]
        base, own = self._own_rows(normed)
        logits = self.router(own)
        scores = self.router.scores(logits)
        saved, losses = given.saved or SavedRouting(), None
        # A recomputation takes the choices of the first pass, so that rows go to the same experts.
        if not given.again:
            saved.chosen = self.router.choose(scores.detach())
            saved.all_chosen, saved.room = self._all_chosen(saved.chosen, rows, batch, given.rows)
        assert saved.chosen is not None and saved.all_chosen is not None
        order = sort_by_expert(saved.all_chosen, self.routing, saved.room)
        if self.training:
            picks = picks_of(scores.detach(), saved.chosen)
            if self.routing.has_losses:
                tokens = self._tokens(own, batch, given.counted)
                losses = router_losses(self.router, logits, scores, picks, tokens, self.parallel)
            if not given.again:
                self._count(picks, scores.detach(), order)
        weights = gather_from(self.router.weights(scores, saved.chosen), self.etp)
        y = self._back(self._combine(self._gather_base(base), weights, order, saved))[:rows]
        return x, y if self.shared is None else y + self.shared.of(normed), losses

    def _all_chosen(self, chosen: Tensor, rows: int, batch: int, order: Tensor | None) -> tuple[Tensor, int]:
        """Return the choices of all rows that this rank sends to experts and, with a capacity, the number of places
        that each expert has for them. A dropped choice becomes the number after the last expert's."""
        etp = self.etp
        tp = self.parallel.tp
        own = chosen.shape[0]
        if self.routing.capacity is None:
            return (chosen if etp.alone else all_gather(chosen, etp.name, etp.size)), 0

        # The rows that the tp ranks hold together, without padding, and the number of them in each sequence.
        held = rows * (tp.size if self.parallel.splits_tokens else 1)
        part = held // batch
        is_padded = own * max(1, tp.size) != held
        seq = part * max(1, self.cp.size)

        # Whether a choice is dropped depends on the whole sequence, so choices are gathered over tp unless this rank
        # routes whole sequences and sends only its local rows.
        all_sorted = tp.alone or self.alike
        has_whole = self.cp.alone and own % part == 0 and not is_padded
        alone = tp.alone or (has_whole and not all_sorted)
        known = chosen if alone else all_gather(chosen, tp.name, tp.size)
        # Padding counts as dropped.
        limited = torch.full_like(known, self.routing.count)
        limited[:held] = self._drop_over_capacity(known[:held], part, seq, order)
        if all_sorted:
            room = self.routing.places(own * max(1, etp.size), part, seq)
            return limited, own * max(1, etp.size) if is_padded else room
        room = (own if is_padded else self.routing.places(own, part, seq)) * max(1, etp.size)
        limited = limited if alone else limited[tp.index * own : (tp.index + 1) * own].contiguous()
        return (limited if etp.alone else all_gather(limited, etp.name, etp.size)), room

    def _drop_over_capacity(self, chosen: Tensor, part: int, seq: int, order: Tensor | None) -> Tensor:
        """Return the choices [rows, k] with those beyond the capacity dropped.

        Each sequence of `seq` tokens has `part` rows here. The choices of its other tokens come from the other ranks
        along cp.
        """
        room = self.routing.room(seq)
        cp = self.cp
        choices = chosen.shape[1]
        if cp.alone:
            return replace_dropped(chosen.view(-1, seq, choices), self.routing, room).view_as(chosen)
        shared = all_gather(chosen, cp.name, cp.size).view(cp.size, -1, part, choices)
        shared = shared.transpose(0, 1).reshape(-1, seq, choices)
        assert order is not None, "ranks that share sequences know the order of their rows"
        # `replace_dropped` needs the tokens in the order of their sequence; the result is put back afterwards.
        numbers = order.to(shared.device)[:, :, None].expand_as(shared)
        natural = replace_dropped(torch.empty_like(shared).scatter_(1, numbers, shared), self.routing, room)
        return natural.gather(1, numbers)[:, cp.index * part : (cp.index + 1) * part].reshape(chosen.shape)

    @property
    def _gathers(self) -> bool:
        """True if a rank must gather rows over etp, because it has only a part of them.

        It is false if all tp ranks hold all tokens and experts are sharded over the same ranks.
        """
        return self.parallel.splits_tokens or not self.alike

    def _own_rows(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows to gather, and the rows that this rank routes."""
        tp = self.parallel.tp
        if tp.alone or self.parallel.splits_tokens:
            return normed, normed
        # While text is generated, the tokens may not divide evenly over the ranks.
        lacking = -normed.shape[0] % tp.size
        if lacking:
            normed = torch.cat([normed, normed.new_zeros(lacking, normed.shape[1])])
        if self._gathers:
            own = slice_rows(normed, tp)
            return own, own
        normed = copy_to(normed, tp)
        part = normed.shape[0] // tp.size
        return normed, normed[tp.index * part : (tp.index + 1) * part]

    def _gather_base(self, base: Tensor) -> Tensor:
        return gather_from(base, self.etp) if self._gathers else base

    def _back(self, y: Tensor) -> Tensor:
        """Sum the parts of each row's result over etp and return the results of the tokens that this rank holds."""
        tp = self.parallel.tp
        if not self._gathers:
            return reduce_from(y, tp)
        y = reduce_scatter_from(y, self.etp)
        return y if self.parallel.splits_tokens else gather_rows(y, tp)

    def _tokens(self, own: Tensor, batch: int, counted: Tensor | None) -> RoutedRows:
        tp, rows = self.parallel.tp, own.shape[0]
        first = max(0, tp.index) * rows
        numbers = torch.arange(first, first + rows, device=own.device)
        own_counted = torch.ones_like(numbers) if counted is None else counted[first : first + rows]
        # Sequences follow one another and have equally many rows.
        return RoutedRows(numbers * batch // (rows * tp.size), batch, own_counted)

    @torch.no_grad()
    def _count(self, picks: Tensor, scores: Tensor, order: SortedChoices) -> None:
        shares = scores / scores.sum(1, keepdim=True)
        self.tally[: self.routing.count] += picks.sum(0)
        if self.routing.capacity is not None:
            first = max(0, self.etp.index) * picks.shape[0]
            self.tally[-2] += (order.places[first : first + picks.shape[0]] < 0).sum()
        self.tally[-1] += torch.special.entr(shares).sum()

    def _combine(self, x: Tensor, weights: Tensor, order: SortedChoices, saved: SavedRouting) -> Tensor:
        """Return the weighted sum of the results of each row's experts; under etp, this rank's part of that sum."""
        row_at = order.choice_at // order.places.shape[1]
        weight_at = permute(weights.flatten(), order.choice_at, order.places.flatten())
        if self.ep.alone:
            return self._products(x, weight_at, row_at, order.places, order.counts)
        if saved.arrivals is None:
            saved.arrivals = exchange_counts(order, self.routing, self.ep, self.by_node)
        counts = saved.arrivals.counts
        arrived = self._exchange(spread(x, row_at, order.places), saved.arrivals)
        arrived_weights = self._exchange(weight_at, saved.arrivals)
        # Rows arrive ordered by rank and then by expert. The experts need them ordered by expert.
        local = torch.arange(counts.shape[1], device=x.device).repeat(counts.shape[0])
        expert_of = local.repeat_interleave(counts.flatten(), output_size=sum(saved.arrivals.receives))
        arrival_at = expert_of.argsort(stable=True)
        numbers = torch.arange(len(arrival_at), device=x.device)
        place_of = torch.empty_like(arrival_at).scatter_(0, arrival_at, numbers)
        sorted_weights = permute(arrived_weights, arrival_at, place_of)
        result = self._products(arrived, sorted_weights, arrival_at, place_of[:, None], counts.sum(0))
        return collect(self._exchange(result, saved.arrivals, back=True), row_at, order.places)

    def _exchange(self, rows: Tensor, arrivals: Arrivals, back: bool = False) -> Tensor:
        """Exchange rows over ep, to their experts or `back`, and return the rows that arrive."""
        sends, receives = (arrivals.receives, arrivals.sends) if back else (arrivals.sends, arrivals.receives)
        if self.by_node is None:
            arrived: Tensor = all_to_all(rows, self.ep.name, sends, receives)
            return arrived
        inside, across = self.by_node
        crossed: Tensor = exchange_by_node(rows, inside.name, across.name, sends, receives, arrivals.middle, back)
        return crossed

    def _products(self, x: Tensor, weights: Tensor, source: Tensor, places: Tensor, counts: Tensor) -> Tensor:
        dispatch = Dispatch(source, places, counts.cumsum(0, dtype=torch.int32))
        up_spans, up_factors = factors_of(self.up.adapters)
        down_spans, down_factors = factors_of(self.down.adapters)
        sinks = self.up.sinks.get("weight"), self.down.sinks.get("weight")
        settings = ExpertSettings(self.kind, *sinks, up_spans, down_spans)
        both = (self.up.weight, self.down.weight)
        return _ExpertProducts.apply(x, weights, *both, dispatch, settings, *up_factors, *down_factors)


@torch.no_grad()
def exchange_counts(order: SortedChoices, routing: Routing, ep: Group, by_node: NodeGroups | None = None) -> Arrivals:
    """Exchange over ep the numbers of rows for each expert. The host waits for them, unless the capacity fixes them."""
    own = order.counts.view(ep.size, -1)
    rows = order.choice_at.shape[0]
    even = [rows // ep.size + (n < rows % ep.size) for n in range(ep.size)]
    middle = [] if by_node is None else even
    if routing.capacity is not None:
        return Arrivals(even, even, own, middle)
    if by_node is None:
        arriving = passing = torch.empty_like(own)
        ep.all_to_all(arriving, own.contiguous())
    else:
        arriving, passing = exchange_evenly(own.contiguous(), by_node)
    # A dry run assumes that the experts are balanced.
    if own.is_meta:
        return Arrivals(even, even, arriving, middle)
    # One transfer to the host for all numbers.
    numbers = [own.sum(1), arriving.sum(1), *([passing.sum(2).flatten()] if by_node else [])]
    sends, receives, *middles = torch.stack(numbers).tolist()
    return Arrivals(sends, receives, arriving, *(middles or [[]]))
