"""Multi-head latent attention, sharded over tp by heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.comm.ops import copy_to, gather_from
from meshwright.nn.attention.context import ContextRows, context_attention
from meshwright.nn.attention.core import attention_core, run_core
from meshwright.nn.attention.documents import Documents
from meshwright.nn.attention.rotary import rotate
from meshwright.nn.inputs import Inputs
from meshwright.nn.linear import Linear
from meshwright.nn.norm import Norm, RMSNorm
from meshwright.nn.parallel import Parallel
from meshwright.spec.layout.params import ParamRecord, records_under
from meshwright.spec.model import gpt
from meshwright.spec.model.latent import LatentAttentionPart


class LatentAttention(nn.Module):
    """Latent attention of this rank's heads. Values are padded with zeros to the width of keys, since the fused kernels
    take a single width."""

    def __init__(self, parallel: Parallel, part: LatentAttentionPart, records: dict[str, ParamRecord]) -> None:
        super().__init__()
        self.part = part
        self.parallel = parallel
        self.heads = part.heads // parallel.tp.size

        def linear(key: str, cut: str) -> Linear:
            return Linear(parallel, records[f"{key}.weight"], None, cut)  # type: ignore[arg-type]

        def norm(key: str, width: int) -> Norm:
            return RMSNorm(parallel, gpt.NormPart("rmsnorm", width, part.norm_eps), records_under(records, key))

        self.q_a = linear("q_a", "whole") if part.q_rank else None
        self.q_a_norm = norm("q_a_norm", part.q_rank) if part.q_rank else None
        self.q_b = linear("q_b" if part.q_rank else "q", "column")
        self.kv_a = linear("kv_a", "whole")
        self.kv_a_norm = norm("kv_a_norm", part.kv_rank)
        self.kv_b, self.out = linear("kv_b", "column"), linear("out", "row")
        self.recompute_core = parallel.recompute.core

    def core(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Documents | None) -> Tensor:
        return attention_core(q, k, v, mask, True, self.part.dropout if self.training else 0.0)

    def forward(self, x: Tensor, norm: Norm, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return x [tokens, hidden], for the residual, and attention of norm(x)."""
        batch, rotary, past = inputs.sequences, inputs.tables, inputs.past
        mask: Tensor | Documents | ContextRows | None = inputs.mask
        assert rotary is not None
        part = self.part
        normed = norm(x)

        # The down projections to the latent vectors, and the rotary part of the key, which all heads share.
        query = normed if self.q_a is None or self.q_a_norm is None else self.q_a_norm(self.q_a(normed))
        latent, shared = self.kv_a(normed).split((part.kv_rank, part.rope), dim=1)
        tp = self.parallel.tp
        shared = gather_from(shared, tp) if self.parallel.splits_tokens else copy_to(shared, tp)

        # The up projections to this rank's heads.
        q = self.q_b(query)
        seq = q.shape[0] // batch
        q = q.view(batch, seq, self.heads, part.head_dim)
        kv = self.kv_b(self.kv_a_norm(latent)).view(batch, seq, self.heads, part.nope + part.value)
        q_nope, q_rope = q.split((part.nope, part.rope), dim=3)
        k_nope, v = kv.split((part.nope, part.value), dim=3)
        k_rope = rotate(shared.view(batch, seq, 1, part.rope), rotary).expand(-1, -1, self.heads, -1)
        q = torch.cat((q_nope, rotate(q_rope, rotary)), dim=3).transpose(1, 2)
        q = q if part.scores_factor == 1.0 else q * part.scores_factor
        k = torch.cat((k_nope, k_rope), dim=3).transpose(1, 2)
        v = F.pad(v, (0, part.head_dim - part.value)).transpose(1, 2)

        if past is not None:
            k, v = past.extend(k, v)
            mask = past.seen(mask)
        if isinstance(mask, ContextRows):
            assert self.parallel.context is not None and past is None
            y = context_attention(q, k, v, mask, self.parallel.context)
        else:
            y = run_core(self.core, self.recompute_core, part.dropout, q, k, v, mask)
        y = y[..., : part.value].transpose(1, 2).reshape(batch * seq, -1)
        return x, self.out(y)
