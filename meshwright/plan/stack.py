"""Software stacks: what a training program does with a device, beside the layout. No torch.

Our own two (blocks compiled or not) and six of other programs, told apart by what their sources document: is attention
one kernel or products around a softmax, are small kernels merged, which communication runs beside compute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from meshwright.config.sections import Config
from meshwright.parts.part import Kernels

# Bytes of one number of an activation, or of a parameter that a product reads.
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}


@dataclass(frozen=True)
class States:
    """Bytes of one element of each kind of state, and where the states live."""

    param: int = 2
    grad: int = 4
    master: int = 4
    moment: int = 4
    moments: int = 2
    keeps_param: bool = True  # beside the master, parameters are kept in the precision that products read
    grad_copy: int = 0  # bytes per parameter of a second gradient in another precision
    step_copy: int = 0  # bytes per own parameter that the update needs for a while
    buckets: bool = False  # DeepSpeed's fixed buckets and live parameters
    optimizer_on: str = "device"  # device, cpu or disk
    params_on: str = "device"
    checkpoints_on: str = "device"  # where the inputs of recomputed blocks wait


def states_of(config: Config) -> States:
    """How Meshwright keeps the states of a config."""
    precision, master = config.train.precision, config.optimizer.master_dtype
    own = BYTES[precision]

    def wide(name: str) -> int:
        return max(BYTES.get(name, 4), 8 if precision == "fp64" else 0)

    places = {"none": "device", "cpu": "cpu", "disk": "disk"}
    return States(
        param=own, grad=wide(config.train.grad_dtype), master=wide(master) if own < 4 and master != precision else 0,
        moment=wide(config.optimizer.state_dtype), moments=2 if config.optimizer.name == "adamw" else 0,
        optimizer_on=places[config.zero.offload.optimizer], params_on=places[config.zero.offload.params],
    )  # fmt: skip


@dataclass(frozen=True)
class Stack:
    """What a program does. Shares are of the time that could be hidden at best."""

    name: str
    about: str
    fused_attention: bool
    attention: float  # speed of its attention core, the device's own figure being 1
    passes: float  # memory passes of elementwise work, one read and one write for each operation being 1
    accumulate: float  # bytes per parameter and micro-batch that adding a weight gradient to the sum moves
    kernel_us: float  # host time to launch one kernel; a layer can't be faster than its launches
    hide_tp: float  # of tp collectives behind products
    hide_dp: float  # of gradient reduction and parameter gathers behind compute
    hide_pp: float  # of stage-to-stage sends
    gathers: int  # collectives that gather one sharded layer: one flat buffer, or one for each weight
    contention: float  # compute that runs beside communication is slower by this share of the hidden time
    scatter_sends: bool  # a tp rank sends only its t-th part of what goes to the next stage
    selective: float  # share of a block's linear products that "selective" runs again
    selective_core: bool  # whether "selective" runs attention's core again
    logit_bytes: float  # bytes per logit that are alive at the loss's peak
    gate_copies: float  # widths of the MLP kept for backward by a gated activation
    base_gib: float  # context and communication buffers, which the allocator doesn't see
    cache: float  # reserved by the allocator over allocated, for activations
    own: bool = False  # Meshwright itself
    compiled: bool = False  # its blocks are compiled
    states: States | None = None  # how it keeps states, where that is not as we do

    def kernels(self, host: bool = False) -> Kernels:
        """What its kernels keep; `host`: on a CPU."""
        if self.own:
            return Kernels(fused=self.compiled, host=host)
        return Kernels(
            fused_attention=self.fused_attention, gate_copies=self.gate_copies, keeps_rotation=self.gate_copies > 3,
            mask_bytes=1.0, logit_bytes=self.logit_bytes, own=False,
        )  # fmt: skip


def _load() -> dict[str, Stack]:
    raw = yaml.safe_load((Path(__file__).parent / "stacks.yaml").read_text(encoding="utf-8"))
    others = {name: Stack(name=name, **fields) for name, fields in raw.items()}
    compiled = replace(
        others["fsdp-compiled"], name="compiled", about="Meshwright: compiled blocks over flat buffers", own=True,
        compiled=True, selective=0.0, selective_core=True,
    )  # fmt: skip
    eager = replace(
        compiled, name="eager", about="Meshwright without compiled blocks: eager elementwise kernels", compiled=False,
        passes=others["fused"].passes, kernel_us=others["fused"].kernel_us,
    )  # fmt: skip
    # A processor's rates are measured with its blocks as they run, so it has the plain figures of `compiled`.
    cpu = replace(compiled, name="cpu", about="Meshwright on a CPU, as its profile was measured", compiled=False)
    return {stack.name: stack for stack in (compiled, eager, cpu)} | others


STACKS = _load()
COMPILED, EAGER, CPU = STACKS["compiled"], STACKS["eager"], STACKS["cpu"]


def own_stack(config: Config, host: bool = False) -> Stack:
    """Meshwright as this config runs on an accelerator, or on a CPU (`host`), which compiles blocks only if asked."""
    if host:
        return replace(CPU, compiled=config.train.compile == "true")
    return COMPILED if config.compiles else EAGER
