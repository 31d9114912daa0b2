"""Which blocks torch.compile takes as one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import autograd_function

from meshwright.config.features import keep_blocks_apart
from meshwright.engine.context import Context
from meshwright.errors import UserError
from meshwright.models.graph_stage import GraphStage
from meshwright.models.stage import stage_of
from meshwright.spec.model.description import model_of
from meshwright.spec.model.part import Unit

# Forward and backward of a smaller block take a fast device (of some 800 TFLOP/s) less time than the host needs to
# launch its kernels, 2 to 3 ms.
SMALL_BLOCK_FLOP = 2.5e12
MOST_TOGETHER = 4  # a larger group saves the host little and takes longer to compile
# One function runs all kinds of blocks, with gradients and without, of every length that becomes a symbol. Torch's own
# limit of 8 graphs is soon reached, and ends the run.
GRAPHS = 64


def blocks_together(ctx: Context, module: nn.Module) -> int:
    """Returns how many neighbouring blocks become one graph. By itself that happens only where the device would wait
    for the host, on a rank that trains alone: no gradients are sent while backward goes on, and no stage waits until
    another is compiled. Then there are no more kinds of groups than of blocks."""
    c, asked = ctx.config, ctx.config.train.compile_together
    if not isinstance(module, GraphStage) or asked == 1:
        return 1
    if isinstance(asked, int):
        if module.losses_here:
            fix = "set train.compile_together=1"
            raise UserError(f"train.compile_together={asked} can't take blocks that add to the loss: {fix}")
        return asked
    if ctx.device.module is None or ctx.layout.world > 1 or module.losses_here or keep_blocks_apart(c):
        return 1
    blocks = module.compiled_blocks()
    weights = sum(parameter.numel() for block in blocks for parameter in block.parameters()) / max(1, len(blocks))
    if 6 * weights * c.train.micro_batch * c.model.seq > SMALL_BLOCK_FLOP:
        return 1
    units = model_of(c).blocks
    runs = [[units[layer] for layer in run] for run in module.runs_of_layers()]
    kinds = {unit for run in runs for unit in run}
    fitting = (count for count in range(1, MOST_TOGETHER + 1) if 0 < _kinds_of_groups(runs, count) <= len(kinds))
    return max(fitting, default=1)  # a chunk may have no blocks


def _kinds_of_groups(runs: Sequence[Sequence[Unit]], count: int) -> int:
    """Returns how many different groups of so many blocks there are; 0 where blocks would be left over."""
    if any(len(run) % count for run in runs):
        return 0
    return len({tuple(run[at : at + count]) for run in runs for at in range(0, len(run), count)})


def compile_blocks(module: nn.Module, together: int = 1) -> None:
    """Compiles each block, or some of them `together`, as one graph, which all blocks of a chunk share."""
    _keep_gradients_of_outputs()
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    for block in stage_of(module).compiled_blocks():
        block.compile(fullgraph=True)
    if together > 1 and isinstance(module, GraphStage):
        module.compile_together(together)


def _keep_gradients_of_outputs() -> None:
    """Make torch 2.11 pass gradients on through every output of a compiled autograd function.

    In its graphs an output that forward wrote in place (a sum over ranks, an added bias) or that a `.to` returned as it
    was gets no gradient: all gradients before it are zero, without a message. A view of such an output gets one, so
    every output becomes a view. Later versions need no help.
    """
    if torch.__version__ < "2.12":  # torch compares versions here, not strings
        helper = autograd_function.DynamoAutogradFunctionTraceHelper
        setattr(helper, "fwd_trace_helper", staticmethod(_with_views))  # noqa: B010 (mypy refuses an assignment)


def _with_views(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward that Dynamo traces, as torch's own wrapper does, but with views of all outputs instead of
    those alone that are inputs too."""

    def traced(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            found = forward(*args, **kwargs)
        if isinstance(found, Tensor):
            return found.view_as(found)
        views = []
        for each in found:
            views.append(each.view_as(each) if isinstance(each, Tensor) else each)
        return tuple(views)

    return traced


@contextmanager
def blocks_one_by_one(modules: Sequence[nn.Module]) -> Iterator[None]:
    """No blocks run as one meanwhile."""
    stages = [module for module in modules if isinstance(module, GraphStage)]
    before = [stage.several for stage in stages]
    for stage in stages:
        stage.several = None
    try:
        yield
    finally:
        for stage, several in zip(stages, before, strict=True):
            stage.several = several
