"""Software stacks: the properties of a training program on a device, apart from the layout. No torch.

There are our own stacks (with and without compiled blocks, and on a CPU) and those of other programs. They differ in
the properties that their sources document: whether attention is one kernel or products around a softmax, whether small
kernels are fused, and which communication overlaps compute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from meshwright.config.memory import Place
from meshwright.config.precision import PRECISIONS
from meshwright.config.sections import Config
from meshwright.engine.optim.rule import Rule, rules_of
from meshwright.spec.model.part import Kernels
from meshwright.spec.traffic.placement import UpdateKind

NF4 = "nf4"
# Bytes per element of an activation, or of a parameter that a product reads. The elements of packed nf4 are bytes.
BYTES = {**{name: each.bytes for name, each in PRECISIONS.items()}, NF4: 1}


@dataclass(frozen=True)
class States:
    """The bytes per element of each kind of state, and where the states are kept."""

    param: int = 2
    grad: int = 4
    master: int = 4
    rule: tuple[int, ...] = (4, 4)  # One entry for each state of the optimizer's update rule.
    rules: tuple[tuple[UpdateKind, tuple[int, ...]], ...] = ()  # The same for parameters with another rule.
    fused: bool = True  # On an accelerator, one kernel updates the states in the precisions in which they are stored.
    paired: bool = False  # The master is the parameter and the 16 bits that rounding removed from it.
    keeps_param: bool = True  # In addition to the master, parameters are stored in the precision of the products.
    grad_copy: int = 0  # Bytes per parameter of a second gradient in another precision.
    step_copy: int = 0  # Temporary bytes per owned parameter during the update.
    buckets: bool = False  # True for DeepSpeed's fixed buckets and live parameters.
    optimizer_at: Place = Place.DEVICE
    params_at: Place = Place.DEVICE
    checkpoints_at: Place = Place.DEVICE  # The place of the inputs of recomputed blocks.

    def of_rule(self, kind: UpdateKind) -> tuple[int, ...]:
        """Return the bytes per element of each state of the rule that updates some parameters."""
        return dict(self.rules).get(kind, self.rule)


def states_of(config: Config, own: bool = True) -> States:
    """Return the states of a config as Meshwright stores them.

    Other programs (not `own`) store whole masters in addition to the weights.
    """
    precision, master, rules = config.train.precision_facts, config.optimizer.master_dtype, rules_of(config.optimizer)
    all_rules = [rule for group in rules for rule in group if rule is not None]
    fused = all(rule.has_kernel for rule in all_rules) and not config.optimizer.ema
    param = precision.bytes

    def wide(name: str) -> int:
        return max(BYTES.get(name, 4), 8 if precision.is_double else 0)

    def kept(rule: Rule) -> tuple[int, ...]:
        own = tuple(wide("fp32" if state.wide else config.optimizer.state_dtype) for state in rule.states)
        return (*own, wide("fp32")) if config.optimizer.ema else own

    offload = config.zero.offload
    has_master = param < 4 and BYTES[master] > param
    paired = own and has_master and precision.cuts_fp32 and set(offload.places) == {Place.DEVICE}
    master_bytes = 2 if paired else wide(master)
    return States(
        param=param, grad=wide(config.train.grad_dtype), master=master_bytes if has_master else 0,
        rule=kept(rules[0].elements), fused=fused, paired=paired,
        rules=tuple(
            (UpdateKind(number, rule is group.matrices), kept(rule))
            for number, group in enumerate(rules) for rule in group if rule not in (None, rules[0].elements)
        ),
        optimizer_at=offload.optimizer_at, params_at=offload.params_at,
    )  # fmt: skip


@dataclass(frozen=True)
class Stack:
    """The properties of a training program. `hide_*` are the shares of the time that can be hidden at best."""

    name: str
    about: str
    fused_attention: bool
    attention: float  # Speed of its attention core, relative to the device's own figure.
    passes: float  # Memory passes of elementwise work; 1 is one read and one write per operation.
    accumulate: float  # Bytes per parameter and micro-batch moved by accumulating a weight gradient.
    kernel_us: float  # Host time to launch one kernel. A layer can't be faster than its launches.
    hide_tp: float  # Of tp collectives, behind products.
    hide_dp: float  # Of gradient reductions and parameter gathers, behind compute.
    hide_pp: float  # Of sends between stages.
    gathers: int  # Collectives per sharded layer: one for a flat buffer, or one per weight.
    contention: float  # Share of the hidden time by which communication slows concurrent compute.
    scatter_sends: bool  # Each tp rank sends only its 1/t of the activations to the next stage.
    selective: float  # Share of a block's linear products that "selective" recomputes.
    selective_core: bool  # Whether "selective" recomputes the attention core.
    logit_bytes: float  # Bytes per logit at the peak of the loss.
    gate_copies: float  # Tensors of the MLP's width that a gated activation saves for backward.
    base_gib: float  # Context and communication buffers, outside the allocator.
    cache: float  # Ratio of reserved to allocated memory, for activations.
    own: bool = False  # True for Meshwright itself.
    compiled: bool = False  # True if its blocks are compiled.
    update_waits: bool = True  # Every rank waits for the gradient norm of all stages before its update.
    states: States | None = None  # The states that it stores, if they differ from Meshwright's.

    def kernels(self, host: bool = False, pieces: int = 1, fp8: bool = False) -> Kernels:
        """Return the properties of its kernels. `host` means on a CPU; `pieces` is the number of chunks of our MLPs."""
        if self.own:
            return Kernels(fused=self.compiled, host=host, pieces=pieces, fp8=fp8)
        return Kernels(
            fused_attention=self.fused_attention, gate_copies=self.gate_copies, keeps_rotation=self.gate_copies > 3,
            mask_bytes=1.0, logit_bytes=self.logit_bytes, own=False,
        )  # fmt: skip


def _load() -> dict[str, Stack]:
    """Return all stacks by name: those of other programs from stacks.yaml, and our own, which are derived from them."""
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
    # A CPU's rates are measured with its blocks as they run, so it takes the figures of `compiled` unchanged.
    cpu = replace(compiled, name="cpu", about="Meshwright on a CPU, as its profile was measured", compiled=False)
    return {stack.name: stack for stack in (compiled, eager, cpu)} | others


STACKS = _load()
COMPILED, EAGER, CPU = STACKS["compiled"], STACKS["eager"], STACKS["cpu"]


def own_stack(config: Config, host: bool = False) -> Stack:
    """Return Meshwright's stack for this config on an accelerator, or on a CPU, which compiles only on request."""
    if host:
        return replace(CPU, compiled=config.train.compiles_on_host)
    return COMPILED if config.compiles else EAGER
