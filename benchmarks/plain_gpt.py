"""The same model as a good PyTorch user writes it: plain modules, SDPA, fused AdamW, no framework."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.config.sections import ModelConfig


class Block(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.head_dim
        self.norm1, self.norm2 = nn.RMSNorm(c.hidden, eps=c.norm_eps), nn.RMSNorm(c.hidden, eps=c.norm_eps)
        self.qkv = nn.Linear(c.hidden, (c.heads + 2 * c.kv_heads) * c.head_dim, bias=False)
        self.out = nn.Linear(c.heads * c.head_dim, c.hidden, bias=False)
        self.gate_up = nn.Linear(c.hidden, 2 * c.ffn, bias=False)
        self.down = nn.Linear(c.ffn, c.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, s, -1, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, -1))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class PlainGPT(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(c.vocab, c.hidden)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.hidden, eps=c.norm_eps)
        self.head = nn.Linear(c.hidden, c.vocab, bias=False)
        frequency = c.rope_theta ** (-torch.arange(0, c.head_dim, 2).float() / c.head_dim)
        angle = torch.outer(torch.arange(c.seq).float(), frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0.0, c.init_std)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class PlainLoop:
    """A training loop with forward, backward (accumulating over micro-batches), clipping and fused AdamW.

    `wrap` is "" for one process, "ddp" for torch's DistributedDataParallel, or "fsdp" for its fully_shard (of each
    block and of the rest).
    """

    def __init__(self, c: ModelConfig, wrap: str = "") -> None:
        torch.manual_seed(1)
        self.model: nn.Module = PlainGPT(c)
        if wrap == "fsdp":
            from torch.distributed.fsdp import fully_shard

            for block in self.model.blocks:
                fully_shard(block)
            fully_shard(self.model)
        decay = [p for p in self.model.parameters() if p.dim() > 1]
        rest = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
        if wrap == "ddp":
            self.model = nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)

    def step(self, batches: list[tuple[Tensor, Tensor]]) -> float:
        total = 0.0
        for tokens, labels in batches:
            loss = self.model(tokens, labels) / len(batches)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


class DeepSpeedLoop:
    """The same model with DeepSpeed's ZeRO stage 1 or 2 and DeepSpeed's AdamW."""

    def __init__(self, c: ModelConfig, stage: int, micro_batch: int) -> None:
        import os

        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        torch.manual_seed(1)
        model = PlainGPT(c)
        config = {
            "train_micro_batch_size_per_gpu": micro_batch, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
            "steps_per_print": 10**9, "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        }  # fmt: skip
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(self, batches: list[tuple[Tensor, Tensor]]) -> float:
        total = 0.0
        for tokens, labels in batches:
            loss = self.engine(tokens, labels)
            self.engine.backward(loss)
            self.engine.step()
            total += loss.item()
        return total
