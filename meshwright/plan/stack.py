"""Software stacks: what a training program does with a device, beside the layout. No torch.

Six, told apart by what their sources document: is attention one kernel or products around a softmax, are small kernels
merged, which communication runs beside compute. A published run gets its stack from its source, never from its error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Stack:
    """What a program does. Shares are of the time that could be hidden at best."""

    name: str
    about: str
    fused_attention: bool
    attention: float  # speed of its attention core, the device's own figure being 1
    passes: float  # memory passes of elementwise work, one read and one write for each operation being 1
    accumulate: float  # bytes a parameter and micro-batch that adding a weight gradient to the sum moves
    kernel_us: float  # host time to launch one kernel; a layer can't be faster than its launches
    hide_tp: float  # of tp collectives behind products
    hide_dp: float  # of gradient reduction and parameter gathers behind compute
    hide_pp: float  # of stage-to-stage sends
    gathers: int  # collectives that gather one sharded layer: one flat buffer, or one for each weight
    contention: float  # compute that runs beside communication is slower by this share of the hidden time
    scatter_sends: bool  # a tp rank sends only its t-th part of what goes to the next stage
    selective: float  # share of a block's linear products that "selective" runs again
    logit_bytes: float  # bytes a logit that are alive at the loss's peak
    gate_copies: float  # widths of the MLP kept for backward by a gated activation
    base_gib: float  # context and communication buffers, which the allocator doesn't see
    cache: float  # reserved by the allocator over allocated, for activations


def _load() -> dict[str, Stack]:
    raw = yaml.safe_load((Path(__file__).parent / "stacks.yaml").read_text(encoding="utf-8"))
    return {name: Stack(name=name, **fields) for name, fields in raw.items()}


STACKS = _load()
OWN = "compiled"
# Our own blocks where they are not compiled: what a compiler merges runs and is kept as in other eager programs.
EAGER = replace(
    STACKS[OWN], name="eager", about="Meshwright without compiled blocks: eager elementwise kernels",
    passes=STACKS["fused"].passes, kernel_us=STACKS["fused"].kernel_us, gate_copies=STACKS["fused"].gate_copies,
)  # fmt: skip
NAMED = STACKS | {EAGER.name: EAGER}  # what a user may ask for

# What a row's source says, first match.
RULES: tuple[tuple[str, str], ...] = (
    (r"llm-foundry|FSDP VLDB", "fsdp"),
    (r"torchtitan|fms-fsdp", "compiled"),
    (r"nanotron|InternEvo|FlashAttention|picotron|stas00", "fused"),
    (r"MT-NLG|bigscience|BLOOM|GLM|NeoX|ZeRO|DeepSpeed", "unfused-deepspeed"),
    (r"SC21|Korthikanti|Shoeybi|OPT|Zero Bubble", "unfused"),
    (r"dgxc|NeMo|Megatron|Nemotron|MegaScale|Llama 3", "fused-overlap"),
)  # fmt: skip


def stack_for(source: str, words: str, device: str, zero: int) -> Stack:
    """The stack that a source documents; without a word of it, what was usual on that device.

    `words` are the row's own (its name and note): asynchronous tp is told there.
    """
    name = next((name for pattern, name in RULES if re.search(pattern, source)), "")
    if not name and zero == 3:
        name = "fsdp"
    if not name:
        name = "unfused" if device.startswith(("V100", "A100", "Ascend")) else "fused-overlap"
    if name == "unfused" and zero == 3:  # of that time, stage 3 was DeepSpeed's alone
        name = "unfused-deepspeed"
    if name == "compiled" and re.search(r"asyncTP", words) and "vanillaTP" not in words:
        return replace(STACKS[name], hide_tp=STACKS["fused-overlap"].hide_tp)
    return STACKS[name]
