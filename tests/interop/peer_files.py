"""Files of Megatron-LM and DeepSpeed with the weights of transformers' models, in the layouts that those write."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PADDED = 64  # rows of the vocabulary of 61 tokens, with padding


def grouped(q: Tensor, k: Tensor, v: Tensor, kv_heads: int) -> Tensor:
    """Return the rows of queries, keys and values as Megatron-LM orders them: by key-value head."""
    parts = [each.view(kv_heads, -1, *each.shape[1:]) for each in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def padded(table: Tensor) -> Tensor:
    return torch.cat([table, torch.full((PADDED - len(table), table.shape[1]), 7.0)])


def megatron_model(model: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the whole tensors of a Llama or GPT-2 under megatron-core's names, and Megatron-LM's arguments."""
    theirs, config = model.state_dict(), model.config
    llama = config.model_type == "llama"
    args = {
        "num_layers": config.num_hidden_layers, "hidden_size": config.hidden_size, "vocab_size": 61,
        "num_attention_heads": 4, "group_query_attention": llama, "num_query_groups": config.num_key_value_heads
        if llama else 1, "padded_vocab_size": PADDED, "max_position_embeddings": 96, "seq_length": 96,
        "swiglu": llama, "normalization": "RMSNorm" if llama else "LayerNorm", "add_bias_linear": not llama,
        "bias_gelu_fusion": True, "position_embedding_type": "rope" if llama else "learned_absolute",
        "untie_embeddings_and_output_weights": llama, "params_dtype": torch.float32, "rotary_base": 10000,
        "layernorm_epsilon": config.rms_norm_eps if llama else config.layer_norm_epsilon,
        "ffn_hidden_size": config.intermediate_size if llama else 128, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    }  # fmt: skip
    whole = _llama(theirs, args) if llama else _gpt2(theirs, args)
    return {name: tensor.contiguous() for name, tensor in whole.items()}, args


def _llama(theirs: dict[str, Tensor], args: dict[str, Any]) -> dict[str, Tensor]:
    whole = {
        "embedding.word_embeddings.weight": padded(theirs["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": theirs["model.norm.weight"],
        "output_layer.weight": padded(theirs["lm_head.weight"]),
    }
    for layer in range(args["num_layers"]):
        old, new = f"model.layers.{layer}", f"decoder.layers.{layer}"
        q, k, v = (theirs[f"{old}.self_attn.{each}_proj.weight"] for each in "qkv")
        whole[f"{new}.self_attention.linear_qkv.weight"] = grouped(q, k, v, args["num_query_groups"])
        whole[f"{new}.self_attention.linear_qkv.layer_norm_weight"] = theirs[f"{old}.input_layernorm.weight"]
        whole[f"{new}.self_attention.linear_proj.weight"] = theirs[f"{old}.self_attn.o_proj.weight"]
        whole[f"{new}.mlp.linear_fc1.layer_norm_weight"] = theirs[f"{old}.post_attention_layernorm.weight"]
        halves = [theirs[f"{old}.mlp.{each}_proj.weight"] for each in ("gate", "up")]
        whole[f"{new}.mlp.linear_fc1.weight"] = torch.cat(halves)
        whole[f"{new}.mlp.linear_fc2.weight"] = theirs[f"{old}.mlp.down_proj.weight"]
    return whole


def _gpt2(theirs: dict[str, Tensor], args: dict[str, Any]) -> dict[str, Tensor]:
    whole = {
        "embedding.word_embeddings.weight": padded(theirs["transformer.wte.weight"]),
        "embedding.position_embeddings.weight": theirs["transformer.wpe.weight"],
    }
    for kind in ("weight", "bias"):
        whole[f"decoder.final_layernorm.{kind}"] = theirs[f"transformer.ln_f.{kind}"]
        for layer in range(args["num_layers"]):
            old, new = f"transformer.h.{layer}", f"decoder.layers.{layer}"
            whole[f"{new}.input_layernorm.{kind}"] = theirs[f"{old}.ln_1.{kind}"]
            whole[f"{new}.pre_mlp_layernorm.{kind}"] = theirs[f"{old}.ln_2.{kind}"]
            q, k, v = theirs[f"{old}.attn.c_attn.{kind}"].t().chunk(3)
            whole[f"{new}.self_attention.linear_qkv.{kind}"] = grouped(q, k, v, args["num_attention_heads"])
            for ours, name in (("self_attention.linear_proj", "attn.c_proj"), ("mlp.linear_fc1", "mlp.c_fc"),
                               ("mlp.linear_fc2", "mlp.c_proj")):  # fmt: skip
                whole[f"{new}.{ours}.{kind}"] = theirs[f"{old}.{name}.{kind}"].t()
    return whole


def shard(name: str, tensor: Tensor, tp: int, rank: int, gated: bool) -> Tensor:
    """Return the part of a tensor that one tensor-parallel rank holds."""
    if "linear_fc1.weight" in name and gated:
        return torch.cat([half.chunk(tp)[rank] for half in tensor.chunk(2)])
    columns = ("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias", "word_embeddings.weight",
               "output_layer.weight")  # fmt: skip
    if name.endswith(columns):
        return tensor.chunk(tp)[rank].clone()
    return tensor.chunk(tp, 1)[rank].clone() if name.endswith(("proj.weight", "fc2.weight")) else tensor


def write_classic(folder: Path, model: Any, tp: int, pp: int = 1, chunks: int = 1) -> None:
    """Write the folders of all ranks. With `chunks`, a rank has several stages, as with interleaved schedules."""
    whole, args = megatron_model(model)
    args |= {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    per = args["num_layers"] // (pp * chunks)
    for rank in range(tp):
        for stage in range(pp):
            state: dict[str, Any] = {"args": Namespace(**args), "checkpoint_version": 3.0, "iteration": 5,
                                     "optimizer": {"step": 5}}  # fmt: skip
            for chunk in range(chunks):
                place = chunk * pp + stage
                held = {}
                for name, tensor in whole.items():
                    layer = int(name.split(".")[2]) if ".layers." in name else -1
                    ends = (
                        place == 0 and name.startswith("emb"),
                        place == pp * chunks - 1 and not name.startswith("emb"),
                    )
                    if layer < 0 and any(ends):
                        held[name] = shard(name, tensor, tp, rank, args["swiglu"])
                    elif layer >= 0 and layer // per == place:
                        here = name.replace(f".{layer}.", f".{layer - place * per}.", 1)
                        held[here] = shard(name, tensor, tp, rank, args["swiglu"])
                state[f"model{chunk}" if chunks > 1 else "model"] = held
            at = folder / "iter_0000005" / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
            at.mkdir(parents=True)
            torch.save(state, at / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("5")


OLD_NAMES = {
    "decoder.layers": "layers", "self_attention.linear_qkv": "attention.query_key_value",
    "mlp.linear_fc1": "mlp.dense_h_to_4h", "self_attention.linear_proj": "attention.dense",
    "mlp.linear_fc2": "mlp.dense_4h_to_h", "pre_mlp_layernorm": "post_attention_layernorm", "decoder.final": "final",
}  # fmt: skip


def write_old(folder: Path, model: Any, tp: int, version: float) -> None:
    """Write a GPT-2 as versions before megatron-core did: nested names, and queries, keys and values in their order."""
    whole, args = megatron_model(model)
    heads, d = args["num_attention_heads"] // tp, args["hidden_size"] // args["num_attention_heads"]
    for rank in range(tp):
        transformer, embedding = {}, {}
        for name, tensor in whole.items():
            part = shard(name, tensor, tp, rank, False)
            if "linear_qkv" in name:
                by_kind = part.view(heads, 3, d, *part.shape[1:])
                order = (1, 0, 2) if version < 1 else (0, 2, 1)
                part = by_kind.permute(*order, *range(3, by_kind.dim())).reshape(part.shape)
            if name.startswith("embedding"):
                embedding[name.split(".")[1]] = {"weight": part}
                continue
            for new, old in OLD_NAMES.items():
                name = name.replace(new, old)
            transformer[name] = part
        state = {
            "model": {"language_model": {"embedding": embedding, "transformer": transformer}},
            "args": Namespace(**args),
        }
        at = folder / f"mp_rank_{rank:02d}"
        at.mkdir(parents=True)
        torch.save(state | ({"checkpoint_version": version} if version else {}), at / "model_optim_rng.pt")


def write_distributed(folder: Path, model: Any) -> None:
    """Write what dist_checkpointing does: all layers' tensors as one, in the format of torch's own checkpoints."""
    import torch.distributed.checkpoint as dcp

    whole, args = megatron_model(model)
    stacked: dict[str, Tensor] = {name: tensor for name, tensor in whole.items() if ".layers." not in name}
    for name in (name for name in whole if ".layers.0." in name):
        layers = [whole[name.replace(".0.", f".{layer}.", 1)] for layer in range(args["num_layers"])]
        stacked[name.replace(".0.", ".", 1)] = torch.stack(layers)
    stacked["optimizer.state.exp_avg.output_layer.weight"] = torch.zeros(3)
    dcp.save(stacked, checkpoint_id=folder, no_dist=True)
    torch.save({"args": Namespace(**args), "checkpoint_version": 3.0, "iteration": 5}, folder / "common.pt")


def write_deepspeed(folder: Path, model: Any, stage: int, world: int) -> None:
    """Write a checkpoint of ZeRO: masters in float32, weights in half precision. Stage 0 has no masters."""
    folder.mkdir()
    if stage == 0:
        torch.save({"module": model.state_dict(), "shared_params": {}}, folder / "mp_rank_00_model_states.pt")
        return
    parameters = dict(model.named_parameters())
    names = list(parameters)
    # Two groups, as of parameters with and without weight decay.
    groups = [[n for n in names if parameters[n].dim() > 1], [n for n in names if parameters[n].dim() == 1]]
    shapes = [{name: parameters[name].shape for name in group} for group in groups]
    flats = [[] for _ in range(world)]
    for group in groups:
        if stage == 3:
            parts = [_equal_parts(parameters[name].detach().flatten(), world) for name in group]
            for rank in range(world):
                flats[rank].append(torch.cat([each[rank] for each in parts]))
        else:
            vector = torch.cat([parameters[name].detach().flatten() for name in group])
            for rank, part in enumerate(_equal_parts(vector, 2 * world)):
                flats[rank // 2].append(part)
    for rank, held in enumerate(flats):
        if stage < 3:
            held = [torch.cat(held[2 * n : 2 * n + 2]).clone() for n in range(len(groups))]
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        state = {"zero_stage": stage, "partition_count": world if stage == 3 else [world] * 2, key: held}
        torch.save({"optimizer_state_dict": state}, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    empty = {name: torch.empty(0, dtype=torch.bfloat16) for name in names}
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    state = {"module": empty if stage == 3 else halves, "param_shapes": shapes, "shared_params": {}}
    torch.save(state, folder / (f"{'zero_pp_rank_0_' if stage == 3 else ''}mp_rank_00_model_states.pt"))


def _equal_parts(vector: Tensor, count: int) -> list[Tensor]:
    each = math.ceil(len(vector) / count)
    return list(torch.cat([vector, torch.zeros(each * count - len(vector))]).chunk(count))
