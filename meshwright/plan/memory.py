"""Bytes on one rank in a step, by kind: states from the layout and the ZeRO stage, activations by tensor. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from meshwright.config.sections import ModelConfig
from meshwright.layout.chunks import chunk_rows
from meshwright.plan.cluster import Cluster
from meshwright.plan.flops import Cut, embedding_params, head_params, layer_params, recomputed_run
from meshwright.plan.stack import EAGER, OWN, Stack
from meshwright.plan.workload import Workload

GIB = 2**30
LIVE, BUCKET = 1e9, 5e8  # DeepSpeed's stage3_max_live_parameters and reduce_bucket_size
COMMUNICATOR_GIB = 0.8  # NCCL's buffers of all channels, for each axis that communicates
PROGRAM_GIB = 0.5  # Python and torch in a process without an accelerator
FUSED_LOGIT_BYTES = 0.25  # a loss that makes its logits in pieces holds a small part of them at once


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. `peak` is the most that is allocated at once in a step, the others what each kind takes."""

    pp_rank: int
    parameters: float
    gradients: float
    master: float
    optimizer: float
    activations: float  # of all micro-batches in flight
    buffers: float  # gathered layers, pieces in flight, what one block needs while it is run again
    peak: float

    @property
    def states(self) -> float:
        return self.parameters + self.gradients + self.master + self.optimizer


@lru_cache(maxsize=20_000)
def block_tensors(
    model: ModelConfig, cut: Cut, fused_attention: bool, gate_copies: float, mask_bytes: float = 1.0
) -> dict[str, float]:
    """What backward of one block needs, in bytes, by tensor (nothing recomputed)."""
    t, e, rows = cut.tp, cut.element, cut.tokens / cut.token_cut
    heads, kv = max(1, model.heads // t), max(1, model.kv_heads // t)
    d, h, f = model.head_dim, model.hidden, model.ffn / t
    tensors = {
        "norm inputs": 2 * rows * h * e,
        "norm outputs": 2 * rows * h * e,
        "qkv": cut.tokens * (heads + 2 * kv) * d * e,
        "attention output": cut.tokens * heads * d * e,
        "mlp": cut.tokens * f * e * (gate_copies if model.mlp == "swiglu" else 2),
    }
    if model.dropout:
        tensors["dropout masks"] = 2 * rows * h * mask_bytes
    if model.position == "rope" and gate_copies > 3:
        tensors["rotated"] = cut.tokens * (heads + kv) * d * e  # eager kernels keep both sides of the rotation
    if fused_attention:
        tensors["log-sums"] = 4.0 * cut.micro_batch * heads * (model.seq / cut.cp)
    else:
        scores = cut.micro_batch * heads * (model.seq / cut.cp) * model.seq
        tensors["attention scores"] = scores * (e + (e + 1 if model.dropout else 0))
    return tensors


def block_saved(w: Workload, stack: Stack, cut: Cut) -> tuple[float, float]:
    """(bytes that a block keeps for each micro-batch in flight, bytes it needs while its backward runs)."""
    tensors = block_tensors(w.model, cut, stack.fused_attention, stack.gate_copies, mask_bytes(w, stack))
    core = "log-sums" if stack.fused_attention else "attention scores"
    if w.documents:  # a mask, as numbers to add to the scores
        tensors = tensors | {core: tensors[core] + cut.micro_batch * w.model.seq**2 * cut.element}
    everything = sum(tensors.values())
    whole_input = cut.tokens / cut.token_cut * w.model.hidden * cut.element
    if w.recompute == "none":
        return everything, 0.0
    if w.recompute == "core" or (w.recompute == "selective" and not stack.fused_attention):
        return everything - tensors[core], tensors[core]
    if w.recompute == "selective":
        if not stack.selective:
            return everything, 0.0
        # The block's input, the attention's output and every second product's result are kept.
        results = cut.tokens * (2 * w.model.hidden / cut.token_cut + up_width(w.model) / cut.tp) * cut.element
        results += tensors["qkv"]
        kept = whole_input + tensors["attention output"] + stack.selective * results
        return kept, everything - kept
    together = recomputed_run(w.recompute)
    return whole_input / together, together * everything


def mask_bytes(w: Workload, stack: Stack) -> float:
    """Of an element of a mask of dropout: without a kernel of its own it is a factor like any other."""
    return w.activation_bytes if stack.name == EAGER.name else 1.0


def up_width(model: ModelConfig) -> int:
    return 2 * model.ffn if model.mlp == "swiglu" else model.ffn


def in_flight(w: Workload, pp_rank: int) -> float:
    """Micro-batches of a rank's whole share whose activations are alive at once, by the schedule's closed formula."""
    p, m = w.parallel, w.micro_batches
    if p.schedule == "gpipe":
        return float(m)
    if p.chunks == 1:
        return float(min(m, p.pp - pp_rank))
    warm = 2 * (p.pp - pp_rank - 1) + (p.chunks - 1) * p.pp + 1
    return min(m * p.chunks, warm) / p.chunks


def memory_of(w: Workload, stack: Stack, pp_rank: int) -> Memory:
    """One rank of a pipeline stage."""
    p, s, model = w.parallel, w.states, w.model
    shard = p.shard_ranks
    layers = sum(w.stage_layers[pp_rank])
    layer = layer_params(model, p.tp)
    params = layer * layers
    if pp_rank == 0:
        params += embedding_params(model, p.tp)
    if pp_rank == p.pp - 1:
        params += head_params(model, p.tp)
        if model.tied_embeddings and p.pp == 1:
            params -= -(-model.vocab // p.tp) * model.hidden
    own = params / shard
    parameters = (own if p.zero == 3 else params) * s.param if s.keeps_param or p.zero < 2 else 0.0
    if p.zero == 2 and not s.keeps_param:
        parameters = params * s.param
    gradients = (own if p.zero >= 2 else params) * (s.grad + s.grad_copy)
    gradients += (own if p.zero >= 1 else params) * s.step_copy
    master = (own if p.zero >= 1 else params) * s.master
    optimizer = (own if p.zero >= 1 else params) * s.moment * s.moments
    if s.optimizer_on != "device":
        master = optimizer = 0.0
        if s.buckets and p.zero >= 2:
            gradients = own * s.param  # DeepSpeed's go to the host as they are
    if s.params_on != "device" and p.zero == 3:
        parameters = 0.0
    buffers = gathered_bytes(w, params, layer, params - layer * layers)
    return _with_activations(w, stack, pp_rank, (parameters, gradients, master, optimizer), buffers)


def gathered_bytes(w: Workload, params: float, layer: float, ends: float) -> float:
    """What is gathered or reduced at once: two layers and one layer's gradient, or a program's fixed buckets."""
    s, zero = w.states, w.parallel.zero
    if s.buckets and zero == 3:
        # DeepSpeed's defaults: 1e9 live parameters, 5e8 gradients in a bucket; both ends and a gradient are live too.
        return (min(params, LIVE) + min(params, BUCKET)) * s.param + 1.5 * ends * s.param
    if s.buckets and zero:
        return 2 * min(params, BUCKET) * s.param
    if zero == 3:
        return 2 * layer * s.param + layer * s.grad + ends * s.param
    return 2 * layer * s.grad if zero == 2 else 0.0


def _with_activations(
    w: Workload, stack: Stack, pp_rank: int, states: tuple[float, float, float, float], buffers: float
) -> Memory:
    p, model = w.parallel, w.model
    cut = Cut(w.micro_batch, w.rank_tokens, p.tp, p.cp, p.sequence_parallel, w.activation_bytes)
    saved, working = block_saved(w, stack, cut)
    layers = sum(w.stage_layers[pp_rank])
    flying = in_flight(w, pp_rank)
    activations = layers * saved * flying if w.states.checkpoints_on == "device" else 0.0
    hidden = cut.tokens / cut.token_cut * model.hidden * cut.element
    if pp_rank == 0:
        activations += flying * hidden * (1.0 + (mask_bytes(w, stack) / cut.element if model.dropout else 0.0))
    if w.documents:
        activations += flying * cut.micro_batch * model.seq**2  # the mask itself
    loss = 0.0
    if pp_rank == p.pp - 1:
        columns = -(-model.vocab // p.tp)
        if w.own_loss and stack.name in (OWN, EAGER.name):
            loss = chunk_rows(cut.tokens, columns) * columns * cut.element + 2 * hidden
            if model.tied_embeddings and p.pp == 1:  # the weight's gradient waits for the embedding's
                activations += flying * columns * model.hidden * max(4.0, cut.element)
        else:
            each = FUSED_LOGIT_BYTES if w.fused_loss else stack.logit_bytes
            loss = cut.tokens * columns * each + 2 * hidden
    if p.pp > 1:
        buffers += 4 * cut.tokens * model.hidden * cut.element / cut.token_cut
    if p.sequence_parallel:
        working += 2 * cut.tokens * model.hidden * cut.element  # gathered inputs of a column product, and a gradient
    # The loss's peak comes before the first backward, so it and a block that is run again never meet.
    transient = max(loss, working)
    peak = sum(states) + activations + buffers + transient
    return Memory(pp_rank, *states, activations, buffers + transient, peak)


def largest(w: Workload, stack: Stack) -> Memory:
    """The pipeline rank with the highest peak: where the others hold as many layers, one of the ends or the second."""
    inner = {sum(layers) for layers in w.stage_layers[1:-1]}
    ranks = range(w.parallel.pp) if len(inner) > 1 else sorted({0, min(1, w.parallel.pp - 1), w.parallel.pp - 1})
    return max((memory_of(w, stack, rank) for rank in ranks), key=lambda memory: memory.peak)


def reserved_gib(memory: Memory, stack: Stack) -> float:
    """What the allocator holds at that peak: activations come and go in many sizes and leave gaps."""
    return (memory.states + stack.cache * (memory.peak - memory.states)) / GIB


def peak_gib(w: Workload, stack: Stack, cluster: Cluster) -> float:
    """GiB of the device that a step needs, with the context and communication buffers."""
    return reserved_gib(largest(w, stack), stack) + context_gib(w, stack, cluster)


def context_gib(w: Workload, stack: Stack, cluster: Cluster) -> float:
    """What lies beside the allocator's memory: context and communication buffers; on a processor, the program."""
    if cluster.device.units == 1:
        return PROGRAM_GIB
    p = w.parallel
    axes = sum(size > 1 for size in (p.tp, p.pp, p.dp * p.cp))
    return stack.base_gib + COMMUNICATOR_GIB * axes


def fits(w: Workload, stack: Stack, cluster: Cluster) -> bool:
    return peak_gib(w, stack, cluster) <= cluster.device.memory_gib
