"""Compile blocks with torch.compile, and decide how many neighbouring blocks become one graph."""

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

# The FLOPs of forward and backward below which a block is small. On a fast device (some 800 TFLOP/s) a smaller block
# takes less time than the 2 to 3 ms that the host needs to launch its kernels.
SMALL_BLOCK_FLOP = 2.5e12
MAX_TOGETHER = 4  # Larger groups save the host little more and take longer to compile.
# The recompile limit. One function runs all kinds of blocks, with and without gradients, for every length that becomes
# a symbol. Torch's default limit of 8 graphs is soon reached, and exceeding it ends the run.
GRAPHS = 64


def blocks_together(ctx: Context, module: nn.Module) -> int:
    """Return the number of neighbouring blocks that become one graph.

    With `auto`, blocks are joined only if they are so small that the device would wait for the host, and only on a rank
    that trains alone: then no gradients are sent during backward, and no stage waits while another one compiles. The
    number is chosen so that there are at most as many kinds of groups as kinds of blocks.
    """
    config, asked = ctx.config, ctx.config.train.compile_together
    if not isinstance(module, GraphStage) or asked == 1:
        return 1
    if isinstance(asked, int):
        if module.losses_here:
            fix = "set train.compile_together=1"
            raise UserError(f"train.compile_together={asked} can't take blocks that add to the loss: {fix}")
        return asked
    if ctx.device.module is None or ctx.layout.world > 1 or module.losses_here or keep_blocks_apart(config):
        return 1
    blocks = module.compiled_blocks()
    weights = sum(parameter.numel() for block in blocks for parameter in block.parameters()) / max(1, len(blocks))
    # Forward and backward take 6 FLOPs per weight and token.
    if 6 * weights * config.train.micro_batch * config.model.seq > SMALL_BLOCK_FLOP:
        return 1
    units = model_of(config).blocks
    runs = [[units[layer] for layer in run] for run in module.runs_of_layers()]
    kinds = {unit for run in runs for unit in run}
    fitting = (count for count in range(1, MAX_TOGETHER + 1) if 0 < _kinds_of_groups(runs, count) <= len(kinds))
    # No count fits a chunk without blocks.
    return max(fitting, default=1)


def _kinds_of_groups(runs: Sequence[Sequence[Unit]], count: int) -> int:
    """Return the number of different groups of `count` blocks, or 0 if some run is not a multiple of `count`."""
    if any(len(run) % count for run in runs):
        return 0
    return len({tuple(run[at : at + count]) for run in runs for at in range(0, len(run), count)})


def compile_blocks(module: nn.Module, together: int = 1) -> None:
    """Compile each block, and also each run of `together` blocks, as one graph. Equal blocks of a chunk share it."""
    _keep_gradients_of_outputs()
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    for block in stage_of(module).compiled_blocks():
        block.compile(fullgraph=True)
    if together > 1 and isinstance(module, GraphStage):
        module.compile_together(together)


def _keep_gradients_of_outputs() -> None:
    """Make torch 2.11 propagate gradients through every output of a compiled autograd function.

    In its graphs, an output gets no gradient if forward wrote it in place (a sum over ranks, an added bias) or if it is
    a tensor that `.to` returned unchanged. All gradients before it are then silently zero. A view of such an output
    does get a gradient, so every output becomes a view. Later versions need no workaround.
    """
    # torch.__version__ is a TorchVersion, which compares as a version and not as a string.
    if torch.__version__ < "2.12":
        helper = autograd_function.DynamoAutogradFunctionTraceHelper
        setattr(helper, "fwd_trace_helper", staticmethod(_with_views))  # noqa: B010 (mypy refuses an assignment)


def _with_views(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward that Dynamo traces, with all its outputs as views.

    Torch's own wrapper does the same only for outputs that are also inputs.
    """

    def traced(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            outputs = forward(*args, **kwargs)
        if isinstance(outputs, Tensor):
            return outputs.view_as(outputs)
        views = []
        for output in outputs:
            views.append(output.view_as(output) if isinstance(output, Tensor) else output)
        return tuple(views)

    return traced


@contextmanager
def blocks_one_by_one(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Run every block on its own within this context, even blocks that were compiled together."""
    stages = [module for module in modules if isinstance(module, GraphStage)]
    runners = [stage.several for stage in stages]
    for stage in stages:
        stage.several = None
    try:
        yield
    finally:
        for stage, runner in zip(stages, runners, strict=True):
            stage.several = runner
