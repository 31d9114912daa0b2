"""The parts of a GPT except its MLP: norm, attention, embeddings and output layer. No torch.

In the docstrings, H stands for the bytes of the activations [tokens, hidden] of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshwright.spec.layout.norms import NORMS, NormKind
from meshwright.spec.layout.params import Init, ParamRecord, rows_of, whole
from meshwright.spec.model.context import context_calls, context_saved, context_workspace
from meshwright.spec.model.linear import ONES, ZEROS, column_calls, replicated_axes, row_calls, row_records
from meshwright.spec.model.loss_pieces import tile_counts, tile_rows
from meshwright.spec.model.part import (
    Collective,
    Coordinate,
    Kernels,
    LinearPieces,
    MicroBatch,
    Part,
    Product,
    Records,
    SavedTensor,
    Work,
)

# The parts of tp if there are fewer key-value heads than tp ranks. Ranks along `KV_COPIES` hold the same heads.
KV_COPIES, KV_GROUPS = "tp.kv", "tp.q"
EMBEDDING = "embedding"  # the group of ranks that hold the tied token table
# The elements by which ALiBi widens heads: the fewest that fused kernels accept.
ALIBI_WIDTH = 8
TILE_ROWS = 256  # queries whose scores exist at once if no fused kernel supports the mask with dropout
TILE_COPIES = 5.0  # the number of tensors of the size of such a tile in backward
LOGIT_BYTES = 14.0  # bytes per logit that our loss reads and writes


@dataclass(frozen=True)
class NormPart(Part):
    """A norm over the hidden features, of a kind in `spec/layout/norms.py`."""

    kind: str
    width: int
    eps: float
    bias: bool = False
    keeps_output: bool = True  # the product after it saves the norm's output
    fuses: bool = True  # it may be fused with the product after it, if kernels do that
    of_mlp: bool = False  # an MLP follows; if that is computed in chunks, the norm is not fused

    def __post_init__(self) -> None:
        NORMS.entry(self.kind)

    @property
    def facts(self) -> NormKind:
        return NORMS[self.kind]

    def records(self, at: Coordinate, name: str) -> Records:
        shape = (self.width if self.facts.elementwise else 1,)
        records = {"weight": whole(f"{name}.weight", shape, ONES, decay=False, **replicated_axes(at))}
        if self.bias:
            records["bias"] = whole(f"{name}.bias", shape, ZEROS, decay=False, **replicated_axes(at))
        return records

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        return Work(moved=2.0 * batch.rows(at) * self.width * batch.element, kernels=2)

    def saved(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[SavedTensor]:
        """Yield the input (on a CPU: its copies in float32), each row's statistics and, if the next product saves it,
        the output."""
        rows = batch.rows(at)
        e = batch.element
        wide = batch.wide
        facts = self.facts
        stream = rows * self.width * e
        copies = facts.host_copies if kernels.host else 0
        if copies:
            yield SavedTensor("input" if e == wide else "wide input", rows * self.width * wide)
            yield SavedTensor("normed input", (copies - 1) * rows * self.width * wide)
        else:
            yield SavedTensor("input", stream)
        # CPU kernels that need no copies in accumulation precision keep statistics in the precision of the input.
        yield SavedTensor("statistics", facts.statistics * rows * (e if kernels.host and not copies else wide))
        if self.keeps_output and not self.fused_by(kernels):
            yield SavedTensor("output", stream)

    def fused_by(self, kernels: Kernels) -> bool:
        """Return whether the kernel of the product after it also computes the norm."""
        apart = not self.fuses or (self.of_mlp and kernels.pieces > 1)
        return kernels.fused and self.facts.fuses and not apart

    def workspace(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """Return the bytes of the input gradient and the normed input, which a fused RMS norm recomputes in one
        pass."""
        fused = self.fused_by(kernels) and self.keeps_output
        return 2.0 * batch.rows(at) * self.width * batch.element if fused else 0.0


def core_work(
    batch: MicroBatch, kernels: Kernels, heads: int, d: int, lengths: tuple[int, int], pairs: float, dropout: float
) -> Work:
    """Return the work of the attention core: the scores and the mix of values of `heads` heads of width `d`.

    `lengths` are the numbers of queries and of keys of a sequence. A fused kernel computes only `pairs` of their pairs.
    """
    if kernels.fused_attention:
        # Scores and mix take 4 d FLOPs for each pair of a query and a key that it sees.
        return Work(attention_flops=4.0 * batch.sequences * heads * d * pairs, kernels=10)
    count, (queries, keys) = batch.sequences * heads, lengths
    products = (
        Product("scores", queries, keys, d, count, linear=False),
        Product("mix", queries, d, keys, count, linear=False),
    )
    # The fused scale-mask-softmax kernel reads and writes once; dropout after it reads and writes, with a mask.
    passes = 2 * batch.element + ((2 * batch.element + 1) if dropout else 0)
    return Work(products, softmax=float(count * queries * keys * passes), kernels=16)


def core_saved(batch: MicroBatch, kernels: Kernels, rows: int, keys: int, dropout: float) -> SavedTensor:
    """Return the tensor that the attention core saves for `rows` rows of scores (queries times heads): the log-sum of
    each row, or all scores if the core is not fused."""
    if kernels.fused_attention:
        return SavedTensor("log-sums", rows * batch.wide, core=True)
    e = batch.element
    return SavedTensor("scores", rows * keys * (e + (e + 1 if dropout else 0)), core=True)


@dataclass(frozen=True)
class AttentionPart(Part):
    """Self-attention with grouped key-value heads, cut over tp by heads and over cp by tokens."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    init: Init
    out_init: Init
    rope: bool = False
    bias: bool = False
    qkv_bias: bool = False
    qk_norm: str = ""  # RMS norm of queries and keys over each "head", or over "all" heads of a token
    norm_eps: float = 1e-5
    dropout: float = 0.0
    alibi: bool = False  # heads are widened to carry the keys' positions
    causal: bool = True  # a token only sees tokens up to itself
    scale: float = 0.0  # the factor of the scores; 0: 1 / sqrt(head_dim)
    biased: str = ""  # the stream of the learned bias that is added to the scores, if any
    window: int = 0  # the number of tokens that a token sees, itself included; 0: all before it

    @property
    def reads(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.biased,) if self.biased else ()

    @property
    def norms_heads(self) -> bool:
        """True if each head of the queries and keys is normed."""
        return self.qk_norm == "head"

    @property
    def norms_tokens(self) -> bool:
        """True if queries and keys are normed over all heads of a token."""
        return bool(self.qk_norm) and not self.norms_heads

    @property
    def core_dim(self) -> int:
        """The width of heads in the attention core."""
        return self.head_dim + ALIBI_WIDTH * self.alibi

    def own_heads(self, at: Coordinate) -> tuple[int, int]:
        """Return the numbers of query heads and key-value heads of one tp rank."""
        tp = at.size("tp")
        return max(1, self.heads // tp), max(1, self.kv_heads // tp)

    def linears(self) -> tuple[LinearPieces, ...]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        qkv = LinearPieces("qkv", "column", (("q", q), ("k", kv), ("v", kv)))
        return qkv, LinearPieces("out", "row", (("out", self.hidden),))

    def matrices(self, by_head: bool = False) -> dict[str, tuple[int, ...]]:
        heads = (self.head_dim,) * (self.heads + 2 * self.kv_heads)
        return super().matrices() | ({"qkv.weight": heads} if by_head else {})

    def records(self, at: Coordinate, name: str) -> Records:
        d = self.head_dim
        tp = at.size("tp")
        tp_rank = at.index("tp")
        total = (self.heads + 2 * self.kv_heads) * d
        queries = self.heads // tp * d
        kv = max(1, self.kv_heads // tp) * d
        # If key-value heads are copied, this is the head tp_rank // copies.
        kv_first = tp_rank * self.kv_heads // tp * d
        k_first = self.heads * d + kv_first
        v_first = (self.heads + self.kv_heads) * d + kv_first
        q_rows = (tp_rank * queries, queries, 0)

        def cut(key: str, tail: tuple[int, ...], init: Init, decay: bool) -> Records:
            full = f"{name}.qkv.{key}"
            if tp <= self.kv_heads:
                parts = (q_rows, (k_first, kv, queries), (v_first, kv, queries + kv))
                return {f"qkv.{key}": rows_of(full, parts, total, tail, init, decay=decay)}
            # Copied key-value heads are a separate parameter, because only their gradients are summed over the copies.
            shared = (KV_COPIES,)
            kv_parts = ((k_first, kv, 0), (v_first, kv, kv))
            return {
                f"q.{key}": rows_of(full, (q_rows,), total, tail, init, decay=decay),
                f"kv.{key}": rows_of(full, kv_parts, total, tail, init, decay=decay, copies=shared, partial=shared),
            }

        records = cut("weight", (self.hidden,), self.init, True)
        if self.bias or self.qkv_bias:
            records |= cut("bias", (), ZEROS, False)
        if self.norms_heads:
            # One weight serves all heads, and each tp rank has the gradient from its heads. Each copy of a key-value
            # head has the gradient from its queries only, so the sum over tp is complete in that case too.
            axes = ("tp",) if tp > 1 else ()
            for key in ("q_norm", "k_norm"):
                weight = whole(f"{name}.{key}.weight", (d,), ONES, decay=False, copies=axes, partial=axes)
                records[f"{key}.weight"] = weight
        elif self.norms_tokens:
            # The weights are cut like the heads.
            axes = (KV_COPIES,) if tp > self.kv_heads else ()
            q = f"{name}.q_norm.weight"
            k = f"{name}.k_norm.weight"
            kv_rows = (kv_first, kv, 0)
            records["q_norm.weight"] = rows_of(q, (q_rows,), self.heads * d, (), ONES, decay=False)
            records["k_norm.weight"] = rows_of(
                k, (kv_rows,), self.kv_heads * d, (), ONES, decay=False, copies=axes, partial=axes
            )
        return records | row_records(at, name, "out", (self.hidden, self.heads * d), self.out_init, self.bias)

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        heads, kv = self.own_heads(at)
        d = self.head_dim
        tokens = batch.tokens(at)
        cp = at.size("cp")
        products = (
            Product("qkv", tokens, (heads + 2 * kv) * d, self.hidden),
            Product("out", tokens, self.hidden, heads * d, scattered=True),
        )
        rotary = 2.0 * tokens * (heads + kv) * d * batch.element if self.rope else 0.0
        pairs = self.pairs(batch.seq) * (1.0 + batch.prefix) / cp
        core = core_work(batch, kernels, heads, d, (batch.seq // cp, batch.seq), pairs, self.dropout)
        return Work(products, moved=rotary) + core

    def pairs(self, seq: int) -> float:
        """Return the number of pairs of a query and a key that it sees in a sequence; the diagonal counts half.

        These are all pairs or, in causal attention, the lower triangle without the triangle beyond the window.
        """
        if not self.causal:
            return float(seq * seq)
        beyond = max(0, seq - self.window) if self.window else 0
        return (seq * seq - beyond * beyond) / 2

    def collectives(self, at: Coordinate, batch: MicroBatch) -> Iterator[Collective]:
        (heads, kv), d = self.own_heads(at), self.head_dim
        yield from column_calls(at, batch, self.hidden, (heads + 2 * kv) * d)
        yield from row_calls(at, batch, self.hidden, heads * d)
        # The sums of squares of a token's queries and of its keys, and their gradients.
        if self.norms_tokens:
            for phase in ("forward", "backward"):
                yield Collective(phase, "tp", "all_reduce", 2 * batch.tokens(at) * batch.wide)
        yield from context_calls(at, batch, *self.own_heads(at), self.core_dim)

    def saved(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[SavedTensor]:
        """Yield queries, keys and values, the result, and the tensor that the core saves: each row's log-sum or the
        scores.

        If tp ranks share key-value heads, the weight is saved too, since it is concatenated from two parameters.
        """
        (h, k), d, tokens = self.own_heads(at), self.head_dim, batch.tokens(at)
        e, wide, host = batch.element, batch.wide, kernels.host
        if at.size("tp") > self.kv_heads:
            yield SavedTensor("joined weight", self.hidden * (h + 2 * k) * d * e)
        if self.norms_heads:
            # A CPU saves a head's input and normed input in float32, or one copy if the input is float32 already.
            copies = 0
            if host:
                copies = 1 if e >= 4 else 2
            yield SavedTensor("head norms", tokens * (h + k) * (copies * d * wide + wide))
        elif self.norms_tokens:
            yield SavedTensor("token norms", 2 * tokens * wide)
        yield SavedTensor("attention output", tokens * h * d * e)
        # A CPU has no fused kernel with a bias: it saves copies in float32 and tensors of scores.
        if host and self.biased:
            yield SavedTensor("qkv", tokens * (h + 2 * k) * d * e)
            yield SavedTensor("wide qkv", tokens * (h + 2 * k) * d * (wide - e), core=True)
            yield SavedTensor("scores", (3 if self.dropout else 1) * tokens * h * batch.seq * wide, core=True)
            return
        if self.alibi:
            yield SavedTensor("wider attention output", tokens * h * self.core_dim * e, core=True)
        yield SavedTensor("qkv", tokens * (h + 2 * k) * self.core_dim * e)
        # The fused rotation works on one tensor, which attention saves anyway.
        rotates_in_place = kernels.fused and not self.qk_norm
        if self.rope and kernels.keeps_rotation and not rotates_in_place:
            yield SavedTensor("rotated", tokens * (h + k) * d * e)
        if kernels.own and at.size("cp") > 1:
            yield from context_saved(at, batch, h, k, self.core_dim)
            return
        if not (kernels.fused_attention and self._in_tiles(batch, host)):
            yield core_saved(batch, kernels, tokens * h, batch.seq, self.dropout)

    def workspace(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        if kernels.own and at.size("cp") > 1:
            return context_workspace(at, batch, *self.own_heads(at), self.core_dim, bool(self.window))
        if kernels.own and kernels.fused_attention and self._in_tiles(batch, kernels.host):
            tile = float(batch.sequences * min(TILE_ROWS, batch.seq) * batch.seq)
            if not kernels.host:
                # Only the mask is materialised. The kernel adds it to scores that never leave the kernel.
                return 2 * tile * batch.element
            return TILE_COPIES * tile * self.own_heads(at)[0] * batch.wide
        return 0.0

    def core_backward(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """Return the bytes of the gradients of the core's result, queries, keys and values, and the workspace of an
        accelerator's kernel that computes them."""
        one_kernel = kernels.own and kernels.fused_attention and not kernels.host and batch.element == 2
        if not one_kernel or self.biased or at.size("cp") > 1 or self._in_tiles(batch, False):
            return 0.0
        (heads, kv), tokens = self.own_heads(at), batch.tokens(at)
        gradients = tokens * 2 * (heads + kv) * self.core_dim * batch.element
        return float(gradients + kernel_workspace(tokens, heads, kv, self.core_dim, batch.element))

    def _in_tiles(self, batch: MicroBatch, host: bool) -> bool:
        """Return whether the core processes one tile of queries at a time, because no fused kernel supports dropout on
        this device or with this mask."""
        masked = self.causal and (batch.documents or self.window > 0)
        return bool(self.dropout) and not self.biased and (host or masked)


def kernel_workspace(tokens: int, heads: int, kv_heads: int, width: int, element: int) -> int:
    """Return the bytes of workspace that the backward of cuDNN's and flash attention allocates.

    It holds the queries' gradient and one number per row in float32. If several query heads share a key-value head, it
    also holds a key gradient and a value gradient per query head.
    """
    shared = 2 * element if kv_heads < heads else 0
    return tokens * heads * (width * (4 + shared) + 4)


def vocabulary_rows(vocab: int, at: Coordinate) -> int:
    """Return the number of rows of the vocabulary on a rank. The vocabulary is padded until tp divides it."""
    return -(-vocab // at.size("tp"))


def vocabulary_record(at: Coordinate, name: str, sizes: tuple[int, ...], init: Init, tied: bool = False) -> ParamRecord:
    """Return the record of a table [vocabulary, hidden] or a bias [vocabulary] that is cut over tp by rows.

    If it is tied across stages, each end of the tie holds a copy.
    """
    vocab, *tail = sizes
    rows = vocabulary_rows(vocab, at)
    first = at.index("tp") * rows
    held = max(0, min(rows, vocab - first))
    axes = ("embedding",) if tied and at.size("embedding") > 1 else ()
    return rows_of(
        name, ((first, held, 0),), vocab, tuple(tail), init, rows, decay=bool(tail), partial=axes, copies=axes,
        tied=name if tied else "",
    )  # fmt: skip


@dataclass(frozen=True)
class TokenEmbeddingPart(Part):
    """The token embedding. tp ranks hold different rows of the vocabulary, so looked-up rows are summed over them.

    Plain: forward 1 all_reduce of H. Split tokens: forward 1 reduce_scatter, backward 1 all_gather of H.
    """

    vocab: int
    hidden: int
    init: Init
    tied: bool = False
    dropout: float = 0.0
    grad_share: float = 1.0  # the fraction of the gradient of looked-up rows that is added to the table's gradient

    @property
    def group(self) -> str:  # type: ignore[override]
        return EMBEDDING if self.tied else ""

    def records(self, at: Coordinate, name: str) -> Records:
        weight = vocabulary_record(at, f"{name}.weight", (self.vocab, self.hidden), self.init, self.tied)
        return {"weight": weight}

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        return Work(moved=float(batch.tokens(at) * self.hidden * batch.element * 4), kernels=4)

    def collectives(self, at: Coordinate, batch: MicroBatch) -> Iterable[Collective]:
        return row_calls(at.at_once, batch, self.hidden, 0)

    def saved(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[SavedTensor]:
        """Yield the numbers of the looked-up rows, if tp cuts the table, and the dropout mask.

        The ids belong to the batch. Other programs save the result in addition to the first block's input.
        """
        if not kernels.own:
            yield SavedTensor("output", batch.rows(at) * self.hidden * batch.element)
        if at.size("tp") > 1:
            yield SavedTensor("rows", batch.tokens(at) * 9)
        if self.dropout:
            yield SavedTensor("dropout mask", batch.rows(at) * self.hidden * (kernels.mask_bytes or batch.element))

    def factors(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """Return the bytes of the row numbers and the gradients of the looked-up rows."""
        return float(batch.tokens(at) * (self.hidden * batch.element + 8))


@dataclass(frozen=True)
class PositionEmbeddingPart(Part):
    """Learned positions; every tp rank holds the whole table. The first position uses row `offset` of the table."""

    positions: int
    hidden: int
    init: Init
    offset: int = 0

    def records(self, at: Coordinate, name: str) -> Records:
        shape = (self.offset + self.positions, self.hidden)
        return {"weight": whole(f"{name}.weight", shape, self.init, **replicated_axes(at))}

    def saved(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[SavedTensor]:
        yield SavedTensor("positions", batch.rows(at) * 8)

    def factors(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        return second_table_factors(at, batch, kernels, self.hidden)


def second_table_factors(at: Coordinate, batch: MicroBatch, kernels: Kernels, hidden: int) -> float:
    """Return the bytes of the row numbers and gradients of a table whose result is added to the token embedding.

    The two tables share the gradients, unless these were copied or gathered for one of them.
    """
    own = hidden * batch.element if kernels.fused or at.splits_tokens else 0
    return float(batch.rows(at) * (own + 8))


@dataclass(frozen=True)
class OutputLayerPart(Part):
    """The output layer, a product cut over the vocabulary, and the cross entropy.

    Their gradients are computed in forward, one tile of logits at a time. `bias` is the global name of its bias, or
    empty if it has none. `scale` multiplies its input.
    """

    vocab: int
    hidden: int
    init: Init
    tied: bool = False
    bias: str = ""
    scale: float = 1.0

    @property
    def group(self) -> str:  # type: ignore[override]
        return EMBEDDING if self.tied else ""

    def records(self, at: Coordinate, name: str) -> Records:
        weight = vocabulary_record(at, f"{name}.weight", (self.vocab, self.hidden), self.init, self.tied)
        bias = {"bias": vocabulary_record(at, self.bias, (self.vocab,), ZEROS)} if self.bias else {}
        return {"weight": weight} | bias

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        """Return the work of the product and the loss.

        Losses of other programs are assumed to move as many bytes per logit as they hold at their peak.
        """
        tokens = batch.tokens(at)
        columns = vocabulary_rows(self.vocab, at)
        product = Product("logits", tokens, columns, self.hidden, precise=True, defers=False)
        return Work((product,), moved=tokens * columns * (kernels.logit_bytes or LOGIT_BYTES), kernels=6)

    def collectives(self, at: Coordinate, batch: MicroBatch) -> Iterator[Collective]:
        """Yield the calls of a column product whose input is not gathered again, since its gradients are computed in
        forward.

        In forward, the loss of each tile of C tokens takes the maximum of the ranks' log-sums and then the sums of two
        numbers: 1 all_reduce of C w and 1 of 2 C w bytes, where w is 8 in fp64 and otherwise 4.
        """
        calls = column_calls(at.at_once, batch, self.hidden, 0)
        yield from (call for call in calls if not call.repeated)
        for rows, times in tile_counts(batch.tokens(at), vocabulary_rows(self.vocab, at)):
            yield Collective("forward", "tp", "all_reduce", rows * batch.wide, times)
            yield Collective("forward", "tp", "all_reduce", 2 * rows * batch.wide, times)

    def saved(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[SavedTensor]:
        """Yield the input gradient, which the loss computes in forward.

        If the embedding on this stage has the same weight, the weight gradient is saved too, because the embedding adds
        to the same gradient later.
        """
        if not kernels.own:
            return
        bias_gradient = vocabulary_rows(self.vocab, at) * batch.wide if self.bias else 0
        yield SavedTensor("input gradient", batch.tokens(at) * self.hidden * batch.element + bias_gradient)
        if self.tied and at.size("embedding") == 1:
            yield SavedTensor("weight gradient", vocabulary_rows(self.vocab, at) * self.hidden * batch.wide)

    def workspace(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """Return the bytes of one tile of logits, which a CPU also holds in float32. For other programs, return the
        bytes of all logits."""
        tokens = batch.tokens(at)
        columns = vocabulary_rows(self.vocab, at)
        if kernels.logit_bytes:
            return tokens * columns * kernels.logit_bytes + batch.rows(at) * self.hidden * batch.element
        logit_bytes = batch.element + (batch.wide if kernels.host else 0)
        return float(tile_rows(tokens, columns) * columns * logit_bytes)
