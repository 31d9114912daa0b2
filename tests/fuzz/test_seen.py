"""Inputs that once ended in a traceback, in a page of text or never: each gets a sentence that names the mistake."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.data import unpack
from meshwright.data.conversations import read_records
from meshwright.errors import UserError
from meshwright.outside import DEEPEST, of_kind, parse_json
from meshwright.record import checkpoint_format as fmt
from tests.checkpoint.test_damage import sealed
from tests.fuzz.cases import SHARDED, STEP
from tests.fuzz.hostile import DEEP
from tests.fuzz.running import verdict

NESTED = "[" * DEEP + "]" * DEEP
LAUGHS = "".join(f"{name}: &{name} [{f'*{before},' * 9}]\n" for before, name in zip("abcdefg", "bcdefgh", strict=True))
PLAN = ["plan", "gpt2-124m", "--cluster", "h100-80g-dgx"]


@pytest.fixture
def here(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(good, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def said(words: list[str]) -> str:
    """Run a command that must refuse, and return its sentence."""
    assert verdict(words, 60.0, err := io.StringIO()) == ""
    return err.getvalue()


def first(value: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Change the first entry of a table."""
    name = next(iter(value))
    return value | {name: value[name] | changes}


# Changes to the values of a valid index, which gets a right checksum, and words of the sentence that each one causes.
INDEXES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "a step that is a word": (lambda i: {"step": "1"}, "step must be a whole number"),
    "samples below zero": (lambda i: {"consumed": -1}, "consumed must be a whole number"),
    "a world of none": (lambda i: {"world": 0}, "no rank"),
    "a config that is a list": (lambda i: {"config": []}, "config must be keys and values"),
    "a section that is a number": (lambda i: {"config": i["config"] | {"layout": 3}}, "config.layout"),
    "no model": (lambda i: {"config": {"data": {}}}, "no model"),
    "a counter too few": (lambda i: {"state": {"updates": 1}}, "state lacks loss_scale"),
    "a counter that is a list": (lambda i: {"state": i["state"] | {"updates": []}}, "updates"),
    "a tensor without a shape": (lambda i: {"tensors": i["tensors"] | {"x": {"dtype": "float32"}}}, "lacks shape"),
    "a shape of words": (lambda i: {"tensors": first(i["tensors"], shape=["a"])}, "shape[0] must be a whole number"),
    "a dtype that nobody has": (lambda i: {"tensors": first(i["tensors"], dtype="float3")}, "float3"),
    "a shape without end": (lambda i: {"tensors": first(i["tensors"], shape=[2**62, 2**62])}, "can't be of shape"),
    "a file's size in words": (lambda i: {"files": dict.fromkeys(i["files"], "big")}, "files."),
    "a block that is a number": (lambda i: {"blocks": [7]}, "a block must be a list"),
    "a block of two values": (lambda i: {"blocks": [["param/x", [0]]]}, "a block must be a list"),
    "a block of another tensor": (lambda i: {"blocks": [["nothing", *i["blocks"][0][1:]]]}, "outside of it"),
    "a block beyond its tensor": (
        lambda i: {"blocks": [[i["blocks"][0][0], [9999] * len(i["blocks"][0][1]), *i["blocks"][0][2:]]]}, "outside of",
    ),
    "something more": (lambda i: {"surprise": 1}, "surprise is unknown"),
}  # fmt: skip


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_of_another_kind(name: str, here: Path) -> None:
    change, word = INDEXES[name]
    sealed(here / STEP, **change(json.loads((here / STEP / fmt.INDEX).read_text())))
    for words in (["inspect", "run"], ["export", "run", "--to", "out"]):
        sentence = said(words)
        assert word in sentence and "index.json" in sentence and "use another checkpoint" in sentence


def test_brackets_within_brackets(here: Path) -> None:
    (here / "hf" / "config.json").write_text(NESTED)
    assert "config.json can't be read (it is nested too deeply)" in said(["import", "hf", "--to", "out"])
    (here / "sharded" / SHARDED).write_text(NESTED)
    assert "nested too deeply" in said(["import", "sharded", "--to", "out"])
    (here / "tokens.json").write_text(NESTED)
    assert "tokens.json" in said(["eval", "run"])
    # an optional file, which counts as absent if it can't be read
    (here / STEP / "generation_config.json").write_text(NESTED)
    assert verdict(["generate", "run", "--prompt-tokens=1", "--max-tokens=1"]) == ""
    (here / STEP / fmt.INDEX).write_text(NESTED)
    assert "index.json can't be read (it is nested too deeply)" in said(["inspect", "run"])


def test_depth_is_limited_before_python_is() -> None:
    assert parse_json("[" * DEEPEST + "]" * DEEPEST) is not None
    for depth in (DEEPEST + 1, 900, 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json("[" * depth + "]" * depth)


def test_kinds() -> None:
    kind = dict[str, tuple[int, str | None]]
    assert of_kind({"a": [1, None], "b": [2**62, "x"]}, kind, "it") == {"a": [1, None], "b": [2**62, "x"]}
    for wrong in ([], {"a": [1]}, {"a": [True, "x"]}, {"a": [-1, "x"]}, {"a": [2**63, "x"]}, {"a": [1.0, "x"]}):
        with pytest.raises(ValueError, match="^it"):
            of_kind(wrong, kind, "it")


@pytest.mark.parametrize(
    ("found", "word"),
    [({}, "lacks weight_map"), ({"weight_map": []}, "keys and values"), ({"weight_map": {"a": [1]}}, "must be a text"),
     ({"weight_map": {"a": "../x"}}, "incomplete"), ({"weight_map": {}}, "names no files")],
)  # fmt: skip
def test_weight_maps(found: Any, word: str, here: Path) -> None:
    (here / "sharded" / SHARDED).write_text(json.dumps(found))
    assert word in said(["import", "sharded", "--to", "out"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["config", "show", "config.yaml", "train.precision=" + "x" * 500_000], "is not one of fp64"),
        (["config", "show", "config.yaml", f"train.steps={'9' * 5000}"], "a number has 5,000 digits"),
        (["config", "show", "config.yaml", f"recompute.mode=every:{'9' * 5000}"], "is not one of none"),
        (["config", "check", "config.yaml", "train.ramp=[1,1,9]", f"train.micro_batch={2**60}",
          f"train.global_batch={2**60}"], "passes through 1 samples"),
        (["config", "show", "config.yaml", "model.layers=1000000000"], "use 65536 at most"),
        (["cost", "config.yaml", "--cluster=laptop", "--devices=2", f"layout.chunks={2**62}"], "more stages than"),
        ([*PLAN, "--devices=1000000000"], "--devices=1000000000 is more ranks than anybody has"),
        (["layout", "--world=1000000000"], "more ranks than anybody has"),
        (["scaling", *PLAN[1:], "--devices=8:1000000000000"], "more ranks than anybody has"),
        (["schedule", "--pp=2000000", "--micro-batches=1"], "too large a drawing"),
        (["dryrun", "config.yaml", f"model.vocab={2**61}"], "use a smaller model"),
        (["scaling", *PLAN[1:], "--devices=8", f"--global-batch={2**63}"], "more samples than anybody has"),
        (["bench", "step", "--micro-batch=1000000000"], "which no device holds at once"),
    ],
)  # fmt: skip
def test_sizes_and_long_values(words: list[str], expected: str, here: Path) -> None:
    assert expected in said(words)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a: &a [x,x]\n" + LAUGHS, "more than 100,000 values"), ("model: &m {layers: *m}", "more than 100,000 values"),
     ("a: &a {x: 1}\n" + LAUGHS.replace("[", "{<<: [").replace("]", "]}"), "more than 100,000 values"),
     ("[" * 50_000, "nested too deeply"), ("model: !!bool maybe", "is not what its tag"),
     ("# " + "x" * 2**20, "more than 1,048,576 bytes"), ("\x00", "special characters are not allowed")],
)  # fmt: skip
def test_yaml_made_to_hurt(text: str, expected: str, here: Path) -> None:
    (here / "config.yaml").write_text(text)
    assert expected in said(["config", "show", "config.yaml"])


@pytest.mark.parametrize("named", ["BertModel", 7, [7], [["GPT2LMHeadModel"]], {"a": 1}, [None], True])
def test_architectures_of_another_kind(named: Any, here: Path) -> None:
    for family in ({"model_type": "bert", "architectures": named}, {"model_type": "glm", "architectures": named}):
        sizes = dict.fromkeys(("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"), 4)
        (here / "hf" / "config.json").write_text(json.dumps(family | sizes))
        assert "in config.json" in said(["import", "hf", "--to", "out"])


@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_a_config_that_is_no_file(kind: str, here: Path) -> None:
    """Neither is opened: reading a device never ends, and opening a pipe waits for a writer."""
    path = here / "hf" / "config.json"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    assert "config.json can't be read (it is a device or a pipe" in said(["import", "hf", "--to", "out"])
    assert "config.json" in said(["train", "config.yaml", "model.hf=hf", "run.dir=other"])
    assert "no config file" in said(["plan", "hf", "--cluster", "laptop"])


def test_lines_without_end(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has a hole of many gigabytes, which must never be held in memory."""
    good = json.dumps({"text": "a"}) + "\n"
    (here / "long.jsonl").write_text(good)
    os.truncate(here / "long.jsonl", 2**36)
    found = said(["data", "prepare", "long.jsonl", "--out=made", "--workers=1", "--tokenizer", "bytes"])
    assert "long.jsonl line 2 has more than 268,435,456 bytes" in found
    with pytest.raises(UserError, match=r"long.jsonl, line 2 has more than"):
        list(read_records(here / "long.jsonl"))
    monkeypatch.setattr(unpack, "LARGEST_LINE", 1 << 22)
    with gzip.open(here / "long.jsonl.gz", "wb") as file:
        file.write(good.encode() * 100_000 + b"x" * 2**23)
    found = said(["data", "prepare", "long.jsonl.gz", "--out=made", "--workers=1", "--tokenizer", "bytes"])
    assert "long.jsonl.gz line 100001 has more than" in found


def test_a_list_on_one_line_may_be_long(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.data.conversations.LARGEST_LINE", 100)
    talk = {"messages": [{"role": "user", "content": "a" * 60}, {"role": "assistant", "content": "b" * 60}]}
    for name, text in (("list.json", json.dumps([talk, talk])), ("lines.jsonl", json.dumps(talk))):
        (here / name).write_text(text)
    assert len(list(read_records(here / "list.json"))) == 2
    with pytest.raises(UserError, match=r"lines.jsonl, line 1 has more than"):
        list(read_records(here / "lines.jsonl"))


def test_a_sentencepiece_model_of_no_bytes(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sentencepiece")
    (here / "empty.model").write_bytes(b"")
    (here / "a.txt").write_text("a")
    sentence = said(["data", "prepare", "a.txt", "--out=made", "--workers=1", "--tokenizer", "empty.model"])
    assert "empty.model is not a SentencePiece model (it is empty)" in sentence
    assert "LOG(" not in capfd.readouterr().err
