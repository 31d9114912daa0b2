"""Tests of the files that travel with a model, such as its tokenizer and chat template.

They go from its data, or from the folder that it was imported from, into runs, checkpoints and exports.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.record.companions import EXTRA_FILES, ORIGIN
from tests.cli.test_text_commands import write_tokenizer
from tests.interop.hf_models import save

TEXT = " ".join(f"w{n % 59 + 2}" for n in range(2000)) + "\n"
KEYS = ["train.global_batch=2", "run.device=cpu", "run.tensorboard=false", "run.eval_samples=2", "lr.schedule=constant"]
SIZES = ["model.layers=1", "model.hidden=16", "model.heads=2", "model.seq=16"]


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with text, and two tokenizers that give the same words different ids."""
    monkeypatch.chdir(tmp_path)
    for number in range(4):
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / f"{number}.txt").write_text(TEXT)
    for name, size in (("tok", 61), ("other", 60)):
        (tmp_path / name).mkdir()
        write_tokenizer(tmp_path / name, size)
    (tmp_path / "empty.yaml").write_text("")
    return tmp_path


def prepare(name: str, tokenizer: str) -> None:
    assert main(["data", "prepare", "text", "--out", f"data/{name}", "--tokenizer", tokenizer, "--workers", "1"]) == 0


def train(run: str, data: str, steps: int, *more: str) -> int:
    words = [f"run.dir={run}", f"data.prefixes=data/{data}", f"train.steps={steps}", "data.split=0.5,0.5,0"]
    return main(["train", "empty.yaml", "--nproc", "1", *words, *KEYS, *more])


@pytest.mark.parametrize("tokenizer", ["tok/tokenizer.json", "bytes", "train:300"])
def test_text_goes_in_and_out_wherever_the_run_is(
    tokenizer: str, there: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text still works after the data and the tokenizer's file are deleted, and from another working directory."""
    prepare("made", tokenizer)
    assert train("run", "made", 1, *SIZES, "model.vocab=300") == 0
    ends = json.loads((there / "data" / "made.json").read_text())["eod"]
    shutil.rmtree(there / "data")
    shutil.rmtree(there / "tok")
    monkeypatch.chdir("/")
    capsys.readouterr()
    assert main(["generate", str(there / "run"), "--prompt", "w5 w6", "--max-tokens", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] is not None
    (moved,) = (there / "run" / "checkpoints").glob("step-*")
    shutil.copytree(moved, there / "alone")
    assert main(["export", str(there / "alone"), "--to", str(there / "hf"), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)["beside"]
    assert written == ([] if tokenizer == "bytes" else ["tokenizer.json", "tokenizer_config.json"])
    assert json.loads((there / "hf" / "config.json").read_text())["eos_token_id"] == ends


def test_what_was_imported_stays_with_the_model(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The family, the chat template and the generation settings survive training and a resume.

    The run records the folder that its weights were imported from.
    """
    hf = there / "hf"
    save("mistral", hf, std=0.1)
    shutil.copytree(there / "tok", hf, dirs_exist_ok=True)
    (hf / "chat_template.jinja").write_text("{{ messages }}")
    (hf / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    assert main(["import", "hf", "--to", "imported", "--json"]) == 0
    model: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])["model"]
    given = {"model": {key: value for key, value in model.items() if key not in ("experts", "latent")} | {"seq": 16}}
    (there / "empty.yaml").write_text(json.dumps(given))
    prepare("own", "hf/tokenizer.json")
    prepare("foreign", "other/tokenizer.json")
    capsys.readouterr()

    assert train("run", "foreign", 1, "--from", "imported") == 2
    stderr = capsys.readouterr().err
    assert "data/foreign was made with another tokenizer than the model in imported" in stderr
    assert "--tokenizer imported/tokenizer.json, or set data.any_tokenizer=true" in stderr
    assert not (there / "run").exists(), "a refused run leaves nothing behind"
    assert train("run", "own", 1, "--from", "imported") == 0
    assert "begins run with the weights of imported, checkpoint verified" in capsys.readouterr().err
    shutil.rmtree(there / "imported")
    assert train("run", "own", 2) == 0
    assert json.loads((there / "run" / "run.json").read_text())["from"] == "imported"
    assert main(["export", "run", "--to", "out", "--json"]) == 0
    written = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert written["family"] == "mistral" and written["step"] == 2
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} <= set(written["beside"])
    for name in EXTRA_FILES:
        if (hf / name).exists():
            assert (there / "out" / name).read_bytes() == (hf / name).read_bytes(), name

    for words in (["eval", "run", "--data", "data/foreign"], ["train", "empty.yaml"]):
        refused = main(words) if words[0] == "eval" else train("run", "foreign", 3)
        assert refused == 2 and "data/foreign was made with another tokenizer" in capsys.readouterr().err, words
    for word, code in (("other", 2), ("bytes", 2), ("hf", 0)):
        assert main(["generate", "run", "--prompt", "a", "--max-tokens", "1", "--tokenizer", word]) == code
        stderr = capsys.readouterr().err
        is_named = f"--tokenizer {word}" in stderr and "is another tokenizer than that" in stderr
        assert is_named == (code == 2), stderr
    assert main(["eval", "run", "--data", "data/foreign", "data.any_tokenizer=true"]) == 0
    assert train("run", "foreign", 3, "data.any_tokenizer=true") == 0
    newest = there / "run" / "checkpoints" / "step-00000003"
    assert (newest / "tokenizer.json").read_bytes() == (there / "other" / "tokenizer.json").read_bytes()
    assert not (newest / "chat_template.jinja").exists(), "it belonged to the replaced tokenizer"
    assert json.loads((there / "run" / "companions" / "companions.json").read_text())["from"] == "imported"
    assert (newest / ORIGIN).exists(), "the family stays"


def make_folder(there: Path) -> dict[str, bytes]:
    """Write a Hugging Face folder `hf` with everything that may lie beside its weights, and return these files."""
    save("mistral", there / "hf", std=0.1)
    shutil.copytree(there / "tok", there / "hf", dirs_exist_ok=True)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "w3"}
    (there / "hf" / "tokenizer_config.json").write_text(json.dumps(settings))
    (there / "hf" / "chat_template.jinja").write_text("{{ messages }}")
    (there / "hf" / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    return {name: (there / "hf" / name).read_bytes() for name in EXTRA_FILES if (there / "hf" / name).exists()}


LORA = ["tune.kind=lora", "tune.rank=2"]
WAYS = {
    "model.hf": [],
    "--from": ["--from", "hf"],
    "import": ["--from", "imported"],
    "model.hf, adapted": LORA,
    "--from, adapted": [*LORA, "--from", "hf"],
    "tune.base": [*LORA, "tune.base=hf"],
}


def test_every_way_in_keeps_the_same_companions(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And refuses data of another tokenizer, names the weights, and begins with the same loss."""
    files = make_folder(there)
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"} <= set(files)
    assert main(["import", "hf", "--to", "imported"]) == 0
    (there / "empty.yaml").write_text("model: {hf: hf, seq: 16}")
    prepare("own", "hf/tokenizer.json")
    prepare("foreign", "other/tokenizer.json")
    losses = {}
    for number, (way, words) in enumerate(WAYS.items()):
        capsys.readouterr()
        assert train(f"refused{number}", "foreign", 1, *words) == 2, way
        assert "data/foreign was made with another tokenizer than the model in" in capsys.readouterr().err, way
        assert not (there / f"refused{number}").exists(), way
        assert train(f"run{number}", "own", 1, *words) == 0, way
        said = capsys.readouterr().err
        named = "the weights of imported, checkpoint verified" if way == "import" else "weights: those of hf ("
        assert named in said and "samples of 16 tokens (model.seq" in said, (way, said)
        for folder in ("companions", "checkpoints/step-00000001"):
            there_now = {name: (there / f"run{number}" / folder / name).read_bytes() for name in files}
            assert there_now == files, (way, folder)
        losses[way] = json.loads((there / f"run{number}" / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert len({round(loss, 5) for loss in losses.values()}) == 1, losses


def test_inspect_finds_a_changed_tokenizer(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare("made", "tok/tokenizer.json")
    assert train("run", "made", 1, *SIZES, "model.vocab=300") == 0
    (checkpoint,) = Path("run/checkpoints").glob("step-*")
    assert main(["inspect", "run"]) == 0
    content = (checkpoint / "tokenizer.json").read_text()
    for changed in (content.replace('"vocab"', '"vocaB"'), content + " ", content[:-9]):
        (checkpoint / "tokenizer.json").write_text(changed)
        expected = 0 if changed.strip() == content.strip() else 2
        capsys.readouterr()
        assert main(["inspect", "run"]) == expected
        assert ("tokenizer.json was changed after" in capsys.readouterr().err) == (expected == 2)
        assert main(["inspect", "run", "--no-verify"]) == 0


def test_a_base_stays_the_base_beside_another_folder_of_sizes(there: Path) -> None:
    """`model.hf` gives the sizes; the frozen weights are those of `tune.base`, in the first step too."""
    make_folder(there)
    save("mistral", there / "drawn", std=0.3)
    (there / "empty.yaml").write_text("model: {hf: drawn, seq: 16}")
    prepare("own", "tok/tokenizer.json")
    losses = []
    for run, words in (("one", ["tune.base=hf"]), ("two", ["tune.base=hf", "model.hf=hf"])):
        assert train(run, "own", 1, *LORA, *words) == 0
        losses.append(json.loads((there / run / "metrics.jsonl").read_text().splitlines()[0])["loss"])
    assert losses[0] == losses[1]


def test_a_folder_of_other_sizes_is_refused(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("llama2", there / "hf")
    prepare("own", "tok/tokenizer.json")
    assert train("run", "own", 1, *SIZES, "model.vocab=61", "--from", "hf") == 2
    assert "hf has no final_norm.bias of shape [16], so it is of another model" in capsys.readouterr().err
    shutil.copytree(there / "hf", there / "again")
    words = ["--from", "hf", "tune.base=again", *LORA, "model.hf=hf", "model.seq=16"]
    assert train("run", "own", 1, *words) == 2
    assert "--from hf and tune.base=again name two models" in capsys.readouterr().err
