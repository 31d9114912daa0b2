"""Which blocks torch.compile takes as one graph."""

from __future__ import annotations

from torch import nn

from meshwright.config.compile_rules import keeps_blocks_apart
from meshwright.models.gpt import GPTStage
from meshwright.models.stage import stage_of
from meshwright.train.context import Context

# Forward and backward of a smaller block take a fast device (of some 800 TFLOP/s) less time than the host needs to
# launch its kernels, 2 to 3 ms.
SMALL_BLOCK_FLOP = 2.5e12
MOST_TOGETHER = 4  # more spare the host little, and the compiler takes longer


def blocks_together(ctx: Context, module: nn.Module) -> int:
    """Returns how many neighbouring blocks become one graph. By itself that happens only where the device would wait
    for the host, and where no gradients are sent while backward goes on."""
    c, asked = ctx.config, ctx.config.train.compile_together
    if isinstance(asked, int):
        return asked
    stage = module if isinstance(module, GPTStage) else None
    if stage is None or ctx.device.module is None or keeps_blocks_apart(c) or ctx.layout.dp > 1:
        return 1
    blocks = stage.compiled_blocks()
    weights = sum(parameter.numel() for block in blocks for parameter in block.parameters()) / max(1, len(blocks))
    if 6 * weights * c.train.micro_batch * c.model.seq > SMALL_BLOCK_FLOP:
        return 1
    runs = stage.runs_of_blocks()
    return max(count for count in range(1, MOST_TOGETHER + 1) if all(length % count == 0 for length in runs))


def compile_blocks(module: nn.Module, together: int = 1) -> None:
    """Compiles each block, or some of them `together`, as one graph, which all blocks of a chunk share."""
    for block in stage_of(module).compiled_blocks():
        block.compile(fullgraph=True)
    if together > 1 and isinstance(module, GPTStage):
        module.compile_together(together)
