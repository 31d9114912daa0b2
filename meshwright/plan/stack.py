"""Software stacks: what a training program does with a device, beside the layout. No torch.

Six, told apart by what their sources document: is attention one kernel or products around a softmax, are small kernels
merged, which communication runs beside compute. A published run gets its stack from its source, never from its error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Stack:
    """What a program does. Shares are of the time that could be hidden at best."""

    name: str
    about: str
    fused_attention: bool
    attention: float  # speed of its attention core, the device's own figure being 1
    products: float  # speed of its products, the device's own figure being 1
    passes: float  # memory passes of elementwise work, one read and one write for each operation being 1
    kernel_us: float  # host time to launch one kernel; a layer can't be faster than its launches
    hide_tp: float  # of tp collectives behind products
    hide_dp: float  # of gradient reduction and parameter gathers behind compute
    hide_pp: float  # of stage-to-stage sends
    contention: float  # compute that runs beside communication is slower by this share of the hidden time
    scatter_sends: bool  # a tp rank sends only its t-th part of what goes to the next stage
    selective: float  # share of a block's linear products that "selective" runs again
    logit_bytes: float  # bytes a logit that are alive at the loss's peak
    gate_copies: float  # widths of the MLP kept for backward by a gated activation
    base_gib: float  # context and communication buffers, which the allocator doesn't see
    cache: float  # reserved by the allocator over allocated, for activations


STACKS = {
    stack.name: stack
    for stack in (
        Stack(
            "unfused", "Megatron-LM of 2019 to 2022 and Megatron-DeepSpeed: attention as products around a softmax "
            "kernel, merged bias, dropout and activation, gradients reduced after backward, sends not hidden",
            fused_attention=False, attention=1.0, products=1.0, passes=1.0, kernel_us=8.0, hide_tp=0.0, hide_dp=0.0,
            hide_pp=0.0, contention=0.0, scatter_sends=True, selective=0.0, logit_bytes=14.0, gate_copies=4.0,
            base_gib=3.0, cache=1.1,
        ),
        Stack(
            "fused-overlap", "Megatron-core and NeMo with TransformerEngine: one attention kernel, products beside "
            "their tp collectives, gradients and parameters moved beside compute",
            fused_attention=True, attention=1.0, products=1.0, passes=1.0, kernel_us=4.0, hide_tp=0.7, hide_dp=0.9,
            hide_pp=0.8, contention=0.1, scatter_sends=True, selective=0.0, logit_bytes=10.0, gate_copies=3.0,
            base_gib=3.0, cache=1.1,
        ),
        Stack(
            "fused", "nanotron, InternEvo, DeepSpeed with FlashAttention 2 or later: one attention kernel, eager elementwise "
            "kernels, gradients beside backward, tp collectives exposed",
            fused_attention=True, attention=0.8, products=1.0, passes=2.0, kernel_us=8.0, hide_tp=0.0, hide_dp=0.7,
            hide_pp=0.0, contention=0.1, scatter_sends=True, selective=0.0, logit_bytes=14.0, gate_copies=4.0,
            base_gib=3.0, cache=1.1,
        ),
        Stack(
            "fsdp", "PyTorch FSDP, eager (llm-foundry): Triton or FlashAttention 1 kernels, layers gathered one ahead",
            fused_attention=True, attention=0.6, products=1.0, passes=2.0, kernel_us=8.0, hide_tp=0.0, hide_dp=0.9,
            hide_pp=0.0, contention=0.1, scatter_sends=False, selective=0.5, logit_bytes=14.0, gate_copies=4.0,
            base_gib=3.0, cache=1.15,
        ),
        Stack(
            "compiled", "torch.compile of each block over sharded buffers (torchtitan, fms-fsdp, Meshwright): merged "
            "elementwise kernels, one attention kernel, layers gathered one ahead, tp collectives exposed",
            fused_attention=True, attention=0.8, products=1.0, passes=1.0, kernel_us=4.0, hide_tp=0.0, hide_dp=0.9,
            hide_pp=0.0, contention=0.1, scatter_sends=False, selective=0.5, logit_bytes=14.0, gate_copies=4.0,
            base_gib=3.0, cache=1.15,
        ),
        Stack(
            "compiled-overlap", "the same with products beside their tp collectives (torchtitan's asynchronous tp)",
            fused_attention=True, attention=0.8, products=1.0, passes=1.0, kernel_us=4.0, hide_tp=0.7, hide_dp=0.9,
            hide_pp=0.0, contention=0.1, scatter_sends=False, selective=0.5, logit_bytes=14.0, gate_copies=4.0,
            base_gib=3.0, cache=1.15,
        ),
    )
}  # fmt: skip

OWN = "compiled"

# What the text of a row's source and note says, first match. The last two lines are for sources that say nothing.
RULES: tuple[tuple[str, str], ...] = (
    (r"llm-foundry|Composer|FSDP VLDB", "fsdp"),
    (r"(?<!-)asyncTP", "compiled-overlap"),
    (r"torchtitan|fms-fsdp|torch\.compile", "compiled"),
    (r"nanotron|InternEvo|FlashAttention|picotron|stas00", "fused"),
    (r"dgxc|NeMo|Megatron-Bridge|Megatron-Core|Megatron-LM README|Megatron-LM examples|Nemotron|MegaScale|Llama 3", "fused-overlap"),
    (r"SC21|Korthikanti|Shoeybi|MT-NLG|bigscience|BLOOM|GLM|OPT|NeoX|Zero Bubble|ZeRO|deepspeed", "unfused"),
)  # fmt: skip


def stack_for(text: str, device: str, zero: int) -> Stack:
    """The stack that a source documents; without a word of it, what was usual on that device."""
    for pattern, name in RULES:
        if re.search(pattern, text):
            return STACKS[name]
    if zero == 3:
        return STACKS["fsdp"]
    old = device.startswith(("V100", "A100", "Ascend"))
    return STACKS["unfused" if old else "fused-overlap"]
