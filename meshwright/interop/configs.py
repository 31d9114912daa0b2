"""A starting config from DeepSpeed's JSON config or the arguments of a Megatron-LM script, with a report. No torch.

A table maps each key of theirs to ours. `Found` collects the values, and a sentence for every key: what it became, or
why it has no counterpart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.config.load import nest
from meshwright.errors import UserError
from meshwright.outside import parse_json, read_file
from meshwright.spec.model.megatron import DEMANDS, model_values


@dataclass
class Found:
    """The keys of our config by their dotted names, and the report."""

    values: dict[str, Any] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def take(self, theirs: str, keys: Mapping[str, Any]) -> None:
        self.values |= keys
        self.taken.append(f"{theirs} -> " + ", ".join(f"{key}={value}" for key, value in keys.items()))

    def leave(self, theirs: str, why: str) -> None:
        self.left.append(f"{theirs}: {why}")

    @property
    def sections(self) -> dict[str, Any]:
        return nest(self.values)


UNKNOWN = "not known here: look in docs/coming-from.md"
AUTO = "auto leaves the value to another program: set the key"
Rule = Callable[[Any], dict[str, Any]] | str  # our keys for a value, or the reason that there are none


def apply(found: Found, name: str, value: Any, rules: Mapping[str, Rule]) -> None:
    """Apply the rule of one of their keys, or report that there is none."""
    rule = rules.get(name, UNKNOWN)
    if isinstance(rule, str):
        found.leave(name, rule)
    elif value == "auto":
        found.leave(name, AUTO)
    elif str(value).startswith("$"):
        found.leave(name, f"{value} has no value in the script: set the key")
    else:
        try:
            keys = rule(value)
        except (TypeError, ValueError, KeyError, AttributeError):
            raise UserError(
                f"{name}={value!r} has no counterpart or is not valid: correct it or leave it out"
            ) from None
        if keys:
            found.take(f"{name}={value}", keys)
        else:
            found.leave(f"{name}={value}", "runs are so unless a key says otherwise")


PLACES = {"cpu": "cpu", "nvme": "disk", "none": "none"}
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "lion": "lion", "sgd": "sgd", "muon": "muon"}
NO_BUCKETS = "comm.bucket_mib sets the size of buckets, and is chosen by default"

ZERO: dict[str, Rule] = {
    "stage": lambda value: {"zero.stage": int(value)},
    "overlap_comm": lambda value: {"comm.overlap.gradients": bool(value)},
    "offload_optimizer.device": lambda value: {"zero.offload.optimizer": PLACES[value]},
    "offload_param.device": lambda value: {"zero.offload.params": PLACES[value]},
    "offload_optimizer.nvme_path": lambda value: {"zero.offload.path": str(value)},
    "offload_param.nvme_path": lambda value: {"zero.offload.path": str(value)},
    "zero_hpz_partition_size": lambda value: {"comm.gather.node_copy": True} if value > 1 else {},
    "zero_quantized_weights": lambda value: {"comm.gather.kind": "int8"} if value else {},
    "zero_quantized_gradients": lambda value: {"comm.reduce.kind": "int4"} if value else {},
    "mics_shard_size": lambda value: {"zero.shard_group": "node"} if value > 0 else {},
    "contiguous_gradients": "gradients are always in one buffer",
    "reduce_scatter": "gradients of stages 2 and 3 are always scattered",
    "round_robin_gradients": "every rank owns an equal part of each bucket",
    "sub_group_size": "offloaded states move in slices of zero.offload.buffer_mib",
    "stage3_gather_16bit_weights_on_model_save": "checkpoints hold whole tensors, whatever the stage",
    "stage3_max_live_parameters": "the weights of one unit are gathered ahead",
    "stage3_max_reuse_distance": "the weights of one unit are gathered ahead",
    **dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size",
                     "stage3_param_persistence_threshold", "allgather_partitions"), NO_BUCKETS),
    **dict.fromkeys(("offload_optimizer.pin_memory", "offload_param.pin_memory"), "copies are always pinned"),
}  # fmt: skip
DEEPSPEED: dict[str, Rule] = {
    "train_batch_size": lambda value: {"train.global_batch": int(value)},
    "train_micro_batch_size_per_gpu": lambda value: {"train.micro_batch": int(value)},
    "gradient_accumulation_steps": "follows from train.global_batch and train.micro_batch",
    "gradient_clipping": lambda value: {"train.clip": float(value)},
    "bf16.enabled": lambda value: {"train.precision": "bf16"} if value else {},
    "fp16.enabled": lambda value: {"train.precision": "fp16"} if value else {},
    "fp16.initial_scale_power": lambda value: {"loss_scale.initial": float(2**value)},
    "fp16.loss_scale_window": lambda value: {"loss_scale.window": int(value)},
    "fp16.hysteresis": lambda value: {"loss_scale.hysteresis": int(value)},
    "fp16.min_loss_scale": lambda value: {"loss_scale.min": float(value)},
    "fp16.loss_scale": "the loss scale is always dynamic",
    "optimizer.type": lambda value: {"optimizer.name": OPTIMIZERS[value.lower()]},
    "optimizer.params.lr": lambda value: {"optimizer.lr": float(value)},
    "optimizer.params.betas": lambda value: {"optimizer.betas": [float(each) for each in value]},
    "optimizer.params.eps": lambda value: {"optimizer.eps": float(value)},
    "optimizer.params.weight_decay": lambda value: {"optimizer.weight_decay": float(value)},
    "scheduler.type": lambda value: {"lr.schedule": SCHEDULES[value]},
    "scheduler.params.warmup_num_steps": lambda value: {"lr.warmup": int(value)},
    "scheduler.params.total_num_steps": lambda value: {"train.steps": int(value)},
    "scheduler.params.warmup_max_lr": lambda value: {"optimizer.lr": float(value)},
    "scheduler.params.warmup_min_lr": "the warm-up begins at zero",
    "scheduler.params.warmup_type": "the warm-up is linear",
    "steps_per_print": lambda value: {"run.log_every": int(value)},
    "tensorboard.enabled": lambda value: {"run.tensorboard": bool(value)},
    "wandb.enabled": lambda value: {"run.loggers": ["wandb"]} if value else {},
    "csv_monitor.enabled": lambda value: {"run.loggers": ["csv"]} if value else {},
    "elasticity.enabled": lambda value: {"faults.elastic": True} if value else {},
    "wall_clock_breakdown": "run.trace=true and `meshwright watch` show the times of a step",
    "flops_profiler.enabled": "`meshwright plan` and the MFU of every step say so",
    "activation_checkpointing.partition_activations": "with layout.sequence_parallel, ranks keep parts of activations",
    "activation_checkpointing.cpu_checkpointing": lambda value: {"recompute.mode": "full", "recompute.offload": True}
    if value else {},
    **{f"zero_optimization.{name}": rule for name, rule in ZERO.items()},
}  # fmt: skip

KINDS = {"bf16": "bf16", "fp16": "fp16"}
DECAYS = {"cosine": "cosine", "linear": "linear", "constant": "constant", "WSD": "wsd"}
CHOSEN = "kernels are chosen by the device"
LAUNCHERS = "is the launcher's: see `meshwright train --help`"
MEGATRON: dict[str, Rule] = {
    "tensor_model_parallel_size": lambda value: {"layout.tp": value},
    "pipeline_model_parallel_size": lambda value: {"layout.pp": value},
    "context_parallel_size": lambda value: {"layout.cp": value},
    "sequence_parallel": lambda value: {"layout.sequence_parallel": True},
    "micro_batch_size": lambda value: {"train.micro_batch": value},
    "global_batch_size": lambda value: {"train.global_batch": value},
    "rampup_batch_size": lambda value: {"train.ramp": [int(each) for each in value]},
    "train_iters": lambda value: {"train.steps": value},
    "bf16": lambda value: {"train.precision": "bf16"},
    "fp16": lambda value: {"train.precision": "fp16"},
    "fp8_format": lambda value: {"train.precision": "fp8"},
    "lr": lambda value: {"optimizer.lr": float(value)},
    "min_lr": lambda value: {"lr.min": float(value)},
    "lr_decay_style": lambda value: {"lr.schedule": DECAYS[value]},
    "lr_warmup_iters": lambda value: {"lr.warmup": value},
    "lr_warmup_fraction": lambda value: {"lr.warmup": f"{100 * float(value):g}%"},
    "adam_beta1": lambda value: {"optimizer.beta1": float(value)},
    "adam_beta2": lambda value: {"optimizer.beta2": float(value)},
    "adam_eps": lambda value: {"optimizer.eps": float(value)},
    "weight_decay": lambda value: {"optimizer.weight_decay": float(value)},
    "clip_grad": lambda value: {"train.clip": float(value)},
    "seed": lambda value: {"train.seed": value},
    "use_distributed_optimizer": lambda value: {"zero.stage": 1},
    "overlap_grad_reduce": lambda value: {"comm.overlap.gradients": True},
    "overlap_param_gather": lambda value: {"comm.overlap.weights": True},
    "tp_comm_overlap": lambda value: {"comm.overlap.tensor": True},
    "recompute_granularity": lambda value: {"recompute.mode": {"selective": "selective", "full": "full"}[value]},
    "recompute_activations": lambda value: {"recompute.mode": "selective"},
    "initial_loss_scale": lambda value: {"loss_scale.initial": float(value)},
    "loss_scale_window": lambda value: {"loss_scale.window": int(value)},
    "hysteresis": lambda value: {"loss_scale.hysteresis": value},
    "min_loss_scale": lambda value: {"loss_scale.min": float(value)},
    "save_interval": lambda value: {"checkpoint.every": value},
    "eval_interval": lambda value: {"run.eval_every": value},
    "log_interval": lambda value: {"run.log_every": value},
    "save": lambda value: {"run.dir": str(value)},
    "split": lambda value: {"data.split": [float(each) / 1000 for each in str(value).split(",")]},
    "reset_attention_mask": lambda value: {"data.reset_attention": True},
    "reset_position_ids": lambda value: {"data.reset_positions": True},
    "eod_mask_loss": lambda value: {"data.mask_eod": True},
    "load": "a run continues from run.dir; `meshwright import` reads the checkpoint, for train --from",
    "eval_iters": "run.eval_samples counts samples, not batches",
    "lr_decay_iters": "the rate decays to the last step, train.steps, unless lr.decay says otherwise",
    "num_layers_per_virtual_pipeline_stage": "layout.chunks counts the stages of a rank, not their layers",
    "tokenizer_type": "token files know their tokenizer",
    "vocab_file": "token files know their tokenizer", "merge_file": "token files know their tokenizer",
    "tokenizer_model": "token files know their tokenizer",
    "use_mcore_models": "there is one kind of model", "use_legacy_models": "there is one kind of model",
    "distributed_backend": "the device decides (comm.backend)", "num_workers": "samples are read ahead",
    "use_flash_attn": CHOSEN, "transformer_impl": CHOSEN, "attention_backend": CHOSEN,
    "no_masked_softmax_fusion": CHOSEN,
    "attention_softmax_in_fp32": "softmax is always in float32",
    "accumulate_allreduce_grads_in_fp32": "gradients accumulate in float32 (train.grad_dtype)",
    "ckpt_format": "there is one format", "use_checkpoint_args": "checkpoints hold their config",
    "num_experts": "mixtures are described by model.experts: see docs/experts.md",
    "no_load_optim": "train --from takes weights only",
    **dict.fromkeys(("nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port"), LAUNCHERS),
}  # fmt: skip
# Arguments of the model, which `model_values` reads.
SHAPE = (
    "num_layers", "hidden_size", "num_attention_heads", "group_query_attention", "num_query_groups", "kv_channels",
    "ffn_hidden_size", "vocab_size", "padded_vocab_size", "seq_length", "max_position_embeddings", "normalization",
    "norm_epsilon", "layernorm_epsilon", "swiglu", "openai_gelu", "position_embedding_type", "rotary_base",
    "rotary_percent", "use_rope_scaling", "rope_scaling_factor", "use_rotary_position_embeddings", "qk_layernorm",
    "untie_embeddings_and_output_weights", "init_method_std", "hidden_dropout", "attention_dropout", "add_qkv_bias",
    "rotary_seq_len_interpolation_factor", "add_bias_linear", "bias_gelu_fusion",
)  # fmt: skip
SEVERAL = ("data_path", "rampup_batch_size")  # options with several values
END = ";"
# Options that switch something off, and the argument that they set.
OFF = {
    "disable_bias_linear": "add_bias_linear", "no_bias_gelu_fusion": "bias_gelu_fusion",
    "no_position_embedding": "add_position_embedding",
}  # fmt: skip


def read_peer(source: str) -> Found:
    """Return the starting config of a DeepSpeed JSON file, of a Megatron-LM script, or of its arguments in one text."""
    if source.lstrip().startswith("--"):
        return from_megatron(source)
    path = Path(source)
    try:
        text = read_file(path).decode()
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read ({error}): name a ds_config.json, a script, or arguments") from None
    if not text.lstrip().startswith("{"):
        return from_megatron(text)
    try:
        value = parse_json(text)
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): correct it") from None
    return from_deepspeed(value)


def from_deepspeed(config: Mapping[str, Any]) -> Found:
    """Return the starting config of a DeepSpeed JSON config."""
    found = Found()
    leaves = _leaves(config)
    for name, value in leaves.items():
        if name.startswith("fp16.") and not leaves.get("fp16.enabled"):
            found.leave(name, "has no effect without fp16.enabled")
        else:
            apply(found, name, value, DEEPSPEED)
    return found


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def from_megatron(text: str) -> Found:
    """Return the starting config of Megatron-LM's arguments, in a text that may be a whole shell script."""
    args = arguments(text)
    found = Found()
    if not args:
        raise UserError(
            "the text holds no arguments such as --num-layers 24: name a DeepSpeed JSON or a Megatron script"
        )
    shape = {name: value for name, value in args.items() if name in SHAPE}
    if "num_layers" in args:
        # Arguments of Megatron's that depend on each other are read at once.
        values = model_values(shape, args.get("vocab_size", 0) or 0)
        found.take(", ".join(f"{name}={value}" for name, value in shape.items()),
                   {f"model.{key}": value for key, value in values.items()})  # fmt: skip
    for name, value in args.items():
        if name in DEMANDS and name not in MEGATRON:
            found.leave(f"{name}={value}", "there is no such model here")
        elif name == "data_path":
            _take_data(found, value)
        elif name not in SHAPE:
            apply(found, name, value, MEGATRON)
    betas = [found.values.pop(f"optimizer.beta{n}", usual) for n, usual in ((1, 0.9), (2, 0.999))]
    found.values["optimizer.betas"] = betas
    return found


def _take_data(found: Found, value: Any) -> None:
    """Take `--data-path`: prefixes, or weights and prefixes in turn."""
    words = [str(word) for word in value]
    if any(word.startswith("$") for word in words):
        found.leave("data_path", f"{' '.join(words)} has no value in the script: set data.prefixes")
        return
    weighted = len(words) > 1 and re.fullmatch(r"[\d.]+", words[0])
    keys: dict[str, Any] = {"data.prefixes": words[1::2] if weighted else words}
    if weighted:
        keys["data.weights"] = [float(word) for word in words[::2]]
    found.take("data_path", keys)


def arguments(text: str) -> dict[str, Any]:
    """Return the options of a command line or script by their names, with variables of the script replaced."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if not line.lstrip().startswith("#")]
    variables = dict(re.findall(r"^\s*(?:export\s+)?(\w+)=[\"']?([^\s\"'()]+)[\"']?\s*$", "\n".join(lines), re.M))
    text = re.sub(r"\$\{?(\w+)\}?", lambda match: variables.get(match.group(1), match.group(0)), "\n".join(lines))
    # Arguments in an assignment, ARGS="--lr 1" or ARGS=(--lr 1), count too. Its end ends the values of an option.
    words = re.sub(r"[\"'()]", f" {END} ", text).split()
    found: dict[str, Any] = {}
    for at, word in enumerate(words):
        match = re.fullmatch(r"--([a-z][\w-]*)(?:=(.*))?", word)
        if not match:
            continue
        name = match.group(1).replace("-", "_")
        values = [match.group(2)] if match.group(2) else []
        for value in words[at + 1 :] if not values else []:
            if value == END or value.startswith("--") or (values and name not in SEVERAL):
                break
            values.append(value)
        plain = [_plain(value) for value in values]
        single = (plain or [name not in OFF])[0]
        found[OFF.get(name, name)] = plain if plain and name in SEVERAL else single
    return found


def _plain(word: str) -> Any:
    """Return a number if the word is one."""
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
