"""Fine-tuning of an 8B-shaped Llama on one GPU, compared with Hugging Face's model with PEFT and Liger in one run.

    python benchmarks/gpu_finetune.py                                        # every case of CASES
    python benchmarks/gpu_finetune.py --cases ours:lora:mb=4 hf:lora:mb=4    # who:kind:setting=value:...
    python benchmarks/gpu_finetune.py --model tiny --device cpu --steps 2    # a try without a GPU

Kinds: lora (rank 16 on every product of the blocks, over frozen bf16 weights), nf4 (the same over frozen weights in 4
bits; for hf with bitsandbytes, if that is importable), full (fp32 master weights and moments), and full-bf16 (weights,
gradients and moments in bf16).

Settings: `mb` is the number of sequences in a step. `recompute` is none or full (each block), and for ours also any
other recompute.mode. Ours takes any key of a config too (recompute.pieces=4). hf takes `documents`: with 1 it gets the
positions of the documents, and masks them as ours always does. Without it the sequences of hf are plainly causal, which
its attention computes faster.

Every case is a separate process, which prints one line of JSON: milliseconds of a step, tokens/s, and the largest
amount of allocated memory. transformers, peft and liger_kernel must be importable (PYTHONPATH). `liger` says whether
Liger's kernels ran. The last lines compare cases of one kind: tokens/s and memory of ours over those of hf. Ours in 4
bits is also compared with hf's LoRA over bf16 weights, which needs no bitsandbytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from common import BenchParser, finish, gpu_or_leave

from meshwright.bench.models import BENCH_MODELS, bench_config
from meshwright.bench.step import make_trainer
from meshwright.bench.timing import by_kind
from meshwright.config.load import config_from, set_key, to_mapping
from meshwright.device import Device
from meshwright.dryrun.stand_ins import RandomTokens
from meshwright.run.loop import LaunchAhead

RANK, WARM = 16, 3
ADAPTS = ("lora", "nf4")
CASES = [
    "ours:lora:mb=2", "hf:lora:mb=2", "ours:lora:mb=4", "hf:lora:mb=4",
    "ours:lora:mb=4:recompute=full", "hf:lora:mb=4:recompute=full",
    "ours:nf4:mb=4", "hf:nf4:mb=4", "ours:nf4:mb=4:recompute=full",
    "ours:full:mb=2:recompute=full", "hf:full:mb=2:recompute=full",
    "ours:full-bf16:mb=2:recompute=full", "hf:full-bf16:mb=2:recompute=full",
    "ours:full-bf16:mb=2", "hf:full-bf16:mb=2",
]  # fmt: skip
Measured = dict[str, Any]


def ours(kind: str, model: str, settings: dict[str, str], device: Device, steps: int) -> Measured:
    """Measure our step as `meshwright train` runs it on packed conversations."""
    micro_batch = int(settings.pop("mb", 1))
    sections: dict[str, Any] = {"data": {"prefixes": ["made"], "objective": "chat"}}
    sections["recompute"] = {"mode": settings.pop("recompute", "none")}
    if kind in ADAPTS:
        sections["tune"] = {"kind": "lora", "rank": RANK, "quantise": "nf4" if kind == "nf4" else "none"}
    elif kind == "full-bf16":
        sections["optimizer"] = {"master_dtype": "bf16", "state_dtype": "bf16"}
    train = {"grad_dtype": "bf16"} if kind not in ADAPTS else {}
    given = to_mapping(bench_config(model, "bf16", 1, micro_batch, train=train, **sections))
    for key, value in settings.items():
        set_key(given, f"{key}={value}")
    trainer = make_trainer(config_from(given), device)
    ahead = LaunchAhead(trainer, lambda step: step in (WARM, WARM + steps))
    losses = [ahead.next(False).loss for _ in range(WARM)]
    device.reset_peak()
    results = [ahead.next(False) for _ in range(steps)]
    device.synchronize()
    peak = device.peak_bytes()

    def two_steps() -> None:
        for launched in [trainer.launch(), trainer.launch()]:
            trainer.read(launched)

    kinds, kernels = by_kind(device, two_steps, 2)
    trained = sum(slot.view.numel() for buffer in trainer.data_parallel.trained for slot in buffer.slots)
    return {
        "step_ms": 1e3 * statistics.median(result.step_time_s for result in results),
        "peak_bytes": peak, "trained": trained, "kinds_ms": kinds,
        "kernels": [{"name": name, "calls": calls, "ms": ms} for name, calls, ms in kernels[:40]],
        "losses": losses + [each.loss for each in results],
    }  # fmt: skip


def hf(kind: str, model: str, settings: dict[str, str], device: Device, steps: int) -> Measured:
    """Measure Hugging Face's step as its Trainer runs it: bf16 autocast, clipping, torch's fused AdamW."""
    liger = device.kind == "cuda" and importlib.util.find_spec("liger_kernel") is not None
    module, trained = hf_model(kind, model, settings.get("recompute", "none") == "full", liger, device)
    m, micro_batch = BENCH_MODELS[model], int(settings.get("mb", 1))
    data = RandomTokens(m["vocab"], m["seq"], 0, ["positions"])
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def batch(number: int) -> dict[str, torch.Tensor]:
        samples = [data.sample(number * micro_batch + n) for n in range(micro_batch)]
        # Hugging Face shifts the labels itself, so the labels are the tokens.
        found = {"input_ids": torch.stack([torch.as_tensor(sample["tokens"]) for sample in samples])}
        found["labels"] = found["input_ids"]
        if settings.get("documents") == "1":
            found["position_ids"] = torch.stack([torch.as_tensor(sample["positions"]) for sample in samples])
        return {name: x.to(device.torch, non_blocking=True) for name, x in found.items()}

    def step(number: int) -> torch.Tensor:
        with torch.autocast(device.kind, torch.bfloat16):
            loss = module(**batch(number)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()  # type: ignore[no-any-return]

    losses = [step(number) for number in range(WARM)]
    device.synchronize()
    device.reset_peak()
    ms, begin = [], time.perf_counter()
    for number in range(WARM, WARM + steps):
        losses.append(step(number))
        device.synchronize()
        ms.append(1e3 * (time.perf_counter() - begin))
        begin = time.perf_counter()
    return {
        "step_ms": statistics.median(ms), "peak_bytes": device.peak_bytes(), "liger": liger,
        "trained": sum(parameter.numel() for parameter in trained), "losses": [float(loss) for loss in losses],
    }  # fmt: skip


def hf_model(kind: str, name: str, recompute: bool, liger: bool, device: Device) -> tuple[Any, list[torch.Tensor]]:
    """Return the model and its trained parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    m = BENCH_MODELS[name]
    config = LlamaConfig(  # type: ignore[call-arg]
        hidden_size=m["hidden"], num_hidden_layers=m["layers"], num_attention_heads=m["heads"],
        num_key_value_heads=m["kv_heads"], intermediate_size=m["ffn"], vocab_size=m["vocab"],
        max_position_embeddings=m["seq"], attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    torch.set_default_dtype(torch.float32 if kind == "full" else torch.bfloat16)
    with device.torch:
        module: Any = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if kind == "nf4":
        in_four_bits(module, device)
    if recompute:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if kind in ADAPTS:
        from peft import LoraConfig, get_peft_model

        if recompute:
            module.enable_input_require_grads()
        adapters = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        module = get_peft_model(module, adapters)
    module.train()
    return module, [parameter for parameter in module.parameters() if parameter.requires_grad]


def in_four_bits(module: Any, device: Device) -> None:
    """Replace the blocks' linear layers by bitsandbytes' in NF4, as transformers does when it loads a model in 4
    bits.
    """
    import bitsandbytes as bnb

    for block in module.model.layers:
        for parent in (block.self_attn, block.mlp):
            for name, linear in list(parent.named_children()):
                if isinstance(linear, torch.nn.Linear):
                    made = bnb.nn.Linear4bit(
                        linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16,
                        compress_statistics=True, quant_type="nf4",
                    )  # fmt: skip
                    made.weight = bnb.nn.Params4bit(linear.weight.data.cpu(), requires_grad=False, quant_type="nf4")
                    setattr(parent, name, made.to(device.torch))
    module.is_loaded_in_4bit = True  # PEFT then knows how to adapt the layers


WHO: dict[str, Callable[..., Measured]] = {"ours": ours, "hf": hf}


def run_case(case: str, model: str, kind_of_device: str, steps: int) -> Measured:
    who, kind, *rest = case.split(":")
    settings = dict(each.split("=", 1) for each in rest)
    device = Device.choose(kind_of_device)
    tokens = int(settings.get("mb", 1)) * BENCH_MODELS[model]["seq"]
    torch.set_float32_matmul_precision("high")
    try:
        found = WHO[who](kind, model, dict(settings), device, steps)
    except torch.cuda.OutOfMemoryError:
        return {"case": case, "model": model, "error": "out of memory"}
    peak = found.pop("peak_bytes")
    return {
        "case": case, "model": model, "device": device.name, "torch": torch.__version__,
        "tokens_per_s": 1e3 * tokens / found["step_ms"], "peak_gib": None if peak is None else peak / 2**30, **found,
    }  # fmt: skip


def in_its_own_process(case: str, args: argparse.Namespace) -> Measured:
    given = ["--one", case, "--model", args.model, "--device", args.device, "--steps", str(args.steps)]
    done = subprocess.run([sys.executable, os.path.abspath(__file__), *given], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"case": case, "model": args.model, "error": (done.stderr or done.stdout).strip()[-1500:]}
    found: Measured = json.loads(lines[-1])
    return found


def compared(results: list[Measured]) -> list[Measured]:
    """Return our cases over hf's with the same kind and settings, and our fastest case over hf's fastest of each
    kind.
    """
    done = {result["case"]: result for result in results if "error" not in result}
    found = []
    pairs = [(case, f"hf:{case.removeprefix('ours:')}") for case in done if case.startswith("ours:")]
    pairs += [(case, other.replace(":nf4:", ":lora:")) for case, other in pairs if ":nf4:" in case]
    kinds = sorted({case.split(":")[1] for case in done})
    for kind in kinds:
        of_kind = [[case for case in done if case.startswith(f"{who}:{kind}:")] for who in WHO]
        best = [max(cases, key=lambda case: float(done[case]["tokens_per_s"]), default="") for cases in of_kind]
        pairs.append((best[0], best[1]))
    for one, other in dict.fromkeys(pairs):
        if one in done and other in done:
            a, b = done[one], done[other]
            line: Measured = {"of": one, "over": other, "tokens_per_s": a["tokens_per_s"] / b["tokens_per_s"]}
            found.append(line | ({"memory": a["peak_gib"] / b["peak_gib"]} if a["peak_gib"] else {}))
    return found


def main() -> None:
    parser = BenchParser(__doc__)
    parser.add_argument("--cases", nargs="*", default=CASES)
    parser.add_argument("--model", default="8b", choices=sorted(BENCH_MODELS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--one", help="run this case in this process")
    args = parser.parse(model="tiny", steps=1)
    if args.one:
        print(json.dumps(run_case(args.one, args.model, args.device, args.steps)), flush=True)
        return
    if args.device == "cuda":
        gpu_or_leave(args)
    results = []
    for case in args.cases:
        begin = time.time()
        results.append(in_its_own_process(case, args) | {"seconds": round(time.time() - begin, 1)})
    results += compared(results)
    finish(args, results, rows=results)


if __name__ == "__main__":
    main()
