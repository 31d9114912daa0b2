"""Tiny random models of every family of transformers that has a plan, and their comparison with one process."""

from __future__ import annotations

import dataclasses
import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from meshwright.checkpoint.base import read_weights
from meshwright.comm.mesh import Mesh
from meshwright.config.load import config_from
from meshwright.config.sections import Config
from meshwright.device import Device
from meshwright.engine.context import build_context
from meshwright.engine.providers import forward_step, model_provider
from meshwright.engine.step import Trainer
from meshwright.models.wrapped.blueprint import in_double, read_config, skeleton, transformers
from meshwright.run.pretrain import build_modules
from meshwright.spec.layout.params import slices_of
from meshwright.spec.model import description
from meshwright.spec.model.description import layout_of
from meshwright.spec.model.wrapped.families import ADDED, REFUSED, VERIFIED
from tests.support.oracle import Made, WholeTensors, true_gradients, worst

# Families have different names for their sizes, so this lists all of them.
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 64,
    "moe_intermediate_size": 16, "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "moe_num_experts": 4, "kv_lora_rank": 8, "q_lora_rank": 8,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "sliding_window": 8, "shared_expert_intermediate_size": 16,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "embedding_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "residual_dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_dense_layers": 1,
    "expert_ffn_hidden_size": 16, "ffn_hidden_size": 48, "shared_intermediate_size": 16, "mamba_n_heads": 4,
    "mamba_d_state": 8, "mamba_d_head": 16, "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "index_n_heads": 4, "index_head_dim": 8, "index_topk": 4,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "gemma4_text": {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "gemma3n_text": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0, 0.0, 0.0],
    },
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "longcat_flash": {"num_layers": 2},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4, "num_local_experts": 16},
    "nemotron_h": {"n_groups": 2},
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "qwen3_moe": {"num_experts": 4},
    "inkling_text": {"num_experts": 4, "n_routed_experts": 4},
    "cohere_compass_text": {
        "layer_types": ["full_attention", "full_attention"],
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    },
}
TOO_LARGE = {"phi4_multimodal": "its encoders of pictures and sound have no small sizes"}
SEQ = 16
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "tp 2": {"layout": {"tp": 2}},
    "pp 2": {"layout": {"pp": 2}},
    "tp 2 x dp 2 x ZeRO 3": {"layout": {"tp": 2}, "zero": {"stage": 3}},
    "tp 2 x pp 2": {"layout": {"tp": 2, "pp": 2}},
    "ZeRO 3, recomputed": {"zero": {"stage": 3}, "recompute": {"mode": "full"}},
}


class Wide(TorchFunctionMode):
    """A mode that keeps float64 where a model's own code asks for float32, so that rounding hides nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def families() -> list[str]:
    """Return the causal language models of transformers whose config has a tensor-parallel plan."""
    library = transformers()
    names = library.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return [name for name in names if getattr(library.CONFIG_MAPPING[name], "base_model_tp_plan", None)]


def tiny(family: str) -> Any:
    """Return a small config of a family."""
    kind = transformers().CONFIG_MAPPING[family]
    fields = {each.name for each in dataclasses.fields(kind)}
    renamed = dict(getattr(kind, "attribute_map", {}) or {})
    known = {key: value for key, value in SIZES.items() if renamed.get(key, key) in fields}
    known = {key: value for key, value in known.items() if key not in renamed.values() or key in fields}
    if "kv_lora_rank" in fields:
        known["num_key_value_heads"] = 4
    known |= _every_kind_of_layer(kind, fields)
    return kind(**known | OWN.get(family, {}))


def _every_kind_of_layer(kind: Any, fields: set[str]) -> dict[str, Any]:
    """Return config entries that give one layer of each kind in the family's default."""
    usual = kind()
    found: dict[str, list[str]] = {}
    for key in ("layer_types", "mlp_layer_types", "layers_block_type"):
        listed = getattr(usual, key, None) if key in fields else None
        if isinstance(listed, list) and len(set(map(str, listed))) > 1:
            found[key] = list(dict.fromkeys(listed))
    layers = max([2, *(len(types) for types in found.values())])
    return {
        **({"num_hidden_layers": layers} if "num_hidden_layers" in fields else {}),
        **{key: [*types, *types[-1:] * (layers - len(types))] for key, types in found.items()},
    }


def write_tiny(family: str, folder: Path) -> str:
    at = folder / family
    tiny(family).save_pretrained(at)
    return str(at)


def config_of(folder: str, sections: dict[str, dict[str, Any]]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "model": {"hf": folder, "kind": "hf", "seq": SEQ}, "data": {"prefixes": ["made"]},
        "train": {"precision": "fp64", "global_batch": 4, "micro_batch": 1, "compile": False},
        "comm": {"bucket_mib": 0.02},
    }  # fmt: skip
    for name, keys in sections.items():
        base[name] = base.get(name, {}) | keys
    return config_from(base)


def make_trainer(config: Config, rank: int = 0, world: int = 1, groups: dict[str, Any] | None = None) -> Trainer:
    ctx = build_context(config, rank, world, Device("cpu"), process_groups=groups, trains=True)
    data = Made(config.model.vocab, SEQ)
    return Trainer(ctx, build_modules(ctx, model_provider), forward_step, data, data)


class Given:
    """Weights in memory, which are read like those of a folder (`checkpoint.base.read_weights`)."""

    def __init__(self, weights: WholeTensors) -> None:
        self.folder, self.weights = Path("given"), weights
        self.shapes = {name: value.shape for name, value in weights.items()}

    def block(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        return torch.from_numpy(self.weights[name][slices_of(start, shape)])


@dataclasses.dataclass
class Alone:
    """The results of transformers in one process: the gradients at some weights, and the relative error of Meshwright's
    logits.
    """

    weights: WholeTensors
    gradients: WholeTensors
    logits: float


def with_weights(trainer: Trainer, weights: WholeTensors) -> Trainer:
    read_weights(trainer, Given(weights))  # type: ignore[arg-type]
    trainer.publish()
    return trainer


def alone(folder: str) -> Alone:
    """Compute a model in one process with nothing but transformers. Its weights are random even where a model starts
    with zeros or ones, which would hide much.
    """
    config = read_config(folder)
    kind = type(skeleton(config, torch.float64))
    with Wide():
        torch.manual_seed(5)
        theirs = in_double(kind._from_config(config, dtype=torch.float64))  # type: ignore[attr-defined]
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        weights = {name: value.detach().numpy().copy() for name, value in theirs.named_parameters()}
        samples = [Made(config.get_text_config().vocab_size, SEQ).sample(n) for n in range(4)]
        batch = {key: torch.tensor(np.stack([sample[key] for sample in samples])) for key in samples[0]}
        logits = theirs.train()(input_ids=batch["tokens"], use_cache=False).logits
        ours = with_weights(make_trainer(config_of(folder, {})), weights).modules[0]
        with torch.no_grad():
            error = float((logits - ours.train()(batch)).abs().max() / logits.abs().max())
        mask = batch["loss_mask"].flatten()
        each = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        ((each * mask).sum() / mask.sum()).backward()
    grads = {name: np.zeros(p.shape) if p.grad is None else p.grad.numpy() for name, p in theirs.named_parameters()}
    return Alone(weights, grads, error)


def measure(rank: int, world: int, folders: list[str], found: list[Alone], layouts: list[str]) -> list[dict[str, Any]]:
    """Return for each model the largest error of a gradient, with its name, by layout. This is the body of a rank."""
    description.check_family = lambda *any: None  # type: ignore[assignment]
    groups: dict[Any, dict[str, Any]] = {}
    results = []
    for folder, reference in zip(folders, found, strict=True):
        errors = {}
        for name in layouts:
            config = config_of(folder, LAYOUTS[name])
            layout = layout_of(config, world)
            if layout not in groups:
                made = Mesh(layout, rank).groups
                groups[layout] = {key: group.process_group for key, group in made.items() if not group.alone}
            # Backward runs outside such a mode, and would recompute blocks in another precision.
            with nullcontext() if "recomputed" in name else Wide():
                trainer = with_weights(make_trainer(config, rank, world, groups[layout]), reference.weights)
                errors[name] = worst(true_gradients(trainer), reference.gradients)
            del trainer
            gc.collect()
        results.append(errors)
    return results


AXES = {"tp": ("tp 2", "tp 2 x dp 2 x ZeRO 3"), "pp": ("pp 2",), "both": ("tp 2 x pp 2",)}
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"


def layouts_of(axes: list[str]) -> list[str]:
    """Return the layouts on which a family that may be cut along these axes is compared."""
    found = [name for axis in axes for name in AXES[axis]]
    return found + list(AXES["both"] if len(axes) == 2 else ())


def table() -> str:
    """Return the table of families in docs/models.md, from the results of the comparison
    (`spec/model/wrapped/families.yaml`).
    """
    lines = ["| family | tp 2 | pp 2 | tp 2 x dp 2 x ZeRO 3 | what was found |", "|---|---|---|---|---|"]
    for family in sorted({*VERIFIED, *REFUSED}):
        axes, why = VERIFIED.get(family, []), REFUSED.get(family, {})
        notes = [ADDED[family]["why"] + " (added here)"] if family in ADDED else []
        notes += [f"{axis}: {reason}" for axis, reason in why.items()]
        words = ["yes" if axis in axes else "refused" for axis in ("tp", "pp")]
        zero = "yes" if "tp" in axes else "not compared"
        lines.append(f"| {family} | {words[0]} | {words[1]} | {zero} | {'; '.join(notes)} |")
    return "\n".join(lines)


def written(page: str) -> str:
    """Return the page with the table in its place."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
