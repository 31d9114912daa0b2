"""The one executor: runs a rank's list of any schedule table. Without a pipeline it is gradient accumulation.

Between stages travels a named set of tensors. A chunk declares what it takes (`receives`: name -> shape and dtype);
receives are posted when the table says and waited for by the compute that needs them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from meshwright.comm.group import Group, Pending
from meshwright.engine.output import LOSS, Totals, as_output
from meshwright.errors import UserError
from meshwright.models.stage import stage_of
from meshwright.nn.random import Streams
from meshwright.nn.unit import MARK, MARK_SENT_BACK
from meshwright.nn.weight_grad import Deferred, SinkTable
from meshwright.spec.schedule.table import MEANING, RECEIVES, SENDS, SHARDING, Action, Op, Table
from meshwright.spec.schedule.trace import Recorder, span_name

Named = dict[str, Tensor]
ForwardStep = Callable[[nn.Module, Named, Named], Any]  # returns what `as_output` takes

# Sends under way at most, since what is sent is held as long. The tables run without deadlock even if every send waits
# for its receive, so waiting for the oldest is always safe.
SENDS_IN_FLIGHT = 4


class Shares(Protocol):
    """The data-parallel side of an executor: called by a table's gather, free and reduce actions. `work` is the compute
    that comes next; `sinks` takes the weight gradients."""

    sinks: SinkTable

    def gather(self, chunk: int, work: str) -> None: ...
    def free(self, chunk: int) -> None: ...
    def finish_reductions(self, chunk: int) -> None: ...


@dataclass(frozen=True)
class Seeds:
    """What backward multiplies each term's sum by, before the term's own weight. `of` is given a term's name, and
    refuses one that nobody announced; `announced` is that of the loss itself, where one is known."""

    of: Callable[[str], float]
    announced: float | None = None


class Output:
    """A tensor that a stage passes on. Once it has been sent, this rank releases its memory and keeps its shape, its
    dtype and its place in the graph, from which backward begins."""

    def __init__(self, x: Tensor) -> None:
        self.tensor: Tensor | None = x.detach()
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        self.edge = get_gradient_edge(x) if x.requires_grad else None

    def empty_gradient(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class Executor:
    """Runs tables on this rank's chunks. `modules` are in the order of the local chunk number; `compiled` says that
    their blocks are, which matters where weight gradients are computed apart (see `nn.weight_grad.Deferred`)."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        pp: Group,
        forward_step: ForwardStep,
        streams: Streams,
        shares: Shares | None = None,
        compiled: bool = False,
        overlaps: bool = True,
        pp_back: Group | None = None,
    ) -> None:
        """`pp_back`: the group of the gradients, where they are not sent over `pp` as activations are."""
        self.modules, self.pp, self.forward_step = list(modules), pp, forward_step
        self.pipes = {1: pp, -1: pp if pp_back is None else pp_back}  # by direction
        self.stages = [stage_of(module) for module in modules]
        self.streams, self.shares, self.compiled = streams, shares, compiled
        self.in_flight = SENDS_IN_FLIGHT if overlaps else 0
        self.rank, self.ledger = max(0, pp.index), pp.ledger
        self.done: list[Action] = []  # of the last run, in the order they ended
        self.recorder: Recorder | None = None  # while a step is traced

    def span(self, track: str, name: str, **args: Any) -> AbstractContextManager[None]:
        return self.recorder.span(track, name, **args) if self.recorder else nullcontext()

    def run(self, table: Table, batches: Callable[[int], Named], step: int, seeds: Seeds) -> Totals:
        """Runs this rank's list for one global batch. `batches(m)` loads micro-batch m."""
        run = _Run(self, table, batches, step, seeds)
        actions, self.done = table.ranks[self.rank], []
        for action, following in zip(actions, (*actions[1:], None), strict=True):
            run.act(action, following)
            self.done.append(action)
        run.drain()
        return run.totals


class _Run:
    """The state of one pass through a table. Keys are (micro-batch, local chunk)."""

    def __init__(
        self, executor: Executor, table: Table, batches: Callable[[int], Named], step: int, seeds: Seeds
    ) -> None:
        self.executor, self.table, self.batches = executor, table, batches
        self.step, self.seeds, self.training = step, seeds, table.trains
        self.totals = Totals()
        self.loaded: dict[int, tuple[Named, int]] = {}
        self.arriving: dict[tuple[int, int, int], tuple[Named, list[Pending]]] = {}  # by direction, micro-batch, chunk
        self.inputs: dict[tuple[int, int], Named] = {}
        self.outputs: dict[tuple[int, int], dict[str, Output]] = {}
        self.roots: dict[tuple[int, int], list[tuple[Tensor, float]]] = {}  # terms of the loss, with their seeds
        self.grads: dict[tuple[int, int], Named] = {}
        self.deferred: dict[tuple[int, int], Deferred] = {}
        self.sends: deque[tuple[Pending, Tensor]] = deque()
        self.compute = {
            Op.FORWARD: self.forward, Op.BACKWARD: self.backward,
            Op.INPUT_GRAD: self.input_grad, Op.WEIGHT_GRAD: self.weight_grad,
        }  # fmt: skip

    def act(self, action: Action, following: Action | None) -> None:
        if action.op in SHARDING:
            self.share(action, following)
            return
        direction = SENDS.get(action.op) or RECEIVES.get(action.op)
        name = MEANING[action.op].phase if direction is None else "forward" if direction > 0 else "backward"
        data_before, begin = self.totals.seconds["data"], time.perf_counter()
        with self._phase(name), self.executor.ledger.layer(None):
            self._do(action)
        self.totals.seconds[name] += time.perf_counter() - begin - (self.totals.seconds["data"] - data_before)

    def _phase(self, name: str) -> AbstractContextManager[None]:
        """What a validation communicates is all counted as such."""
        ledger = self.executor.ledger
        return ledger.phase(ledger.current_phase if ledger.current_phase == "validation" else name)

    def _do(self, action: Action) -> None:
        span, name = self.executor.span, span_name(action)
        args = {"micro_batch": action.micro_batch, "chunk": action.chunk}
        if action.op in self.compute:
            received = self._received(action)
            if MEANING[action.op].direction > 0:
                self.load(action.micro_batch)
            with span("compute", name, **args):
                self.compute[action.op](action, received)
        elif action.op in SENDS:
            with span("send", name, **args, to=action.peer):
                self.send(action)
        else:
            self.receive(action)

    def share(self, action: Action, following: Action | None) -> None:
        shares, begin = self.executor.shares, time.perf_counter()
        assert shares is not None, f"{action} needs somebody who shards"
        with self.executor.span("step", f"{action.op.value} of chunk {action.chunk}"):
            if action.op is Op.GATHER:
                assert following is not None
                shares.gather(action.chunk, following.op.value)
            elif action.op is Op.FREE:
                shares.free(action.chunk)
            else:
                shares.finish_reductions(action.chunk)
        self.totals.seconds["reduce"] += time.perf_counter() - begin

    def drain(self) -> None:
        with self.executor.span("wait", "for sends"):
            while self.sends:
                self.sends.popleft()[0].wait()
        left = (self.arriving, self.inputs, self.outputs, self.roots, self.grads, self.deferred)
        assert not any(left), "a table left work undone"

    def load(self, micro_batch: int) -> None:
        """Loads a micro-batch, once for all of this rank's chunks."""
        if micro_batch in self.loaded:
            return
        begin = time.perf_counter()
        with self._phase("data"), self.executor.span("wait", f"for batch {micro_batch}"):
            self.loaded[micro_batch] = (self.batches(micro_batch), len(self.executor.modules))
        self.totals.seconds["data"] += time.perf_counter() - begin

    def use(self, micro_batch: int) -> Named:
        """A loaded micro-batch, which the last of this rank's chunks to use it releases."""
        batch, uses = self.loaded.pop(micro_batch)
        if uses > 1:
            self.loaded[micro_batch] = (batch, uses - 1)
        return batch

    def forward(self, action: Action, received: Named) -> None:
        e, key = self.executor, (action.micro_batch, action.chunk)
        if self.training:
            for name, x in received.items():
                x.requires_grad_(self._is_graded(action.chunk, name, x.dtype))
            self.inputs[key] = received
        batch = self.use(action.micro_batch)
        module, stage = e.modules[action.chunk], e.stages[action.chunk]
        e.streams.begin(self.step, action.micro_batch, action.chunk)
        if self.training and not stage.draws_by_key:
            e.streams.seed_default()
        stage.announce(self.seeds.announced if self.training else None)
        with torch.set_grad_enabled(self.training):
            result = as_output(e.forward_step(module, batch, received))
        if self.training and (mark := getattr(module, MARK, None)) is not None:  # of a chunk without units
            for x in (*result.tensors.values(), *(term.sum for term in result.terms)):
                mark(x, module)
        self.totals.add(result)
        announced = self.training and stage.draws_by_key
        if announced and any(term.name == LOSS and term.weight != 1 for term in result.terms):
            raise UserError(
                "the term 'loss' of a model that computes its gradient in forward must have weight 1: "
                "give it another name, or scale the other terms"
            )
        roots = [(term.sum, term.weight * self.seeds.of(term.name)) for term in result.terms]
        if self.training:
            self.roots[key] = [(x, seed) for x, seed in roots if x.requires_grad]
        goes_on = self.table.beside(1, e.rank, action.chunk) is not None
        if goes_on and not result.tensors:
            raise UserError("forward_step passed nothing on from a stage that is not the last: return its tensors too")
        if goes_on or self.training:
            self.outputs[key] = {name: Output(x) for name, x in result.tensors.items()}
        if goes_on:
            self._hand_over(action, {name: x.detach() for name, x in result.tensors.items()})

    def backward(self, action: Action, received: Named) -> None:
        key = (action.micro_batch, action.chunk)
        outputs = self.outputs.pop(key)
        begin: list[tuple[Any, Tensor]] = [(x, torch.full_like(x, seed)) for x, seed in self.roots.pop(key)]
        begin += [(edge, grad) for name, grad in received.items() if (edge := outputs[name].edge) is not None]
        if begin:
            torch.autograd.backward([x for x, _ in begin], [grad for _, grad in begin])
        if inputs := self.inputs.pop(key):
            chunk = action.chunk
            with_grad = {name: x for name, x in inputs.items() if self._is_graded(chunk, name, x.dtype)}
            self.grads[key] = {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in with_grad.items()}
            mark = getattr(self.executor.modules[action.chunk], MARK_SENT_BACK, None)
            if mark is not None:
                for grad in self.grads[key].values():
                    mark(action.micro_batch, grad)
            self._hand_over(action, self.grads[key])

    def input_grad(self, action: Action, received: Named) -> None:
        """A backward whose weight gradients wait. What they need is kept, the rest of the activations is not."""
        shares = self.executor.shares
        assert shares is not None, f"{action} needs somebody who takes weight gradients"
        deferred = self.deferred[action.micro_batch, action.chunk] = Deferred(self.executor.compiled)
        with shares.sinks.deferring(deferred):
            self.backward(action, received)

    def weight_grad(self, action: Action, received: Named) -> None:
        self.deferred.pop((action.micro_batch, action.chunk)).run()

    def _is_graded(self, chunk: int, name: str, dtype: torch.dtype) -> bool:
        """Whether the gradient of a tensor that passes into or out of a chunk comes back."""
        return dtype.is_floating_point and name not in self.executor.stages[chunk].ungraded

    def _hand_over(self, action: Action, tensors: Named) -> None:
        """Passes tensors to the neighbouring stage if that is on this same rank."""
        direction = MEANING[action.op].direction
        to = self.table.beside(direction, self.executor.rank, action.chunk)
        if to is None or to[0] != self.executor.rank:
            return
        self.arriving[direction, action.micro_batch, to[1]] = (tensors, [])
        self._forget(direction, (action.micro_batch, action.chunk))

    def _forget(self, direction: int, key: tuple[int, int]) -> None:
        """Releases what was handed on: gradients altogether, outputs except for what their backward needs."""
        if direction < 0:
            del self.grads[key]
        elif not self.training:
            del self.outputs[key]
        else:
            for output in self.outputs[key].values():
                output.tensor = None

    def _received(self, action: Action) -> Named:
        """Waits for what a compute takes from its neighbour."""
        key = (MEANING[action.op].direction, action.micro_batch, action.chunk)
        tensors, pendings = self.arriving.pop(key, ({}, []))
        if pendings:
            with self.executor.span("wait", f"for {span_name(action)}"):
                for pending in pendings:
                    pending.wait()
        return tensors

    def send(self, action: Action) -> None:
        key = (action.micro_batch, action.chunk)
        direction = SENDS[action.op]
        outputs = {n: o.tensor for n, o in self.outputs[key].items() if o.tensor is not None} if direction > 0 else {}
        assert action.peer is not None
        for _, x in sorted((outputs or self.grads[key]).items()):
            x = x.detach().contiguous()
            self.sends.append((self.executor.pipes[direction].send(x, action.peer), x))
        self._forget(direction, key)
        while len(self.sends) > self.executor.in_flight:
            self.sends.popleft()[0].wait()

    def receive(self, action: Action) -> None:
        """Posts the receive; the compute that needs the tensors waits for them."""
        assert action.peer is not None
        direction, e = RECEIVES[action.op], self.executor
        if direction > 0:
            device = next(e.modules[action.chunk].parameters()).device
            receives = e.stages[action.chunk].receives.items()
            buffers = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in receives}
        else:
            outputs = self.outputs[action.micro_batch, action.chunk].items()
            graded = (each for each in outputs if self._is_graded(action.chunk, each[0], each[1].dtype))
            buffers = {name: x.empty_gradient() for name, x in graded}
        # On NCCL a posted receive is a kernel that holds multiprocessors until the tensor comes, so these communicators
        # have few thread blocks (`comm.communicators.MOST_BLOCKS`). Posting later would save those too, but the tensor
        # could then not travel while this rank computes.
        pendings = [e.pipes[direction].receive(x, action.peer) for _, x in sorted(buffers.items())]
        self.arriving[direction, action.micro_batch, action.chunk] = (buffers, pendings)
