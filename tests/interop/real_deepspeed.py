"""Runs DeepSpeed on CPUs: `python real_deepspeed.py OUT STAGE` trains a small Llama of transformers and saves it.

OUT gets the checkpoint and the config.json. OUT/weights.pt gets the weights as DeepSpeed itself collects them.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist

WORLD = 2


def main(rank: int, out: Path, stage: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_RANK=str(rank),
        LOCAL_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD), DS_ACCELERATOR="cpu",
    )  # fmt: skip
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from transformers import LlamaConfig, LlamaForCausalLM

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=61, max_position_embeddings=96, initializer_range=0.15,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    settings = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    for step in range(3):
        ids = torch.randint(61, (1, 16), generator=torch.Generator().manual_seed(WORLD * step + rank))
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(str(out))
    if rank == 0:
        config.save_pretrained(out)
        collected = get_fp32_state_dict_from_zero_checkpoint(str(out))
        torch.save({name: tensor.detach().float().clone() for name, tensor in collected.items()}, out / "weights.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(main, args=(Path(sys.argv[1]), int(sys.argv[2]), port), nprocs=WORLD)
