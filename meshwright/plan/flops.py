"""What a transformer layer computes on one rank: its products (m, n, k) and the bytes its other kernels move. No torch.

A product of [m, k] with [k, n] takes 2 m n k operations. Backward takes two products of the same size, one for the
gradient of each factor. What is left are kernels that only read and write memory; they are counted in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from meshwright.config.sections import ModelConfig


@dataclass(frozen=True)
class Product:
    """`count` equal products [m, k] x [k, n] of one forward pass. `linear`: one factor is a weight."""

    name: str
    m: int
    n: int
    k: int
    count: int = 1
    linear: bool = True

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.count


@dataclass(frozen=True)
class LayerWork:
    """One rank's forward work on one layer (or on an end of the model) for one micro-batch."""

    products: tuple[Product, ...]
    attention_flops: float  # of a fused attention core, causal ones only; 0 where its products are listed
    moved: float  # bytes that elementwise kernels and norms read and write, forward
    softmax: float  # bytes that an unfused softmax reads and writes, forward
    kernels: int  # kernels launched

    @property
    def flops(self) -> float:
        return sum(product.flops for product in self.products) + self.attention_flops


@dataclass(frozen=True)
class Cut:
    """What one rank has of a layer: its tokens, and how often features and tokens are cut."""

    micro_batch: int
    tokens: int
    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    element: int = 2

    @property
    def token_cut(self) -> int:
        return self.tp if self.sequence_parallel else 1


@lru_cache(maxsize=4096)
def layer_work(model: ModelConfig, cut: Cut, fused_attention: bool) -> LayerWork:
    """Forward of one block."""
    t, tokens, e = cut.tp, cut.tokens, cut.element
    heads, kv = max(1, model.heads // t), max(1, model.kv_heads // t)
    d, h, f = model.head_dim, model.hidden, model.ffn // t
    up = 2 * f if model.mlp == "swiglu" else f
    products = [
        Product("qkv", tokens, (heads + 2 * kv) * d, h),
        Product("out", tokens, h, heads * d),
        Product("up", tokens, up, h),
        Product("down", tokens, h, f),
    ]
    attention = 0.0
    softmax = 0.0
    if fused_attention:
        attention = causal_flops(model, cut)
    else:
        s, batch = model.seq, cut.micro_batch * heads
        products += [
            Product("scores", s // cut.cp, s, d, batch, linear=False),
            Product("mix", s // cut.cp, d, s, batch, linear=False),
        ]
        # The fused scale-mask-softmax kernel reads and writes once; dropout after it reads and writes, with a mask.
        passes = 2 * e + ((2 * e + 1) if model.dropout else 0)
        softmax = float(batch * (s // cut.cp) * s * passes)
    rows = tokens / cut.token_cut
    norm = 2 * h * e  # read, write
    residual = 3 * h * e + (h if model.dropout else 0)  # read two, write one, and a mask
    activation = (up + f) * e
    rotary = 2 * (heads + kv) * d * e if model.position == "rope" else 0
    moved = rows * 2 * (norm + residual) + tokens * (activation + rotary)
    return LayerWork(tuple(products), attention, float(moved), softmax, kernels=24 if fused_attention else 30)


def causal_flops(model: ModelConfig, cut: Cut) -> float:
    """Scores and mix of the lower triangle: half of 4 s^2 d for each head."""
    heads = max(1, model.heads // cut.tp)
    return 2.0 * cut.micro_batch * heads * model.head_dim * model.seq * (model.seq / cut.cp)


@lru_cache(maxsize=1024)
def head_work(model: ModelConfig, cut: Cut, logit_bytes: float = 14.0) -> LayerWork:
    """Forward of the last norm, the output layer and the loss, which moves as many bytes a logit as it keeps."""
    vocab = -(-model.vocab // cut.tp)
    products = (Product("logits", cut.tokens, vocab, model.hidden),)
    moved = cut.tokens * (2 * model.hidden * cut.element / cut.token_cut + vocab * logit_bytes)
    return LayerWork(products, 0.0, float(moved), 0.0, kernels=8)


@lru_cache(maxsize=1024)
def embedding_work(model: ModelConfig, cut: Cut) -> LayerWork:
    moved = cut.tokens * model.hidden * cut.element * 4
    return LayerWork((), 0.0, float(moved), 0.0, kernels=4)


def layer_params(model: ModelConfig, tp: int = 1) -> float:
    """Parameters of one block on one of `tp` ranks; norms and biases of row products are whole on each."""
    h, d = model.hidden, model.head_dim
    kv = max(model.kv_heads, tp) if model.kv_heads < tp else model.kv_heads
    qkv = (model.heads + 2 * kv) * d
    up = 2 * model.ffn if model.mlp == "swiglu" else model.ffn
    cut = (qkv * h + model.heads * d * h + (up + model.ffn) * h) / tp
    if model.bias:
        cut += (qkv + up) / tp
    elif model.qkv_bias:
        cut += qkv / tp
    return cut + 2 * norm_params(model) + (2 * h if model.bias else 0) + (2 * d if model.qk_norm else 0)


def norm_params(model: ModelConfig) -> int:
    return model.hidden * (2 if model.norm == "layernorm" and model.bias else 1)


def embedding_params(model: ModelConfig, tp: int = 1) -> float:
    table = -(-model.vocab // tp) * model.hidden
    positions = (model.seq + model.position_offset) * model.hidden if model.position == "learned" else 0
    return table + positions + (norm_params(model) if model.embedding_norm else 0)


def head_params(model: ModelConfig, tp: int = 1) -> float:
    """The output layer and the last norm; a tied output layer is a copy on the last stage, and counted there."""
    return -(-model.vocab // tp) * model.hidden + norm_params(model)


def total_params(model: ModelConfig) -> float:
    ends = embedding_params(model) + head_params(model)
    if model.tied_embeddings:
        ends -= model.vocab * model.hidden
    return model.layers * layer_params(model) + ends


def model_flops(model: ModelConfig, tokens: float, causal: bool = False) -> float:
    """Forward and backward of `tokens` tokens, recomputation not counted; attention whole unless `causal`."""
    cut = Cut(1, model.seq)
    products = sum(product.flops for product in layer_work(model, cut, True).products)
    core = causal_flops(model, cut) * (1 if causal else 2)
    per_sequence = model.layers * (products + core) + head_work(model, cut).flops
    return 3.0 * per_sequence * tokens / model.seq


def recomputed_flops(model: ModelConfig, tokens: float, recompute: str, causal: bool = False) -> float:
    """What recomputation adds to `model_flops`."""
    cut = Cut(1, model.seq)
    products = sum(product.flops for product in layer_work(model, cut, True).products)
    core = causal_flops(model, cut) * (1 if causal else 2)
    again = {"none": 0.0, "selective": core, "core": core}.get(recompute, products + core)
    if recompute == "core":
        return model.layers * again * tokens / model.seq
    return model.layers * again * recomputed_share(recompute) * tokens / model.seq


def recomputed_share(recompute: str) -> float:
    """The share of the blocks that run again whole: all with `full` and with `every:N`, which keeps each N-th input."""
    return 0.0 if recompute in ("none", "core") else 1.0


def recomputed_run(recompute: str) -> int:
    """Blocks that are computed again together."""
    return int(recompute.removeprefix("every:")) if recompute.startswith("every:") else 1
