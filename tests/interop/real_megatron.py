"""Runs megatron-core on CPUs: `python real_megatron.py OUT KIND TP PP` writes checkpoints of a small model.

OUT/classic and OUT/dist get the two formats. Without a pipeline, OUT/logits.pt gets the model's logits. The kinds
are llama and gpt. With load-llama and load-gpt, the model is loaded from OUT/classic, and only its logits are written.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LAYERS, VOCAB, SEQ = 4, 64, 24
IDS = torch.arange(2 * SEQ).view(2, SEQ) % 61


def without_a_gpu() -> None:
    """Replace what megatron-core asks of a GPU where there is none."""
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = lambda self, *_, **__: self
    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()


def build(llama: bool, tp: int, pp: int, vocab: int = VOCAB) -> tuple[Any, dict[str, Any]]:
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    norm = "RMSNorm" if llama else "LayerNorm"
    shape = {"num_layers": LAYERS, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48}
    config = TransformerConfig(
        **shape, num_query_groups=2 if llama else 4, kv_channels=8, use_cpu_initialization=True, normalization=norm,
        pipeline_dtype=torch.float32, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        gated_linear_unit=llama, activation_func=torch.nn.functional.silu if llama else torch.nn.functional.gelu,
        add_bias_linear=not llama, bias_activation_fusion=False, masked_softmax_fusion=False, hidden_dropout=0.0,
        attention_dropout=0.0, bias_dropout_fusion=False, apply_rope_fusion=False, persist_layer_norm=False,
        gradient_accumulation_fusion=False, init_method_std=0.2,
    )  # fmt: skip
    position = "rope" if llama else "learned_absolute"
    model = GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm" if llama else None), vocab, SEQ,
        pre_process=ps.is_pipeline_first_stage(), post_process=ps.is_pipeline_last_stage(),
        position_embedding_type=position, share_embeddings_and_output_weights=not llama,
    )  # fmt: skip
    args = shape | {
        "group_query_attention": llama, "num_query_groups": 2 if llama else 1, "kv_channels": 8, "seq_length": SEQ,
        "max_position_embeddings": SEQ, "padded_vocab_size": VOCAB, "position_embedding_type": position,
        "normalization": norm, "swiglu": llama, "add_bias_linear": not llama, "bias_gelu_fusion": False,
        "untie_embeddings_and_output_weights": llama, "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp, "layernorm_epsilon": 1e-5, "rotary_base": 10000, "params_dtype":
        torch.float32,
    }  # fmt: skip
    return model.eval(), args


def save(out: Path, model: Any, args: dict[str, Any], pp: int) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ps

    stage = f"_{ps.get_pipeline_model_parallel_rank():03d}" if pp > 1 else ""
    at = out / "classic" / f"mp_rank_{ps.get_tensor_model_parallel_rank():02d}{stage}"
    at.mkdir(parents=True)
    common = {"args": Namespace(**args), "checkpoint_version": 3.0, "iteration": 3}
    torch.save({"model": model.state_dict(), **common}, at / "model_optim_rng.pt")
    (out / "dist").mkdir(exist_ok=True)
    dist.barrier()
    dist_checkpointing.save({**model.sharded_state_dict(prefix=""), **common}, str(out / "dist"))


def save_logits(out: Path, model: Any, tp: int, rank: int) -> None:
    later = torch.triu(torch.ones(1, 1, SEQ, SEQ), 1).bool()
    with torch.no_grad():
        columns = model(IDS, torch.arange(SEQ)[None].expand(2, -1), later).contiguous()
    parts = [torch.empty_like(columns) for _ in range(tp)]
    dist.all_gather(parts, columns)
    if rank == 0:
        torch.save(torch.cat(parts, -1), out / "logits.pt")


def main(rank: int, out: Path, kind: str, tp: int, pp: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK="0")
    dist.init_process_group("gloo", rank=rank, world_size=tp * pp)
    without_a_gpu()
    from megatron.core import parallel_state as ps

    ps.initialize_model_parallel(tp, pp)
    torch.manual_seed(7 + (rank // tp))
    loads = kind.startswith("load-")
    if loads:
        state = torch.load(out / "classic" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt", weights_only=False)
        model, args = build(kind.endswith("llama"), tp, pp, state["args"].padded_vocab_size)
        model.load_state_dict(state["model"], strict=True)
    else:
        model, args = build(kind.endswith("llama"), tp, pp)
        with torch.no_grad():
            for name, each in model.named_parameters():
                if each.dim() == 1:
                    each.add_(0.1 * torch.randn(each.shape, generator=torch.Generator().manual_seed(len(name))))
        save(out, model, args, pp)
    if pp == 1:
        save_logits(out, model, tp, rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder, kind, tp, pp = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.multiprocessing.spawn(main, args=(folder, kind, tp, pp, port), nprocs=tp * pp)
