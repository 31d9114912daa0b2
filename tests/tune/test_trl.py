"""TRL's DPO on the same batch: its loss and the gradients of PEFT's adapters equal ours up to rounding.

The test is skipped without TRL (`pip install trl`, which brings datasets and pandas).
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.checkpoint.base import read_base
from meshwright.checkpoint.hf_files import HFFolder
from meshwright.checkpoint.load import Reader
from meshwright.interop.peft import import_adapters
from tests.interop import hf_models
from tests.support.oracle import load_into, make_trainer, small_config, true_gradients

SEQ, SAMPLES = 32, 4
CLOSE = 1e-5  # transformers computes norms and rotations in float32, whatever the dtype of its weights
Pair = dict[str, list[int]]


def pair(n: int) -> Pair:
    """Return a prompt with two answers of different lengths."""
    random = np.random.default_rng([3, n])
    lengths = {"prompt_ids": 2 + n % 3, "chosen_ids": 3 + n % 4, "rejected_ids": 2 + (n + 1) % 5}
    return {key: random.integers(1, 61, length).tolist() for key, length in lengths.items()}


class Packed:
    """The same pairs as packed samples, one pair in each."""

    def sample(self, n: int) -> dict[str, np.ndarray]:
        found = {key: np.zeros(SEQ, np.int64) for key in ("tokens", "labels", "loss_mask", "segments", "positions")}
        begin, one = 0, pair(n)
        for number, answer in enumerate((one["chosen_ids"], one["rejected_ids"])):
            ids = np.array(one["prompt_ids"] + answer)
            here = slice(begin, begin + len(ids) - 1)
            found["tokens"][here], found["labels"][here], found["segments"][here] = ids[:-1], ids[1:], number
            found["loss_mask"][here] = np.arange(1, len(ids)) >= len(one["prompt_ids"])
            found["positions"][here], begin = np.arange(len(ids) - 1), here.stop
        found["segments"][begin:], found["positions"][begin:] = 2, np.arange(SEQ - begin)
        return found


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(61)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")


def their_loss(model: Any, kind: str, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Run TRL's own trainer on one batch with adapters that are no longer zero, and save these."""
    datasets, peft, trl = (pytest.importorskip(name) for name in ("datasets", "peft", "trl"))

    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    args = trl.DPOConfig(
        str(folder / "trl"), beta=0.3, loss_type=kind, use_cpu=True, report_to=[], bf16=False, fp16=False,
        max_length=None, gradient_checkpointing=False, per_device_train_batch_size=SAMPLES,
    )  # fmt: skip
    texts = datasets.Dataset.from_list([{"prompt": "w2 w3", "chosen": "w4", "rejected": "w5"}] * 2)
    trainer = trl.DPOTrainer(model, args=args, train_dataset=texts, processing_class=tokenizer(), peft_config=lora)
    torch.manual_seed(1)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    trainer.model.save_pretrained(folder / "peft")
    trainer.model.to(torch.float64).eval()
    batch = trainer.data_collator([pair(n) for n in range(SAMPLES)])
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    grads = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    return float(loss.detach()), grads


@pytest.mark.wide
@pytest.mark.parametrize(("theirs", "ours"), [("sigmoid", "dpo"), ("ipo", "ipo")])
def test_loss_and_gradients_are_those_of_trl(theirs: str, ours: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    wanted, grads = their_loss(hf_models.save("llama2", base, torch.float32), theirs, tmp_path)
    import_adapters(tmp_path / "peft", tmp_path / "ours", str(base))
    tune = Reader(tmp_path / "ours").index.config["tune"] | {"loss": ours, "beta": 0.3}
    config = small_config(
        model=asdict(HFFolder(base, SEQ).model), data={"objective": "preference"}, tune=tune,
        train={"global_batch": SAMPLES, "micro_batch": 2},
    )  # fmt: skip
    trainer = make_trainer(config, data=Packed())
    read_base(trainer)
    load_into(trainer, Reader(tmp_path / "ours"), model_only=True)
    found = {record.name: grad for record, grad in true_gradients(trainer)}
    names = {"q": "self_attn.q_proj", "v": "self_attn.v_proj", "down": "mlp.down_proj"}
    for name, grad in found.items():
        _, layer, _, projection, factor = name.split(".")
        their = next(g for key, g in grads.items()
                     if f"layers.{layer}.{names[projection]}.lora_{factor[-1].upper()}." in key)  # fmt: skip
        assert torch.allclose(grad, their, rtol=CLOSE, atol=CLOSE * float(their.abs().max())), name
    assert len(found) == len(grads)
    assert trainer.step().loss == pytest.approx(wanted, rel=CLOSE)
