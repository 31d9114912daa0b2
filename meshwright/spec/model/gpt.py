"""The parts of a GPT: norm, attention, MLP, embeddings and output layer, each with all that is known of it. No torch.

In the docstrings, H stands for the bytes of the activations [tokens, hidden] of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshwright.spec.layout.norms import NORMS, NormKind
from meshwright.spec.layout.params import Init, ParamRecord, rows_of, whole
from meshwright.spec.model.context import context_calls, context_kept, context_working
from meshwright.spec.model.linear import ONES, ZEROS, column_calls, replicated, row_calls, row_records
from meshwright.spec.model.loss_pieces import tile_counts, tile_rows
from meshwright.spec.model.part import (
    Collective,
    Coordinate,
    Kept,
    Kernels,
    LinearPieces,
    MicroBatch,
    Part,
    Product,
    Records,
    Work,
)

# Factors of tp where there are fewer key-value heads than tp ranks: ranks along `KV_COPIES` hold the same heads.
KV_COPIES, KV_GROUPS = "tp.kv", "tp.q"
EMBEDDING = "embedding"  # the ranks that hold the table of tokens, where it is tied
ALIBI_WIDTH = 8  # elements by which ALiBi widens heads: as few as fused kernels take
TILE_ROWS = 256  # queries whose scores exist at once where no fused kernel knows dropout
TILE_COPIES = 5.0  # tensors of their size in backward
LOGIT_BYTES = 14.0  # bytes per logit that our own loss reads and writes


@dataclass(frozen=True)
class NormPart(Part):
    """A norm over the hidden features, of a kind in `spec/layout/norms.py`. `keeps_output`: the product after it
    keeps the norm's output."""

    kind: str
    width: int
    eps: float
    bias: bool = False
    keeps_output: bool = True
    fuses: bool = True  # with the product after it, where kernels do that
    of_mlp: bool = False  # the MLP after it may be computed in chunks, and then it is computed apart

    def __post_init__(self) -> None:
        NORMS.named(self.kind)

    @property
    def facts(self) -> NormKind:
        return NORMS[self.kind]

    def records(self, at: Coordinate, name: str) -> Records:
        shape = (self.width if self.facts.elementwise else 1,)
        records = {"weight": whole(f"{name}.weight", shape, ONES, decay=False, **replicated(at))}
        if self.bias:
            records["bias"] = whole(f"{name}.bias", shape, ZEROS, decay=False, **replicated(at))
        return records

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        return Work(moved=2.0 * batch.rows(at) * self.width * batch.element, kernels=2)

    def kept(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[Kept]:
        """Yield the input (on a CPU: its copies in float32) and each row's statistics."""
        rows, e, wide, facts = batch.rows(at), batch.element, batch.wide, self.facts
        stream, copies = rows * self.width * e, facts.host_copies if kernels.host else 0
        if copies:
            yield Kept("input" if e == wide else "wide input", rows * self.width * wide)
            yield Kept("normed input", (copies - 1) * rows * self.width * wide)
        else:
            yield Kept("input", stream)
        # A CPU's kernel that needs no wide copies keeps its statistics in the precision of its input.
        yield Kept("statistics", facts.statistics * rows * (e if kernels.host and not copies else wide))
        if self.keeps_output and not self.fused_by(kernels):
            yield Kept("output", stream)

    def fused_by(self, kernels: Kernels) -> bool:
        """Whether the product after it computes it."""
        apart = not self.fuses or (self.of_mlp and kernels.pieces > 1)
        return kernels.fused and self.facts.fuses and not apart

    def working(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """The gradient of the input and the normed input, which a fused RMS norm makes again in one pass."""
        fused = self.fused_by(kernels) and self.keeps_output
        return 2.0 * batch.rows(at) * self.width * batch.element if fused else 0.0


def core_work(
    batch: MicroBatch, kernels: Kernels, heads: int, d: int, lengths: tuple[int, int], pairs: float, dropout: float
) -> Work:
    """Return the work of the core of attention: scores and mix of `heads`, `d` wide, for so many queries and keys
    (`lengths`) of a sequence, of which a fused kernel computes `pairs`."""
    if kernels.fused_attention:
        # Scores and mix: 4 d for each pair of a query and a key that it sees.
        return Work(attention_flops=4.0 * batch.sequences * heads * d * pairs, kernels=10)
    count, (queries, keys) = batch.sequences * heads, lengths
    products = (
        Product("scores", queries, keys, d, count, linear=False),
        Product("mix", queries, d, keys, count, linear=False),
    )
    # The fused scale-mask-softmax kernel reads and writes once; dropout after it reads and writes, with a mask.
    passes = 2 * batch.element + ((2 * batch.element + 1) if dropout else 0)
    return Work(products, softmax=float(count * queries * keys * passes), kernels=16)


def core_kept(batch: MicroBatch, kernels: Kernels, rows: int, keys: int, dropout: float) -> Kept:
    """Return what the core of attention keeps of so many `rows` of scores (queries times heads): the log-sum of each,
    or all scores."""
    if kernels.fused_attention:
        return Kept("log-sums", rows * batch.wide, core=True)
    e = batch.element
    return Kept("scores", rows * keys * (e + (e + 1 if dropout else 0)), core=True)


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
    alibi: bool = False  # whether heads are wider for the keys' positions
    causal: bool = True  # whether a token sees only those before it
    scale: float = 0.0  # of the scores; 0: 1 / sqrt(head_dim)
    biased: str = ""  # the stream that is added to the scores, a learned bias
    window: int = 0  # tokens that one sees, itself included; 0: all before it

    @property
    def reads(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.biased,) if self.biased else ()

    @property
    def core_dim(self) -> int:
        """The width of heads in the core."""
        return self.head_dim + ALIBI_WIDTH * self.alibi

    def own_heads(self, at: Coordinate) -> tuple[int, int]:
        """The query heads and key-value heads of one tp rank."""
        tp = at.size("tp")
        return max(1, self.heads // tp), max(1, self.kv_heads // tp)

    def linears(self) -> tuple[LinearPieces, ...]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        qkv = LinearPieces("qkv", "column", (("q", q), ("k", kv), ("v", kv)))
        return qkv, LinearPieces("out", "row", (("out", self.hidden),))

    def records(self, at: Coordinate, name: str) -> Records:
        d, tp, tp_rank = self.head_dim, at.size("tp"), at.index("tp")
        total, queries = (self.heads + 2 * self.kv_heads) * d, self.heads // tp * d
        kv = max(1, self.kv_heads // tp) * d
        kv_first = tp_rank * self.kv_heads // tp * d  # of copied heads: tp_rank // copies
        k_first, v_first = self.heads * d + kv_first, (self.heads + self.kv_heads) * d + kv_first
        q_rows = (tp_rank * queries, queries, 0)

        def cut(key: str, tail: tuple[int, ...], init: Init, decay: bool) -> Records:
            full = f"{name}.qkv.{key}"
            if tp <= self.kv_heads:
                parts = (q_rows, (k_first, kv, queries), (v_first, kv, queries + kv))
                return {f"qkv.{key}": rows_of(full, parts, total, tail, init, decay=decay)}
            shared = (KV_COPIES,)
            kv_parts = ((k_first, kv, 0), (v_first, kv, kv))
            return {
                f"q.{key}": rows_of(full, (q_rows,), total, tail, init, decay=decay),
                f"kv.{key}": rows_of(full, kv_parts, total, tail, init, decay=decay, copies=shared, partial=shared),
            }

        records = cut("weight", (self.hidden,), self.init, True)
        if self.bias or self.qkv_bias:
            records |= cut("bias", (), ZEROS, False)
        if self.qk_norm == "head":
            # One weight for all heads: each tp rank has the gradient of its own heads. Of copies of a key-value head,
            # each has the gradient from its own queries, so there too the sum over tp is the whole.
            axes = ("tp",) if tp > 1 else ()
            for key in ("q_norm", "k_norm"):
                weight = whole(f"{name}.{key}.weight", (d,), ONES, decay=False, copies=axes, partial=axes)
                records[f"{key}.weight"] = weight
        elif self.qk_norm:  # cut as the heads are
            axes = (KV_COPIES,) if tp > self.kv_heads else ()
            q, k, kv_rows = f"{name}.q_norm.weight", f"{name}.k_norm.weight", (kv_first, kv, 0)
            records["q_norm.weight"] = rows_of(q, (q_rows,), self.heads * d, (), ONES, decay=False)
            records["k_norm.weight"] = rows_of(
                k, (kv_rows,), self.kv_heads * d, (), ONES, decay=False, copies=axes, partial=axes
            )
        return records | row_records(at, name, "out", (self.hidden, self.heads * d), self.out_init, self.bias)

    def work(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Work:
        heads, kv = self.own_heads(at)
        d, tokens, cp = self.head_dim, batch.tokens(at), at.size("cp")
        products = (
            Product("qkv", tokens, (heads + 2 * kv) * d, self.hidden),
            Product("out", tokens, self.hidden, heads * d, scattered=True),
        )
        rotary = 2.0 * tokens * (heads + kv) * d * batch.element if self.rope else 0.0
        pairs = self.pairs(batch.seq) * (1.0 + batch.prefix) / cp
        core = core_work(batch, kernels, heads, d, (batch.seq // cp, batch.seq), pairs, self.dropout)
        return Work(products, moved=rotary) + core

    def pairs(self, seq: int) -> float:
        """Return the pairs of a query and a key in a sequence, where a diagonal counts half: all, or those of the
        lower triangle, without the triangle that lies beyond the window."""
        if not self.causal:
            return float(seq * seq)
        beyond = max(0, seq - self.window) if self.window else 0
        return (seq * seq - beyond * beyond) / 2

    def collectives(self, at: Coordinate, batch: MicroBatch) -> Iterator[Collective]:
        (heads, kv), d = self.own_heads(at), self.head_dim
        yield from column_calls(at, batch, self.hidden, (heads + 2 * kv) * d)
        yield from row_calls(at, batch, self.hidden, heads * d)
        if self.qk_norm == "all":  # the squares of a token's queries and of its keys, and their gradients
            for phase in ("forward", "backward"):
                yield Collective(phase, "tp", "all_reduce", 2 * batch.tokens(at) * batch.wide)
        yield from context_calls(at, batch, *self.own_heads(at), self.core_dim)

    def kept(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[Kept]:
        """Yield queries, keys and values, the result, and what the core keeps: each row's log-sum or the scores. Where
        tp ranks share key-value heads, the weight too, since it is concatenated from two parameters."""
        (h, k), d, tokens = self.own_heads(at), self.head_dim, batch.tokens(at)
        e, wide, host = batch.element, batch.wide, kernels.host
        if at.size("tp") > self.kv_heads:
            yield Kept("joined weight", self.hidden * (h + 2 * k) * d * e)
        if self.qk_norm == "head":
            # A CPU keeps a head's input and normed input in float32: one copy where the input is float32 already.
            copies = (1 if e >= 4 else 2) if host else 0
            yield Kept("head norms", tokens * (h + k) * (copies * d * wide + wide))
        elif self.qk_norm:
            yield Kept("token norms", 2 * tokens * wide)
        yield Kept("attention output", tokens * h * d * e)
        if host and self.biased:  # no fused kernel: copies in float32, and tensors of scores
            yield Kept("qkv", tokens * (h + 2 * k) * d * e)
            yield Kept("wide qkv", tokens * (h + 2 * k) * d * (wide - e), core=True)
            yield Kept("scores", (3 if self.dropout else 1) * tokens * h * batch.seq * wide, core=True)
            return
        if self.alibi:
            yield Kept("wider attention output", tokens * h * self.core_dim * e, core=True)
        yield Kept("qkv", tokens * (h + 2 * k) * self.core_dim * e)
        rotates_in_place = kernels.fused and not self.qk_norm  # one tensor, which attention keeps anyway
        if self.rope and kernels.keeps_rotation and not rotates_in_place:
            yield Kept("rotated", tokens * (h + k) * d * e)
        if kernels.own and at.size("cp") > 1:
            yield from context_kept(at, batch, h, k, self.core_dim)
            return
        if not (kernels.fused_attention and self._in_tiles(batch, host)):
            yield core_kept(batch, kernels, tokens * h, batch.seq, self.dropout)

    def working(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        if kernels.own and at.size("cp") > 1:
            return context_working(at, batch, *self.own_heads(at), self.core_dim, bool(self.window))
        if kernels.own and kernels.fused_attention and self._in_tiles(batch, kernels.host):
            tile = float(batch.sequences * min(TILE_ROWS, batch.seq) * batch.seq)
            if not kernels.host:
                return 2 * tile * batch.element  # a mask, which a kernel adds to the scores that it keeps to itself
            return TILE_COPIES * tile * self.own_heads(at)[0] * batch.wide
        return 0.0

    def core_backward(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """Return the bytes of the gradients of the core's result, queries, keys and values, and what an accelerator's
        kernel needs to find them."""
        one_kernel = kernels.own and kernels.fused_attention and not kernels.host and batch.element == 2
        if not one_kernel or self.biased or at.size("cp") > 1 or self._in_tiles(batch, False):
            return 0.0
        (heads, kv), tokens = self.own_heads(at), batch.tokens(at)
        gradients = tokens * 2 * (heads + kv) * self.core_dim * batch.element
        return float(gradients + kernel_workspace(tokens, heads, kv, self.core_dim, batch.element))

    def _in_tiles(self, batch: MicroBatch, host: bool) -> bool:
        """Whether rows go through the core some at a time, for want of a kernel that knows dropout."""
        masked = self.causal and (batch.documents or self.window > 0)
        return bool(self.dropout) and not self.biased and (host or masked)


def kernel_workspace(tokens: int, heads: int, kv_heads: int, width: int, element: int) -> int:
    """Return the bytes that cuDNN's and flash attention's backward allocate for themselves: the queries' gradient in
    float32 and a number for each row; where several queries share a key, its and its value's gradient for each."""
    shared = 2 * element if kv_heads < heads else 0
    return tokens * heads * (width * (4 + shared) + 4)


def vocabulary_rows(vocab: int, at: Coordinate) -> int:
    """Return the rows of the vocabulary that a rank holds; the vocabulary is padded until tp divides it."""
    return -(-vocab // at.size("tp"))


def vocabulary_record(at: Coordinate, name: str, sizes: tuple[int, ...], init: Init, tied: bool = False) -> ParamRecord:
    """Return the record of a table [vocabulary, hidden] or a bias [vocabulary] cut over tp by rows. Across stages,
    each end of a tie holds a copy."""
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
    """The token embedding. Rows of the vocabulary lie on different tp ranks, so what was looked up is summed over them.

    Plain: forward 1 all_reduce of H. Split tokens: forward 1 reduce_scatter, backward 1 all_gather of H.
    """

    vocab: int
    hidden: int
    init: Init
    tied: bool = False
    dropout: float = 0.0
    grad_share: float = 1.0  # of the gradient of what was looked up, the share that the table gets

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

    def kept(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[Kept]:
        """Yield the numbers of the rows that were looked up, where tp cuts the table, and a dropout mask. The ids
        belong to the batch. Other programs keep the result besides the first block's input."""
        if not kernels.own:
            yield Kept("output", batch.rows(at) * self.hidden * batch.element)
        if at.size("tp") > 1:
            yield Kept("rows", batch.tokens(at) * 9)
        if self.dropout:
            yield Kept("dropout mask", batch.rows(at) * self.hidden * (kernels.mask_bytes or batch.element))

    def factors(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """Return the bytes of the rows' numbers and gradients."""
        return float(batch.tokens(at) * (self.hidden * batch.element + 8))


@dataclass(frozen=True)
class PositionEmbeddingPart(Part):
    """Learned positions, held whole by every tp rank. The first position has row `offset` of the table."""

    positions: int
    hidden: int
    init: Init
    offset: int = 0

    def records(self, at: Coordinate, name: str) -> Records:
        shape = (self.offset + self.positions, self.hidden)
        return {"weight": whole(f"{name}.weight", shape, self.init, **replicated(at))}

    def kept(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[Kept]:
        yield Kept("positions", batch.rows(at) * 8)

    def factors(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        return second_table_factors(at, batch, kernels, self.hidden)


def second_table_factors(at: Coordinate, batch: MicroBatch, kernels: Kernels, hidden: int) -> float:
    """Return the bytes of the numbers and gradients of the rows of a table whose result is added to the token
    embedding's: the two share their gradients, unless these were copied or gathered for one of them."""
    own = hidden * batch.element if kernels.fused or at.splits_tokens else 0
    return float(batch.rows(at) * (own + 8))


@dataclass(frozen=True)
class OutputLayerPart(Part):
    """The output layer, a product cut over the vocabulary, and the cross entropy. Their gradients are computed in
    forward, one tile of logits at a time. `bias` is the whole name of its bias, if it has one; `scale` multiplies
    its input."""

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
        """Return the product and the loss. Other programs' losses move as many bytes per logit as they hold at their
        peak."""
        tokens, columns = batch.tokens(at), vocabulary_rows(self.vocab, at)
        product = Product("logits", tokens, columns, self.hidden, precise=True, defers=False)
        return Work((product,), moved=tokens * columns * (kernels.logit_bytes or LOGIT_BYTES), kernels=6)

    def collectives(self, at: Coordinate, batch: MicroBatch) -> Iterator[Collective]:
        """Yield the calls of a column product whose input is not gathered again, since its gradients are computed in
        forward.

        The loss takes, per tile of C tokens in forward, the largest of the ranks' log-sums and then the sums of two
        numbers: 1 all_reduce of C w and 1 of 2 C w, where w is 8 in fp64 and else 4.
        """
        calls = column_calls(at.at_once, batch, self.hidden, 0)
        yield from (call for call in calls if not call.repeated)
        for rows, times in tile_counts(batch.tokens(at), vocabulary_rows(self.vocab, at)):
            yield Collective("forward", "tp", "all_reduce", rows * batch.wide, times)
            yield Collective("forward", "tp", "all_reduce", 2 * rows * batch.wide, times)

    def kept(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> Iterator[Kept]:
        """Yield the input gradient, which the loss computes in forward. If the embedding on this stage has the same
        weight, the weight gradient is kept too, since the embedding adds to the same place later."""
        if not kernels.own:
            return
        wide = vocabulary_rows(self.vocab, at) * batch.wide if self.bias else 0  # the bias's gradient
        yield Kept("input gradient", batch.tokens(at) * self.hidden * batch.element + wide)
        if self.tied and at.size("embedding") == 1:
            yield Kept("weight gradient", vocabulary_rows(self.vocab, at) * self.hidden * batch.wide)

    def working(self, at: Coordinate, batch: MicroBatch, kernels: Kernels) -> float:
        """Return the bytes of one tile of logits, which a CPU also holds in float32; in other programs, of all
        logits."""
        tokens, columns = batch.tokens(at), vocabulary_rows(self.vocab, at)
        if kernels.logit_bytes:
            return tokens * columns * kernels.logit_bytes + batch.rows(at) * self.hidden * batch.element
        each = batch.element + (batch.wide if kernels.host else 0)
        return float(tile_rows(tokens, columns) * columns * each)
