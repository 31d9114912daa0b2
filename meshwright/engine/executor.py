"""The executor of all pipeline schedules: it runs one rank's list of a schedule table.

A table without a pipeline amounts to gradient accumulation. Stages exchange named sets of tensors, and a chunk declares
the ones it takes (`receives`: name -> shape and dtype). Receives are posted when the table says so, and the compute
that needs the tensors waits for them.
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
from meshwright.engine.output import LOSS, Totals, to_output
from meshwright.errors import UserError
from meshwright.models.stage import stage_of
from meshwright.nn.random import Streams
from meshwright.nn.unit import MARK, MARK_SENT_BACK
from meshwright.nn.weight_grad import Deferred, SinkTable
from meshwright.spec.schedule.table import MEANING, RECEIVES, SENDS, SHARDING, Action, Op, Table
from meshwright.spec.schedule.trace import Recorder, span_name

Named = dict[str, Tensor]
ForwardStep = Callable[[nn.Module, Named, Named], Any]  # Returns anything that `to_output` accepts.

# The most sends in flight. Each holds its tensor in memory until it is done. The tables run without deadlock even if
# every send blocks until its receive, so waiting for the oldest send is always safe.
SENDS_IN_FLIGHT = 4


class Shares(Protocol):
    """The data-parallel side of an executor, which a table's gather, free and reduce actions call.

    `work` names the compute that follows a gather, and `sinks` receives the weight gradients.
    """

    sinks: SinkTable

    def gather(self, chunk: int, work: str) -> None: ...
    def free(self, chunk: int) -> None: ...
    def finish_reductions(self, chunk: int) -> None: ...


@dataclass(frozen=True)
class Seeds:
    """The factors that scale each term's sum for backward, in addition to the term's own weight.

    `of` returns the factor of a term by name, and raises an error for a term that was not declared. `announced` is the
    factor of the term "loss" if it is known before forward.
    """

    of: Callable[[str], float]
    announced: float | None = None


class Output:
    """A tensor that a stage passes on.

    Once it has been sent, this rank releases its memory. It keeps the shape, the dtype and the gradient edge, from
    which backward begins.
    """

    def __init__(self, x: Tensor) -> None:
        self.tensor: Tensor | None = x.detach()
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        self.edge = get_gradient_edge(x) if x.requires_grad else None

    def empty_gradient(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class Executor:
    """Runs schedule tables on this rank's chunks.

    `modules` are in the order of the local chunk number. `compiled` says that their blocks are compiled, which matters
    to schedules that compute weight gradients separately (see `nn.weight_grad.Deferred`).
    """

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
        """Create an executor. `pp_back`: the group for gradients, if they are not sent over `pp` like activations."""
        self.modules = list(modules)
        self.pp = pp
        self.forward_step = forward_step
        self.pipes = {1: pp, -1: pp if pp_back is None else pp_back}  # by direction: 1 forward, -1 backward
        self.stages = [stage_of(module) for module in modules]
        self.streams, self.shares, self.compiled = streams, shares, compiled
        self.in_flight = SENDS_IN_FLIGHT if overlaps else 0
        self.rank = max(0, pp.index)
        self.ledger = pp.ledger
        self.done: list[Action] = []  # the finished actions of the last run, in order
        self.recorder: Recorder | None = None  # set while a step is traced

    def span(self, track: str, name: str, **args: Any) -> AbstractContextManager[None]:
        return self.recorder.span(track, name, **args) if self.recorder else nullcontext()

    def run(self, table: Table, batches: Callable[[int], Named], step: int, seeds: Seeds) -> Totals:
        """Run this rank's list of actions for one global batch. `batches(m)` loads micro-batch m."""
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
        if direction is None:
            name = MEANING[action.op].phase
        else:
            name = "forward" if direction > 0 else "backward"
        data_before = self.totals.seconds["data"]
        begin = time.perf_counter()
        with self._phase(name), self.executor.ledger.layer(None):
            self._do(action)
        # Loading a batch within this action is booked as data, not as compute.
        self.totals.seconds[name] += time.perf_counter() - begin - (self.totals.seconds["data"] - data_before)

    def _phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context that books communication under a phase, or under "validation" during a validation."""
        ledger = self.executor.ledger
        return ledger.phase(ledger.current_phase if ledger.validating else name)

    def _do(self, action: Action) -> None:
        span, name = self.executor.span, span_name(action)
        args = {"micro_batch": action.micro_batch, "chunk": action.chunk}
        if action.op in self.compute:
            received = self._wait_for_inputs(action)
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
        shares = self.executor.shares
        begin = time.perf_counter()
        assert shares is not None, f"{action} needs a `shares` object that shards weights"
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
        unfinished = (self.arriving, self.inputs, self.outputs, self.roots, self.grads, self.deferred)
        assert not any(unfinished), "a table left work undone"

    def load(self, micro_batch: int) -> None:
        """Load a micro-batch, once for all of this rank's chunks."""
        if micro_batch in self.loaded:
            return
        begin = time.perf_counter()
        with self._phase("data"), self.executor.span("wait", f"for batch {micro_batch}"):
            self.loaded[micro_batch] = (self.batches(micro_batch), len(self.executor.modules))
        self.totals.seconds["data"] += time.perf_counter() - begin

    def use(self, micro_batch: int) -> Named:
        """Return a loaded micro-batch. The last of this rank's chunks to use it releases it."""
        batch, uses = self.loaded.pop(micro_batch)
        if uses > 1:
            self.loaded[micro_batch] = (batch, uses - 1)
        return batch

    def forward(self, action: Action, received: Named) -> None:
        e = self.executor
        key = (action.micro_batch, action.chunk)
        if self.training:
            # Received tensors become leaves of the graph, whose gradients are sent back after backward.
            for name, x in received.items():
                x.requires_grad_(self._is_graded(action.chunk, name, x.dtype))
            self.inputs[key] = received
        batch = self.use(action.micro_batch)
        module, stage = e.modules[action.chunk], e.stages[action.chunk]
        e.streams.begin(self.step, action.micro_batch, action.chunk)
        if self.training and not stage.draws_by_key:
            # Modules that draw from torch's default generator become reproducible, whatever the order of micro-batches.
            e.streams.seed_default()
        stage.announce(self.seeds.announced if self.training else None)
        with torch.set_grad_enabled(self.training):
            result = to_output(e.forward_step(module, batch, received))
        # Units show their outputs to their marks themselves; a chunk without units has one mark.
        if self.training and (mark := getattr(module, MARK, None)) is not None:
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
        has_next_stage = self.table.beside(1, e.rank, action.chunk) is not None
        if has_next_stage and not result.tensors:
            raise UserError("forward_step passed nothing on from a stage that is not the last: return its tensors too")
        if has_next_stage or self.training:
            self.outputs[key] = {name: Output(x) for name, x in result.tensors.items()}
        if has_next_stage:
            self._hand_over(action, {name: x.detach() for name, x in result.tensors.items()})

    def backward(self, action: Action, received: Named) -> None:
        key = (action.micro_batch, action.chunk)
        outputs = self.outputs.pop(key)
        # Backward begins both at the terms of the loss and at the outputs whose gradients the next stage sent back.
        roots: list[tuple[Any, Tensor]] = [(x, torch.full_like(x, seed)) for x, seed in self.roots.pop(key)]
        roots += [(edge, grad) for name, grad in received.items() if (edge := outputs[name].edge) is not None]
        if roots:
            torch.autograd.backward([x for x, _ in roots], [grad for _, grad in roots])
        if inputs := self.inputs.pop(key):
            chunk = action.chunk
            with_grad = {name: x for name, x in inputs.items() if self._is_graded(chunk, name, x.dtype)}
            # The previous stage waits for a gradient of every graded tensor, so unused ones are sent as zeros.
            self.grads[key] = {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in with_grad.items()}
            mark = getattr(self.executor.modules[action.chunk], MARK_SENT_BACK, None)
            if mark is not None:
                for grad in self.grads[key].values():
                    mark(action.micro_batch, grad)
            self._hand_over(action, self.grads[key])

    def input_grad(self, action: Action, received: Named) -> None:
        """Run a backward that defers the weight gradients. Only the activations that these need are held."""
        shares = self.executor.shares
        assert shares is not None, f"{action} needs a `shares` object that takes weight gradients"
        deferred = self.deferred[action.micro_batch, action.chunk] = Deferred(self.executor.compiled)
        with shares.sinks.defer_to(deferred):
            self.backward(action, received)

    def weight_grad(self, action: Action, received: Named) -> None:
        self.deferred.pop((action.micro_batch, action.chunk)).run()

    def _is_graded(self, chunk: int, name: str, dtype: torch.dtype) -> bool:
        """Return True if a tensor that passes into or out of a chunk gets a gradient."""
        return dtype.is_floating_point and name not in self.executor.stages[chunk].ungraded

    def _hand_over(self, action: Action, tensors: Named) -> None:
        """Pass tensors to the neighbouring stage if it is on this same rank, where nothing is sent."""
        direction = MEANING[action.op].direction
        to = self.table.beside(direction, self.executor.rank, action.chunk)
        if to is None or to[0] != self.executor.rank:
            return
        self.arriving[direction, action.micro_batch, to[1]] = (tensors, [])
        self._forget(direction, (action.micro_batch, action.chunk))

    def _forget(self, direction: int, key: tuple[int, int]) -> None:
        """Release tensors that were handed on. Outputs keep the edges that their backward begins from."""
        if direction < 0:
            del self.grads[key]
        elif not self.training:
            del self.outputs[key]
        else:
            for output in self.outputs[key].values():
                output.tensor = None

    def _wait_for_inputs(self, action: Action) -> Named:
        """Wait for the tensors that a compute takes from the neighbouring stage, and return them."""
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
        # Both ends order the tensors by name, so that every receive meets its send.
        for _, x in sorted((outputs or self.grads[key]).items()):
            x = x.detach().contiguous()
            self.sends.append((self.executor.pipes[direction].send(x, action.peer), x))
        self._forget(direction, key)
        while len(self.sends) > self.executor.in_flight:
            self.sends.popleft()[0].wait()

    def receive(self, action: Action) -> None:
        """Post the receives of an action. The compute that needs the tensors waits for them."""
        assert action.peer is not None
        direction, e = RECEIVES[action.op], self.executor
        if direction > 0:
            device = next(e.modules[action.chunk].parameters()).device
            receives = e.stages[action.chunk].receives.items()
            buffers = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in receives}
        else:
            outputs = self.outputs[action.micro_batch, action.chunk].items()
            graded = {name: x for name, x in outputs if self._is_graded(action.chunk, name, x.dtype)}
            buffers = {name: x.empty_gradient() for name, x in graded.items()}
        # On NCCL a posted receive is a kernel that occupies multiprocessors until the tensor arrives, so these
        # communicators use few thread blocks (`comm.communicators.MAX_BLOCKS`). Posting later would free those too,
        # but then the transfer could not overlap with this rank's compute.
        pendings = [e.pipes[direction].receive(x, action.peer) for _, x in sorted(buffers.items())]
        self.arriving[direction, action.micro_batch, action.chunk] = (buffers, pendings)
