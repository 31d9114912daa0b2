"""Model shapes by name. Sources: the GPT-2 and GPT-3 papers' tables, and Llama's published config files."""

from __future__ import annotations

from typing import Any


def _gpt(layers: int, hidden: int, heads: int, seq: int = 1024) -> dict[str, Any]:
    return {
        "layers": layers, "hidden": hidden, "heads": heads, "vocab": 50257, "seq": seq, "norm": "layernorm",
        "mlp": "gelu_tanh", "position": "learned", "bias": True, "tied_embeddings": True,
    }  # fmt: skip


def _llama(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    seq: int,
    theta: float,
    tied: bool = False,
) -> dict[str, Any]:
    return {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn, "vocab": vocab,
        "seq": seq, "norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "rope_theta": theta, "bias": False,
        "tied_embeddings": tied,
    }  # fmt: skip


PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-124m": _gpt(12, 768, 12),
    "gpt2-355m": _gpt(24, 1024, 16),
    "gpt2-774m": _gpt(36, 1280, 20),
    "gpt2-1.5b": _gpt(48, 1600, 25),
    "gpt3-175b": _gpt(96, 12288, 96, seq=2048),
    "llama2-7b": _llama(32, 4096, 32, 32, 11008, 32000, 4096, 1e4),
    "llama2-70b": _llama(80, 8192, 64, 8, 28672, 32000, 4096, 1e4),
    "llama3-8b": _llama(32, 4096, 32, 8, 14336, 128256, 8192, 5e5),
    "llama3-70b": _llama(80, 8192, 64, 8, 28672, 128256, 8192, 5e5),
}
