"""What our own layers keep for backward, tensor by tensor, and how much of it is alive at once on a rank. No torch.

Blocks as they run uncompiled; a compiler keeps less, by its own choice. The letters: T tokens of a micro-batch, R the
rows of them that a rank holds between the products (T / tp under sequence parallelism), e bytes of an element, and
w bytes of what is summed in (4, or 8 in fp64). H and K are the rank's query and key-value heads, d their size, f its
part of the MLP's inner width.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.config.sections import Config, ModelConfig
from meshwright.layout.chunks import chunk_rows
from meshwright.models.description import fields_read
from meshwright.pipeline.schedules import computes
from meshwright.pipeline.table import Op
from meshwright.plan.communication import Job


@dataclass(frozen=True)
class Sizes:
    """The letters, of one rank. `host`: the CPU's kernels keep other things than an accelerator's."""

    model: ModelConfig
    tokens: int
    rows: int
    tp: int
    element: int
    host: bool
    shared_ends: bool = False  # the output layer's weight is the embedding's, and both are here
    scores: int = 0  # of a mask of documents, which every layer keeps as numbers to add: batch x seq x seq

    @property
    def wide(self) -> int:
        return max(4, self.element)

    @property
    def stream(self) -> int:
        """One tensor of the residual stream: R h e."""
        return self.rows * self.model.hidden * self.element

    @property
    def heads(self) -> int:
        return self.model.heads // self.tp

    @property
    def kv_heads(self) -> int:
        return max(1, self.model.kv_heads // self.tp)


def sizes_of(job: Job) -> Sizes:
    c = job.config
    rows = job.tokens // (job.layout.tp if job.splits_tokens else 1)
    scores = c.train.micro_batch * c.model.seq**2 if c.data.reset_attention else 0
    shared = c.model.tied_embeddings and job.layout.pp == 1
    host = c.run.device == "cpu"
    return Sizes(c.model, job.tokens, rows, job.layout.tp, job.activation_bytes, host, shared, scores)


def norm_kept(s: Sizes) -> int:
    """A norm's own: its input, or what it makes of that in float32, and each row's scale."""
    if s.model.norm == "layernorm":
        return s.stream + 2 * s.rows * (s.element if s.host else s.wide)
    if not s.host:
        return s.stream + s.rows * s.wide
    return 2 * s.rows * s.model.hidden * s.wide + s.rows * s.wide  # the input and the normed input, both wide


def keeps_input(s: Sizes) -> bool:
    """Whether a block's norms keep its input itself."""
    return s.model.norm == "layernorm" or not s.host or s.element >= 4


def attention_kept(s: Sizes, selective: bool) -> int:
    """Queries, keys and values (turned ones are copies), the result and each row's log-sum. With dropout the CPU has no
    fused kernel: then wide copies, and three tensors of scores. Where tp ranks share key-value heads, also the weights,
    which are put together from two parameters."""
    m, (h, k), d = s.model, (s.heads, s.kv_heads), s.model.head_dim
    joined = m.hidden * (h + 2 * k) * d * s.element if s.tp > m.kv_heads else 0
    qkv = s.tokens * (h + 2 * k) * d * s.element + joined
    turned = s.tokens * (h + k) * d * s.element if m.position == "rope" else 0
    result = s.tokens * h * d * s.element
    copies = 0 if not s.host else 1 if s.element >= 4 else 2  # of a head's input and normed input; each row's scale
    normed = s.tokens * (h + k) * (copies * d * s.wide + s.wide) if m.qk_norm else 0
    if selective:
        return qkv + turned + normed + result
    if s.host and m.dropout:
        scores = s.tokens * h * m.seq * s.wide
        return s.tokens * (h + 2 * k) * d * s.wide + 3 * scores + result + normed + joined
    sums = s.tokens * h * s.wide
    return qkv + turned + normed + result + sums + s.scores * s.element


def mlp_kept(s: Sizes) -> int:
    """SwiGLU: both halves, the gate's activation and the product. Others: before and after, which is one for ReLU."""
    inner = s.tokens * (s.model.ffn // s.tp) * s.element
    return inner * {"swiglu": 4, "relu": 1}.get(s.model.mlp, 2)


def block_kept(s: Sizes, selective: bool = False) -> int:
    """Two norms with their outputs, attention, MLP, and the masks of dropout."""
    norms = 2 * (norm_kept(s) + s.stream)
    if s.model.parallel_residual and keeps_input(s):
        norms -= s.stream  # both norms have one input
    drops = 2 * s.stream if s.model.dropout else 0
    return norms + attention_kept(s, selective) + mlp_kept(s) + drops


def embedding_kept(s: Sizes, fields: int) -> int:
    """The batch, in which the ids are that rows were looked up by; a norm and a mask of dropout, if there are."""
    ids = s.tokens * 8 * fields + (s.tokens * 9 if s.tp > 1 else 0)
    ids += s.tokens * 8 if s.model.position == "learned" else 0
    norm = norm_kept(s) if s.model.embedding_norm else 0
    return ids + norm + (s.stream if s.model.dropout else 0)


def head_kept(s: Sizes) -> int:
    """The last norm, the gradient of its output, which the loss makes in forward, and, if the embedding has the same
    weight, its gradient."""
    weight = -(-s.model.vocab // s.tp) * s.model.hidden * s.wide if s.shared_ends else 0
    return norm_kept(s) + s.tokens * s.model.hidden * s.element + weight


def activations(config: Config, job: Job, pp_rank: int) -> int:
    """The most bytes that are kept for backward at once on a rank, following the rank's list of the schedule."""
    s, together = sizes_of(job), config.recompute.blocks
    block = block_kept(s, config.recompute.mode == "selective")
    kept, heads, again = [], [], []
    held = job.held(pp_rank)
    fields = sum(len(fields_read(stage) & set(job.fields)) for stage in held if stage.first or stage.last)
    for stage in held:
        count = len(stage.layers)
        runs = -(-count // together) if together else 0
        inside = runs * s.stream if together else count * block
        inside += embedding_kept(s, fields) if stage.first else 0
        inside += s.scores if count else 0  # the mask itself, one byte each
        head = head_kept(s) if stage.last else 0
        # A run's input is kept already; its first norm keeps the same tensor.
        working = min(together, count) * block - (s.stream if keeps_input(s) else 0) if runs else 0
        kept.append(inside + head)
        heads.append(head)
        again.append(max(0, working))
    c = config.layout
    alive = peak = 0
    for action in computes(config.pipeline.schedule, c.pp, job.micro_batches, c.chunks, pp_rank):
        if action.op is Op.FORWARD:
            alive += kept[action.chunk]
            peak = max(peak, alive)
        else:
            peak = max(peak, alive - heads[action.chunk] + again[action.chunk])
            alive -= kept[action.chunk]
    return peak + sum(alibi_kept(s) for stage in held if stage.layers)


def alibi_kept(s: Sizes) -> int:
    """What ALiBi adds to the scores of a sequence: one for all layers and micro-batches of a chunk."""
    return s.heads * s.model.seq**2 * s.element if s.model.position == "alibi" else 0


def rows_grad(job: Job, pp_rank: int) -> int:
    """The embedding's gradient as a whole tensor, which is made for a moment where gradients are not summed in fp32."""
    s = sizes_of(job)
    whole = job.config.train.grad_dtype != "fp32" and any(stage.first for stage in job.held(pp_rank))
    return -(-s.model.vocab // s.tp) * s.model.hidden * s.element if whole else 0


def passing(config: Config, job: Job, pp_rank: int) -> int:
    """What a block's backward, or the loss, needs for a moment beside what is kept: gradients of its widest tensors."""
    s = sizes_of(job)
    inner = s.tokens * (s.model.ffn // s.tp) * s.element
    block = inner * (5 if s.model.mlp == "swiglu" else 2) + 3 * s.tokens * s.model.hidden * s.element
    loss = 0
    if any(stage.last for stage in job.held(pp_rank)):
        vocab = -(-s.model.vocab // s.tp)
        loss = chunk_rows(s.tokens, vocab) * vocab * (s.element + (s.wide if s.host else 0))
    return max(block, loss)
