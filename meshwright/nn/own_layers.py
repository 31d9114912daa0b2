"""Tensor-parallel layers for modules of your own (`meshwright.layers`).

Outside of `wrap` they are ordinary layers that hold whole weights. `wrap` replaces the weights by this rank's shards
and lets the layers join the tensor-parallel ranks. Products, tables and the loss are the functions that Meshwright's
own models use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.comm.group import Group
from meshwright.comm.ops import copy_to, gather_rows, last_dim, reduce_from, slice_rows
from meshwright.device import is_host
from meshwright.errors import UserError, divisors, either
from meshwright.nn.embedding import TableRows
from meshwright.nn.grid.sides import PLAIN, Sides
from meshwright.nn.linear import product
from meshwright.nn.loss import Vocabulary, loss_and_grad_
from meshwright.nn.parallel import Parallel


class ParallelLayer(nn.Module):
    """A layer that knows how tensor parallelism shards its own parameters.

    `styles` maps each parameter to a style of `spec/model/wrapped/parts.py`. `tp` is None until the layer has joined
    more than one tensor-parallel rank.
    """

    styles: ClassVar[dict[str, str]] = {}
    tp: Group | None = None

    def join(self, parallel: Parallel) -> None:
        """Start communicating with the tensor-parallel ranks. The parameters are this rank's shards already."""
        self.tp = None if parallel.tp.alone else parallel.tp

    @property
    def ranks(self) -> int:
        return 1 if self.tp is None else self.tp.size


class TensorRegion(ParallelLayer):
    """The mappings between the two kinds of tensors of a tensor-parallel model: replicated ones, which are equal on all
    ranks, and sharded ones, of whose last dimension each rank has a part. On one process each returns its input.

    | method | from | to | backward |
    |---|---|---|---|
    | `copy` | replicated | replicated, and each rank uses it in its own way | sums the gradients |
    | `reduce` | partial sums | replicated | passes the gradient |
    | `gather` | sharded | replicated | takes this rank's part |
    | `scatter` | replicated | sharded | gathers the gradient |
    """

    def copy(self, x: Tensor) -> Tensor:
        return x if self.tp is None else copy_to(x, self.tp)

    def reduce(self, x: Tensor) -> Tensor:
        return x if self.tp is None else reduce_from(x, self.tp)

    def gather(self, x: Tensor) -> Tensor:
        return x if self.tp is None else last_dim(gather_rows, x, self.tp)

    def scatter(self, x: Tensor) -> Tensor:
        if self.tp is None:
            return x
        if x.shape[-1] % self.tp.size:
            raise UserError(f"layout.tp={self.tp.size} does not divide the last dimension of {list(x.shape)}")
        return last_dim(slice_rows, x, self.tp)


class _ParallelLinear(TensorRegion):
    """A linear layer on inputs [..., in_features], with torch's initial weights."""

    cut: ClassVar[str]

    def __init__(self, in_features: int, out_features: int, bias: bool, skip_bias_add: bool) -> None:
        super().__init__()
        self.in_features, self.out_features, self.skip_bias_add = in_features, out_features, skip_bias_add
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.sides, self.kind = PLAIN, ""
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights of `torch.nn.Linear`."""
        bound = 1 / math.sqrt(self.in_features)
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def join(self, parallel: Parallel) -> None:
        super().join(parallel)
        self.kind = parallel.products
        if self.tp is not None:
            # All ranks hold all tokens here.
            self.sides = Sides.of_group(self.tp.name, self.tp.size, self.cut, all_rows=True)

    def separate_bias(self) -> Tensor | None:
        """Return a copy of the bias, which is still there when ZeRO 3 has freed the layer's weights."""
        return None if self.bias is None else self.bias.clone()

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return this layer's product with the rows of x, in autocast's precision if autocast is on."""
        weight: Tensor = self.weight
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        y = product(x.reshape(-1, x.shape[-1]).contiguous(), weight, bias, self.sides, self.kind)
        return y.unflatten(0, x.shape[:-1]) if x.dim() != 2 else y


class ColumnParallelLinear(_ParallelLinear):
    """y = x W^T + b, whose outputs the tensor-parallel ranks divide.

    >>> layer = ColumnParallelLinear(8, 16)
    >>> layer(torch.zeros(2, 3, 8)).shape
    torch.Size([2, 3, 16])

    With tp = 4 each rank gets 4 of the 16 outputs, or all of them with `gather_output`. With `skip_bias_add` the layer
    returns (y, bias), so that a later kernel can add the bias.
    """

    styles: ClassVar[dict[str, str]] = {"weight": "colwise", "bias": "colwise"}
    cut = "column"

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, gather_output: bool = False,
        skip_bias_add: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias, skip_bias_add)
        self.gather_output = gather_output
        if gather_output and skip_bias_add:
            raise UserError("gather_output returns all outputs and skip_bias_add a part of the bias: use one of them")

    def forward(self, x: Tensor) -> Any:
        y = self.product(x, None if self.skip_bias_add else self.bias)
        y = self.gather(y) if self.gather_output else y
        return (y, self.separate_bias()) if self.skip_bias_add else y


class RowParallelLinear(_ParallelLinear):
    """y = x W^T + b, whose inputs the tensor-parallel ranks divide. All ranks get the whole sum.

    >>> layer = RowParallelLinear(16, 8, bias=False)
    >>> layer(torch.zeros(3, 16)).shape
    torch.Size([3, 8])

    x is the output of a `ColumnParallelLinear`. If all ranks hold all of x, say `input_is_parallel=False`.
    """

    styles: ClassVar[dict[str, str]] = {"weight": "rowwise", "bias": "rowwise"}
    cut = "row"

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, input_is_parallel: bool = True,
        skip_bias_add: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias, skip_bias_add)
        self.input_is_parallel = input_is_parallel

    def forward(self, x: Tensor) -> Any:
        y = self.product(x if self.input_is_parallel else self.scatter(x), None)
        if self.skip_bias_add:
            return y, self.separate_bias()
        # Every rank holds the whole bias, which is added once, after the sum.
        return y if self.bias is None else y + self.bias.to(y.dtype)


class VocabParallelEmbedding(ParallelLayer):
    """A table of `count` rows, which the tensor-parallel ranks divide. All ranks get the rows of all ids.

    >>> VocabParallelEmbedding(100, 8)(torch.zeros(2, 3, dtype=torch.long)).shape
    torch.Size([2, 3, 8])
    """

    styles: ClassVar[dict[str, str]] = {"weight": "embedding_rowwise"}

    def __init__(self, count: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, features).normal_())

    def forward(self, ids: Tensor) -> Tensor:
        flat = ids.reshape(-1)
        if self.tp is None:
            rows = TableRows.apply(self.weight, flat, False, None)
        else:
            local = flat - self.tp.index * self.weight.shape[0]
            inside = (local >= 0) & (local < self.weight.shape[0])
            rows = reduce_from(TableRows.apply(self.weight, torch.where(inside, local, -1), True, None), self.tp)
        found: Tensor = rows.view(*ids.shape, -1)
        return found


class _TokenLosses(torch.autograd.Function):
    """Returns -log p(label) of each row of logits, whose columns the ranks of a vocabulary divide."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, mask: Tensor, vocabulary: Vocabulary) -> Tensor:
        grad = logits.detach().clone()
        losses = loss_and_grad_(grad, labels, mask, 1.0, vocabulary)
        ctx.save_for_backward(grad)
        return losses

    @staticmethod
    def backward(ctx: Any, passed: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = ctx.saved_tensors
        return (grad * passed[:, None]).to(grad.dtype), None, None, None


class ParallelCrossEntropy(ParallelLayer):
    """The loss of every token, from logits [..., vocabulary] of which each tensor-parallel rank has some columns, as a
    `ColumnParallelLinear` returns them. No rank ever holds all logits. Tokens with the label `ignore_index` have the
    loss 0.

    >>> ParallelCrossEntropy()(torch.zeros(2, 4), torch.tensor([1, -100]))
    tensor([1.3863, 0.0000])
    """

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        flat = logits.reshape(-1, logits.shape[-1])
        wanted = labels.reshape(-1)
        width = flat.shape[1]
        first, name = (0, "") if self.tp is None else (self.tp.index * width, self.tp.name)
        vocabulary = Vocabulary(first, width, name, self.ranks, is_host(flat.device))
        mask = wanted != self.ignore_index
        losses: Tensor = _TokenLosses.apply(flat, torch.where(mask, wanted, 0), mask, vocabulary)
        return losses.view(labels.shape)


GATED: dict[str, Callable[[Tensor], Tensor]] = {"swiglu": F.silu}  # on a gate beside the first product
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}


class ParallelMLP(nn.Module):
    """The MLP of a transformer: a column-parallel and a row-parallel product around an activation.

    `activation` is gelu, relu, silu, or swiglu, which has a gate beside the first product.
    """

    def __init__(self, hidden: int, ffn: int, activation: str = "swiglu", bias: bool = False) -> None:
        super().__init__()
        if activation not in {**GATED, **ACTIVATIONS}:
            raise UserError(f"activation={activation!r} is not known: try {either([*GATED, *ACTIVATIONS])}")
        self.activation = {**GATED, **ACTIVATIONS}[activation]
        self.gate = ColumnParallelLinear(hidden, ffn, bias) if activation in GATED else None
        self.up = ColumnParallelLinear(hidden, ffn, bias)
        self.down = RowParallelLinear(ffn, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            inner = self.activation(self.up(x))
        else:
            inner = self.activation(self.gate(x)) * self.up(x)
        result: Tensor = self.down(inner)
        return result


class ParallelAttention(TensorRegion):
    """Attention over x [batch, tokens, hidden], whose heads the tensor-parallel ranks divide.

    `kv_heads` below `heads` groups the queries. `rotate(q, k)` may turn the queries and keys [batch, heads, tokens,
    head_dim] of this rank's heads by their positions.
    """

    def __init__(
        self, hidden: int, heads: int, kv_heads: int | None = None, *, head_dim: int | None = None, bias: bool = False,
        causal: bool = True, rotate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads or heads
        self.causal = causal
        self.rotate = rotate
        if heads % self.kv_heads or (head_dim is None and hidden % heads):
            raise UserError(f"heads={heads} must be a multiple of kv_heads={self.kv_heads} and divide hidden={hidden}")
        self.head_dim = head_dim or hidden // heads
        self.query = ColumnParallelLinear(hidden, heads * self.head_dim, bias)
        self.key = ColumnParallelLinear(hidden, self.kv_heads * self.head_dim, bias)
        self.value = ColumnParallelLinear(hidden, self.kv_heads * self.head_dim, bias)
        self.out = RowParallelLinear(heads * self.head_dim, hidden, bias)

    def join(self, parallel: Parallel) -> None:
        super().join(parallel)
        if self.kv_heads % self.ranks:
            fix = f"try layout.tp={either(divisors(self.kv_heads)[:6])}"
            raise UserError(f"layout.tp={self.ranks} does not divide the {self.kv_heads} key-value heads: {fix}")

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the attention's output. `mask` is the one of torch's `scaled_dot_product_attention`. Without it the
        attention is causal, unless the layer was built with `causal=False`."""
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        if self.rotate is not None:
            q, k = self.rotate(q, k)
        grouped = self.heads != self.kv_heads
        causal = self.causal and mask is None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
        result: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return result
