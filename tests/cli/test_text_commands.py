"""Tests of `meshwright generate` and `meshwright eval` with a Hugging Face folder, a checkpoint and a run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.checkpoint.save import Saver
from meshwright.cli.main import main
from meshwright.config.load import to_mapping
from meshwright.config.rules import READING_RULES, check
from meshwright.config.sections import Config
from meshwright.errors import UserError
from meshwright.infer.evaluate import config_with
from tests.interop.hf_models import save
from tests.support.oracle import make_trainer, small_config
from tests.support.token_files import write_documents
from tests.support.waiting import HANG_S

transformers = pytest.importorskip("transformers")

PROMPT = [7, 3, 41, 9]
WORDS = ["<s>", "</s>", *(f"w{n}" for n in range(2, 61))]


def write_tokenizer(folder: Path, size: int = 61) -> None:
    """Write a tokenizer that splits a text at blanks into words and puts <s> before it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = [*WORDS[:2], *(f"w{n}" for n in range(2, size))]
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="w2"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a Llama that transformers saved, its tokenizer, and a checkpoint that is imported from it."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    made = tmp_path_factory.mktemp("text")
    save("llama2", made / "hf", std=0.5)
    write_tokenizer(made / "hf")
    assert main(["import", str(made / "hf"), "--to", str(made / "checkpoint"), "--json"]) == 0
    return made


def write_tokens(prefix: Path, count: int, vocab: int) -> None:
    write_documents(prefix, [np.random.default_rng(0).integers(0, vocab, count)])


def theirs(folder: Path, ids: list[int], count: int) -> list[int]:
    """Return the tokens that transformers generates greedily. It stops at the end tokens of the folder's files."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf").eval()
    given = torch.tensor([ids])
    out = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return list(out[0, len(ids) :].tolist())


def text_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["generate", *words, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert set(result) == {"prompt_tokens", "tokens", "text"}
    return result


def set_end(folder: Path, end: Any) -> None:
    """Set the end tokens in the Hugging Face folder and in the checkpoint."""
    for path in (folder / "hf" / "generation_config.json", folder / "checkpoint" / "generation_config.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": end}))


def test_the_folder_and_its_checkpoint_write_what_transformers_writes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_end(folder, None)
    ids = ["--prompt-tokens", ",".join(map(str, PROMPT))]
    expected = theirs(folder, PROMPT, 24)
    assert len(set(expected)) > 4
    for source in ("hf", "checkpoint"):
        result = text_of(capsys, str(folder / source), *ids, "--max-tokens", "24")
        assert (result["prompt_tokens"], result["tokens"]) == (PROMPT, expected)
        assert result["text"].split() == [WORDS[n] for n in expected]
    for end in (expected[6], [60, expected[6], expected[9]]):
        set_end(folder, end)
        expected_end = theirs(folder, PROMPT, 24)
        assert len(expected_end) < 24
        for source in ("hf", "checkpoint"):
            assert text_of(capsys, str(folder / source), *ids)["tokens"] == expected_end


def test_a_text_begins_as_the_model_is_used_to(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_end(folder, None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "hf")
    ids = tokenizer("w5 w17")["input_ids"]
    result = text_of(capsys, str(folder / "hf"), "--prompt", "w5 w17", "--max-tokens", "8")
    assert result["prompt_tokens"] == ids == [0, 5, 17]
    assert result["tokens"] == theirs(folder, ids, 8)
    assert main(["generate", str(folder / "hf"), "--prompt", "w5 w17", "--max-tokens", "8"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"w5 w17{result['text']}\n" and "(8 tokens)" in captured.err


def on_ranks(nproc: int, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "meshwright", *words, "--nproc", str(nproc)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env=env)


def test_two_ranks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks generate the same sampled text as one rank, and stdout is one JSON document."""
    set_end(folder, None)
    words = [str(folder / "hf"), "--prompt-tokens", "7,3,41,9", "--max-tokens", "12", "--temperature", "0.7"]
    one = text_of(capsys, *words, "--seed", "3", "--top-p", "0.9")
    done = on_ranks(2, "generate", *words, "--seed", "3", "--top-p", "0.9", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == one
    assert one["tokens"] != text_of(capsys, *words, "--seed", "4")["tokens"]


@pytest.mark.wide
def test_a_mixture_of_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text with each expert sharded over two ranks, and the loss with expert parallelism, equal those of one rank."""
    experts = {"count": 4, "shared": 1, "router": "sigmoid", "aux_loss": 0.1}
    model = {"seq": 24, "mlp": "swiglu", "ffn": 32, "experts": experts, "init_std": 0.3}
    save_run(tmp_path, small_config(model=model, train={"precision": "fp32"}))
    write_tokens(tmp_path / "tokens", 24 * 4 + 1, 53)
    words = [str(tmp_path), "--prompt-tokens", "5,17,2", "--max-tokens", "12"]
    one = text_of(capsys, *words)
    assert len(set(one["tokens"])) > 3
    done = on_ranks(2, "generate", *words, "--json")
    assert done.returncode == 0 and json.loads(done.stdout) == one, done.stderr
    words = ["eval", str(tmp_path), "--data", str(tmp_path / "tokens"), "--samples", "4", "--json"]
    assert main(words) == 0
    loss = json.loads(capsys.readouterr().out)["loss"]
    done = on_ranks(2, *words, "layout.tp=2", "layout.ep=2", "layout.etp=1")
    assert done.returncode == 0 and json.loads(done.stdout)["loss"] == pytest.approx(loss, abs=1e-6), done.stderr


HEADS = {"hidden": 48, "heads": 12, "seq": 24}


@pytest.mark.parametrize(
    ("model", "words", "sentence"),
    [
        ({}, ["generate", "3"], "--nproc 3 does not divide the model's 4 heads: try --nproc 1, 2 or 4"),
        (
            HEADS | {"kv_heads": 4, "ffn": 96},
            ["generate", "6"],
            "--nproc 6 neither divides the model's 4 key-value heads nor is a multiple: try --nproc 1, 2, 4 or 12",
        ),
        (
            {"experts": {"count": 4, "ffn": 6}, "ffn": 48},
            ["generate", "4"],
            "--nproc 4 does not divide the experts' ffn of 6: try --nproc 1 or 2",
        ),
        (HEADS | {"ffn": 63}, ["generate", "4"], "--nproc 4 does not divide the model's ffn of 63: try --nproc 1 or 3"),
        ({}, ["generate", "2", "--prompt-tokens", "53"], "--prompt-tokens must lie between 0 and 52"),
        ({}, ["eval", "3", "layout.tp=2"], "a world of 3 ranks is not divisible"),
        ({}, ["eval", "3", "layout.tp=3"], "tp=3 does not divide heads=4: try layout.tp=1, 2 or 4"),
        ({}, ["eval", "2", "--data", "nowhere"], "nowhere"),
    ],
)
def test_what_ranks_can_not_do_is_told_before_they_start(
    model: dict[str, Any], words: list[str], sentence: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("meshwright.launch.launch.warm_up", lambda: None)
    monkeypatch.setattr("meshwright.launch.launch.launch", lambda *args: pytest.fail("ranks were started"))
    save_run(tmp_path, small_config(model={"seq": 24} | model))
    command, nproc, *more = words
    if command == "generate" and not more:
        more = ["--prompt-tokens", "1"]
    assert main([command, str(tmp_path), *more, "--nproc", nproc]) == 2
    assert sentence in capsys.readouterr().err


ONE_FAILS = """
import os, pathlib, sys, time
from meshwright.errors import UserError
from meshwright.launch.launch import launch

def body(begun):
    if os.environ["RANK"] == "1":
        begun.touch()
        time.sleep(60)
    while not begun.exists():
        time.sleep(0.01)
    raise UserError("give a shorter prompt")

if __name__ == "__main__":
    sys.exit(launch(2, 0, body, pathlib.Path(__file__).with_name("begun")))
"""


@pytest.mark.wide
def test_the_sentence_of_a_rank_stands_alone(tmp_path: Path) -> None:
    """The message of a rank is the only output, though stopping the other ranks would make torch print more."""
    (tmp_path / "one_fails.py").write_text(ONE_FAILS)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(tmp_path / "one_fails.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "meshwright: give a shorter prompt\n")


def test_the_end_of_the_context_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_end(folder, None)
    ids = ",".join(str(n % 61) for n in range(90))
    assert main(["generate", str(folder / "hf"), "--prompt-tokens", ids, "--json"]) == 0
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)["tokens"]) == 7 and "context of 96 tokens is full" in captured.err
    assert main(["generate", str(folder / "hf"), "--prompt-tokens", ",".join(["1"] * 97)]) == 2
    assert "97 tokens are more than the model's 96" in capsys.readouterr().err


def save_run(folder: Path, config: Config) -> None:
    saver = Saver(make_trainer(config), folder / "checkpoints", asynchronous=False, busy="wait", keep=0)
    saver.save()
    saver.wait_for_commit()


def test_a_run_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path, small_config(model={"seq": 24}))
    result = text_of(capsys, str(tmp_path), "--prompt-tokens", "5", "--max-tokens", "20")
    assert len(result["tokens"]) == 20 and result["text"] is None
    mistakes = {
        "no tokenizer is known": ["--prompt", "a"],
        "between 0 and 52": ["--prompt-tokens", "53"],
        "must be numbers": ["--prompt-tokens", "a"],
        "--max-tokens must be": ["--prompt-tokens", "1", "--max-tokens", "0"],
        "--top-p above": ["--prompt-tokens", "1", "--top-p", "0"],
        "--temperature must be 0 or at least": ["--prompt-tokens", "1", "--temperature", "nan"],
        "--temperature must be 0 or": ["--prompt-tokens", "1", "--temperature", "1e-320"],
        "--seed 10000000000000000000000 must lie": ["--prompt-tokens", "1", "--seed", str(10**22)],
    }
    for sentence, words in mistakes.items():
        assert main(["generate", str(tmp_path), *words]) == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ("w5 w90 w17", "the prompt has token 90, beyond the model's 61: the tokenizer is another model's"),
        ("w5 \udcff", "--prompt is not UTF-8"),
    ],
)
def test_a_prompt_that_the_model_can_not_read(
    prompt: str, sentence: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "checkpoint", tmp_path / "checkpoint")
    write_tokenizer(tmp_path / "checkpoint", size=100)
    assert main(["generate", str(tmp_path / "checkpoint"), "--prompt", prompt]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("source", ["hf", "checkpoint"])
def test_eval_is_the_loss_of_transformers(
    source: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokens(tmp_path / "tokens", 8 * 96 + 1, 61)
    # One batch is an epoch: each window is used once.
    words = ["--data", str(tmp_path / "tokens"), "train.global_batch=8"]
    assert main(["eval", str(folder / source), *words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf").eval()
    ids = torch.from_numpy(np.fromfile(tmp_path / "tokens.bin", dtype=np.uint16).astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=ids[:-1].view(8, 96)).logits.double()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[1:]).item()
    assert result["tokens"] == 8 * 96 and abs(result["loss"] - loss) < 1e-5
    assert abs(result["perplexity"] - np.exp(loss)) < 1e-4 * np.exp(loss)
    assert main(["eval", str(folder / source)]) == 2
    assert "--data" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("samples", "tokens"),
    [
        pytest.param([], 5 * 96 + 9, id="whole", marks=pytest.mark.wide),
        pytest.param(["--samples", "5"], None, id="five"),
        pytest.param(["--samples", "70"], 5 * 96 + 9, id="more than there are"),
    ],
)
def test_eval_looks_at_each_sample_once(
    samples: list[str], tokens: int | None, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each sample counts once, even if the samples do not fill the last round of micro-batches on all ranks."""
    write_tokens(tmp_path / "tokens", 5 * 96 + 10, 61)
    words = ["eval", str(folder / "hf"), "--data", str(tmp_path / "tokens"), "--json", *samples]
    found = []
    for more in ([], ["train.micro_batch=4"]):
        assert main([*words, *more]) == 0
        captured = capsys.readouterr()
        found.append(json.loads(captured.out))
        assert ("the data hold 6 samples" in captured.err) == ("70" in samples)
    if not samples:
        done = on_ranks(4, *words)
        found.append(json.loads(done.stdout))
    assert {(each["samples"], each["tokens"]) for each in found} == {(found[0]["samples"], found[0]["tokens"])}
    assert found[0]["samples"] == (5 if tokens is None else 6) and tokens in (None, found[0]["tokens"])
    assert max(abs(each["loss"] - found[0]["loss"]) for each in found) < 1e-6


def test_eval_of_each_part_of_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The loss of each split of a file with three documents, one per split, equals that of its document alone."""
    documents = list(np.random.default_rng(0).integers(0, 53, (3, 8 * 12 + 1)))
    write_documents(tmp_path / "all", documents)
    for part, document in zip(("train", "valid", "test"), documents, strict=True):
        write_documents(tmp_path / part, [document])
    data = {"prefixes": [str(tmp_path / "all")], "split": [1.0, 1.0, 1.0]}
    save_run(tmp_path / "run", small_config(model={"seq": 12, "vocab": 53}, data=data))

    def loss(*words: str) -> float:
        assert main(["eval", str(tmp_path / "run"), *words, "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["tokens"] == 8 * 12
        return float(result["loss"])

    losses = {part: loss("--split", part) for part in ("train", "valid", "test")}
    assert len({round(value, 6) for value in losses.values()}) == 3 and loss() == losses["valid"]
    for part, value in losses.items():
        assert loss("--data", str(tmp_path / part)) == pytest.approx(value, rel=1e-12)
    for words, sentence in (
        (["--split", "test", "data.split=[0.9,0.1,0.0]"], "the run has no test data (data.split=[0.9, 0.1, 0.0])"),
        (["--split", "test", "--data", str(tmp_path / "all")], "leave one of them out"),
        (["--split", "tset"], "choose from"),
    ):
        assert main(["eval", str(tmp_path / "run"), *words]) == 2
        assert sentence in capsys.readouterr().err


def test_eval_of_a_file_that_is_too_short(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tokens(tmp_path / "tokens", 96, 61)
    assert main(["eval", str(folder / "hf"), "--data", str(tmp_path / "tokens")]) == 2
    stderr = capsys.readouterr().err
    assert "tokens holds 96 tokens, and one sample of the model takes 97: name a longer file with --data" in stderr


def test_eval_of_data_that_are_masked_whole(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tokens(tmp_path / "tokens", 200, 1)
    words = ["eval", str(folder / "hf"), "--data", str(tmp_path / "tokens"), "data.mask_eod=true", "data.eod=0"]
    assert main(words) == 2
    assert "no token of the data counts in the loss" in capsys.readouterr().err


def test_eval_takes_any_number_of_ranks_and_any_device(tmp_path: Path) -> None:
    """The layout, the device and the back end of the training do not limit where the model is evaluated."""
    from meshwright.infer.reading import sections_of

    config = small_config(model={"seq": 24}, run={"device": "cuda"}, comm={"backend": "nccl"})
    for words, nproc in (([], 3), (["train.micro_batch=12"], 2), (["layout.tp=2"], 6)):
        found = config_with(to_mapping(config), sections_of(words, nproc))
        check(found, nproc, READING_RULES)
        assert (found.run.device, found.comm.backend) == ("auto", "auto")
    with pytest.raises(UserError, match="train.micro_batch"):
        config_with(to_mapping(config), sections_of(["train.micro_batch=many"], 2))
    config = small_config(model={"experts": {"count": 4}}, layout={"tp": 2, "ep": 4, "etp": 1})
    found = config_with(to_mapping(config), sections_of(["model.experts.capacity=2"], 1))
    check(found, 1, READING_RULES)
    assert (found.model.experts.count, found.model.experts.capacity, found.layout.ep) == (4, 2.0, 1)


@pytest.mark.parametrize(
    "trained",
    [
        {"train": {"precision": "bf16", "grad_dtype": "bf16"}},
        {"train": {"precision": "bf16"}, "optimizer": {"master_dtype": "bf16"}},
        {"optimizer": {"lr": 0.1}, "lr": {"min": 0.01, "warmup": 3}},
    ],
)
def test_rules_of_training_do_not_hold_for_a_model_that_is_only_read(trained: dict[str, Any]) -> None:
    from meshwright.infer.reading import sections_of

    found = config_with(to_mapping(small_config(**trained)), sections_of(["train.precision=fp32", "train.steps=1"], 1))
    check(found, 1, READING_RULES)
    assert found.train.precision == "fp32"


@pytest.mark.wide
def test_a_run_in_fp8_whose_tokens_are_no_multiple_of_16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its matrix products then run in bf16, also if the model is sharded."""
    save_run(tmp_path, small_config(model={"seq": 24}, train={"precision": "fp8", "micro_batch": 2}))
    result = text_of(capsys, str(tmp_path), "--prompt-tokens", "5,17,2", "--max-tokens", "4")
    assert len(result["tokens"]) == 4
    done = on_ranks(2, "generate", str(tmp_path), "--prompt-tokens", "5,17,2", "--max-tokens", "4", "--json")
    assert done.returncode == 0 and len(json.loads(done.stdout)["tokens"]) == 4, done.stderr
    write_tokens(tmp_path / "tokens", 24 * 4 + 1, 53)
    words = ["eval", str(tmp_path), "--data", str(tmp_path / "tokens"), "--samples", "4", "--json"]
    losses = []
    for more in ([], ["train.precision=bf16"]):
        assert main([*words, *more]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    cut = on_ranks(2, *words, "layout.tp=2", "layout.sequence_parallel=true")
    assert cut.returncode == 0, cut.stderr
    assert losses[0] == losses[1] and abs(json.loads(cut.stdout)["loss"] - losses[0]) < 1e-3
