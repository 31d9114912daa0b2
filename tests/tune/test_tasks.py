"""lm-eval's tasks: results with our model equal those of its transformers backend, on several layouts.

Without lm-eval these tests are skipped, except those that score texts on any layout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from meshwright.cli.main import main
from meshwright.infer.scoring import Continuation, Score, scores
from tests.cli.test_text_commands import write_tokenizer
from tests.interop.hf_models import save
from tests.support.oracle import make_trainer, small_config
from tests.support.ranks import run_ranks

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"layout": {"tp": 2, "sequence_parallel": True}}),
    (2, {"layout": {"pp": 2}}),
    (2, {"layout": {"cp": 2}}),
    (2, {}),
]


def texts() -> list[Continuation]:
    random = np.random.default_rng(5)
    return [Continuation(random.integers(0, 53, 3 + n).tolist(), 1 + n % 3) for n in range(12)]


def scored(rank: int, world: int, cases: list[dict[str, Any]]) -> list[list[Score]]:
    found = []
    for case in cases:
        config = small_config(model={"position": "rope", "seq": 16}, **case)
        trainer = make_trainer(config, rank, world)
        for parameter in trainer.modules[0].parameters():
            parameter.data.mul_(2.0)
        found.append(scores(trainer.ctx, trainer.modules, texts()))
    return found


def test_scores_are_those_of_each_text_alone() -> None:
    trainer = make_trainer(small_config(model={"position": "rope", "seq": 16}))
    (module,) = trainer.modules
    for parameter in module.parameters():
        parameter.data.mul_(2.0)
    for text, score in zip(texts(), scores(trainer.ctx, [module], texts()), strict=True):
        with torch.no_grad():
            hidden, _ = module.trunk({"tokens": torch.tensor([text.ids[:-1]])})
            logits = F.log_softmax(module.head.logits(hidden)[-text.scored :, :53], 1)
        labels = torch.tensor(text.ids[-text.scored :])
        assert score.logp == pytest.approx(float(logits.gather(1, labels[:, None]).sum()), rel=1e-12)
        assert score.greedy == bool((logits.argmax(1) == labels).all())


@pytest.mark.wide
def test_every_layout_scores_alike() -> None:
    (wanted,) = scored(0, 1, [{}])
    for ranks in run_ranks(2, scored, [case for _, case in LAYOUTS], deadline=200.0):
        for found in ranks:
            assert [each.greedy for each in found] == [each.greedy for each in wanted]
            assert [each.logp for each in found] == pytest.approx([each.logp for each in wanted], rel=1e-10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Llama and three tasks with a few questions: choosing an answer, writing one, and the likelihood of a
    text.
    """
    pytest.importorskip("lm_eval")
    found = tmp_path_factory.mktemp("tasks")
    save("llama2", found / "hf", std=0.5, max_position_embeddings=64, eos_token_id=1)
    write_tokenizer(found / "hf")
    words_of = Tokenizer.from_file(str(found / "hf" / "tokenizer.json"))
    words_of.add_special_tokens(["<s>", "</s>"])
    words_of.save(str(found / "hf" / "tokenizer.json"))
    random = np.random.default_rng(2)

    def words(count: int) -> str:
        return " ".join(f"w{n}" for n in random.integers(2, 61, count))

    lines = [
        {"question": words(2 + n % 5), "choices": [words(1 + (n + k) % 3) for k in range(3)], "answer": n % 3,
         "text": words(20 + 9 * n)}
        for n in range(12)
    ]  # fmt: skip
    (found / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(found / "data.jsonl")}},
              "test_split": "test", "doc_to_text": "{{question}}"}  # fmt: skip
    tasks: dict[str, dict[str, Any]] = {
        "choose": {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
                   "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]},
        "write": {"output_type": "generate_until", "doc_to_target": "{{text}}", "metric_list": [{"metric": "bleu"}],
                  "generation_kwargs": {"until": ["w7", "w9"], "max_gen_toks": 12, "do_sample": False}},
        "read": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
                 "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}]},
    }  # fmt: skip
    (found / "tasks").mkdir()
    for name, task in tasks.items():
        (found / "tasks" / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **task}))
    return found


def numbers(results: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of all tasks, without the errors that a bootstrap estimates."""
    return {f"{task} {name}": value for task, found in results.items() for name, value in found.items()
            if isinstance(value, float) and "stderr" not in name}  # fmt: skip


@pytest.mark.wide
@pytest.mark.parametrize("layout", [(), ("--nproc", "2", "layout.tp=2")])
def test_results_are_those_of_lm_evals_transformers_backend(folder: Path, layout: tuple[str, ...]) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    tasks = ["choose", "write", "read"]
    wanted = simple_evaluate(
        "hf", {"pretrained": str(folder / "hf"), "dtype": "float32"}, tasks=tasks, device="cpu", batch_size=4,
        task_manager=TaskManager(include_path=str(folder / "tasks")), log_samples=False, bootstrap_iters=0,
    )["results"]  # fmt: skip
    command = [sys.executable, "-m", "meshwright", "eval", str(folder / "hf"), "--tasks", ",".join(tasks),
               "--task-folder", str(folder / "tasks"), "--json", *layout, "train.precision=fp32"]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(numbers(wanted)) >= 5 and numbers(found["results"]) == pytest.approx(numbers(wanted), rel=1e-5)


def test_what_can_not_be_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("llama2", tmp_path / "hf")
    assert main(["eval", str(tmp_path / "hf"), "--tasks", "choose"]) == 2
    assert "no tokenizer is known" in capsys.readouterr().err
    write_tokenizer(tmp_path / "hf")
    assert main(["eval", str(tmp_path / "hf"), "--tasks", "choose", "--data", "d"]) == 2
    assert "brings its own data" in capsys.readouterr().err
