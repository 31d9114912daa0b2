"""A model whose states don't fit on the device, trained with its optimizer states in host memory.

The result has the step time, the rate at which states were moved, and the rate of the bus in both directions at once.

    python benchmarks/gpu_offload.py --layers 40
"""

from __future__ import annotations

import time

import torch
from common import BenchParser, finish, gpu_or_leave

from meshwright.config.load import config_from
from meshwright.device import Device
from meshwright.dryrun.stand_ins import RandomTokens, draw_on_device
from meshwright.engine.context import build_context
from meshwright.engine.providers import forward_step, model_provider
from meshwright.engine.sharding.remainders import tensors_of
from meshwright.engine.step import Trainer
from meshwright.run.pretrain import build_modules


def bus_rate(device: torch.device, mib: int = 512) -> float:
    """Return the bytes per second and direction of copies in both directions at once."""
    host = [torch.zeros(mib << 18, pin_memory=True) for _ in range(2)]
    there = [torch.zeros(mib << 18, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(8):
        with torch.cuda.stream(streams[0]):
            there[0].copy_(host[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            host[1].copy_(there[1], non_blocking=True)
    torch.cuda.synchronize()
    return 8 * (mib << 20) / (time.perf_counter() - begin)


def main() -> None:
    parser = BenchParser(__doc__)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--buffer-mib", type=float, default=256.0)
    args = parser.parse(layers=2, steps=1)
    gpu_or_leave(args)
    config = config_from({
        "model": {
            "layers": args.layers, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 32000,
            "seq": 2048,
            "norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": False, "tied_embeddings": False,
        },
        "train": {"precision": "bf16", "global_batch": 4, "micro_batch": 4, "steps": 100, "compile": "false"},
        "zero": {"offload": {"optimizer": "cpu", "buffer_mib": args.buffer_mib}}, "data": {"prefixes": ["none"]},
        "recompute": {"mode": "full"},
    })  # fmt: skip
    device = Device.choose("cuda")
    rate = bus_rate(device.torch)
    begin = time.perf_counter()
    ctx = build_context(config, 0, 1, device)
    modules = build_modules(ctx, model_provider, draw_on_device)
    trainer = Trainer(ctx, modules, forward_step, RandomTokens(config.model.vocab, config.model.seq))
    weights = sum(b.size for b in trainer.data_parallel.buffers)
    shares = (part for state in trainer.states() for share in state.tensors for part in tensors_of(share))
    moved: int = sum(part.nbytes for part in shares)
    print(
        f"{weights / 1e9:.2f}B parameters: {weights * 18 / 2**30:.0f} GiB of weights, gradients and states, "
        f"{moved / 2**30:.0f} of them in host memory; set up in {time.perf_counter() - begin:.0f} s", flush=True,
    )  # fmt: skip
    rows = []
    for _ in range(args.steps):
        result = trainer.step()
        update = result.phases["optimizer"]
        share = moved / update / rate
        rows.append({"step": result.step, "step_s": result.step_time_s, "update_s": update, "of_bus": share})
        print(
            f"step {result.step}: loss {result.loss:.4f}, {result.step_time_s:.2f} s, update {update:.2f} s: "
            f"{moved / update / 1e9:.1f} GB/s each way, {moved / update / rate:.2f} of the bus's {rate / 1e9:.1f}",
            flush=True,
        )  # fmt: skip
    finish(args, {"parameters": weights, "peak_gib": torch.cuda.max_memory_allocated() / 2**30, "steps": rows})


if __name__ == "__main__":
    main()
