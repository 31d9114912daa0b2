"""Tests of `meshwright data prepare` and `data show`: summary, JSON, progress, errors, and a start without torch."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.data.token_file import TokenFile
from meshwright.show.progress import progress


def data(*options: str | Path) -> int:
    return main(["data", *map(str, options)])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("one document of some words")
    (tmp_path / "in" / "b.jsonl").write_text('{"text": "two"}\n{"text": "three"}\n{"text": ""}\n')
    return tmp_path / "in"


def test_summary(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert data("prepare", text, "--out", tmp_path / "out" / "a") == 0
    captured = capsys.readouterr()
    assert captured.err == f"next: meshwright init --data {tmp_path / 'out' / 'a'}\n"
    assert "documents   3 (1 empty left out) from 2 files" in captured.out
    assert "tokens      37 as uint16" in captured.out
    assert "vocabulary  257, documents end with token 256 (bytes)" in captured.out
    for suffix in (".bin", ".idx", ".json"):
        assert f"wrote       {tmp_path / 'out' / 'a'}{suffix} (" in captured.out


def test_summary_of_a_selection(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (text / "c.jsonl").write_text('{"body": "Once. Twice."}\n' * 3 + '{"body": "short"}\n')
    options = ("--field", "body", "--min-chars", "6", "--max-chars", "99", "--dedup", "--sentences")
    assert data("prepare", text / "c.jsonl", "--out", tmp_path / "a", *options) == 0
    stdout = capsys.readouterr().out
    assert "documents   1 (1 too short or long, 2 seen before left out) from 1 file\nsentences   2\n" in stdout


def test_json(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert data("prepare", text, "--out", tmp_path / "a", "--tokenizer", "train:300", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) >= {"documents", "tokens", "vocab_size", "eod", "mb_per_s", "seconds", "files"}
    file = TokenFile(tmp_path / "a")
    assert (result["documents"], result["tokens"]) == (file.document_count, file.token_count)
    assert [Path(path).name for path in result["files"]] == ["a.bin", "a.idx", "a.tokenizer.json", "a.json"]


def test_a_warning_for_bad_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff")
    assert data("prepare", tmp_path / "a.txt", "--out", tmp_path / "a", "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["replaced"] == 1
    assert captured.err == "meshwright: warning: 1 document holds bytes that are not UTF-8, replaced by U+FFFD\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", "ACTION"),
        ("prepare", "required"),
        ("prepare stdlib", "--out"),
        ("prepair stdlib --out a", "invalid choice"),
        ("prepare none.txt --out a", "no such input 'none.txt'"),
        ("prepare stdlib --out a --tokenizer gpt9", "unknown tokenizer 'gpt9'"),
        ("prepare stdlib --out a --tokenizer train:many", "train:8192"),
        ("prepare stdlib --out a --tokenizer none/tokenizer.json", "no tokenizer at"),
        ("prepare stdlib --out a --workers 0", "give 1 or more"),
        ("prepare stdlib --out a.bin", "give a"),
    ],
)
def test_mistakes_are_one_sentence(
    options: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert data(*options.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("meshwright: ") and captured.err.count("\n") == 1
    assert words in captured.err


def test_existing_output(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("prepare", text, "--out", tmp_path / "a")
    assert [data(*options), data(*options), data(*options, "--force")] == [0, 2, 0]
    assert "--force" in capsys.readouterr().err


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--help"], ["prepare", "--help"]):
        with pytest.raises(SystemExit) as done:
            data(*options)
        assert done.value.code == 0
        assert "meshwright data prepare stdlib" in capsys.readouterr().out


def test_no_torch(text: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from meshwright.cli.main import main; code = main(sys.argv[1:]); "
        "import meshwright.data.stream; sys.exit(code or 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", script, "data", "prepare", str(text), "--out", str(tmp_path / "a"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("meshwright.show.progress.time.monotonic", lambda: now[0])
    for step, lines in ((1.0, 0), (15.0, 3)):
        stream = io.StringIO()
        with progress("encoding", 4_000_000, stream) as advance:
            for _ in range(3):
                now[0] += step
                advance(1_000_000)
        assert stream.getvalue().count("\n") == stream.getvalue().count("encoding") == lines
    assert "encoding 75 %, 3.0 of 4.0 MB, 0.1 MB/s, 0:15 left" in stream.getvalue()


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    with progress("encoding", 4_000_000, stream) as advance:
        advance(3_000_000)
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "encoding" in drawn and "75%" in drawn and "3.0/4.0 MB" in drawn
    assert stream.getvalue().endswith("\x1b[2K"), "the bar is erased"


def test_show_prints_a_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The input with the predicted tokens filled in is the original text."""
    (tmp_path / "a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20)
    assert data("prepare", tmp_path / "a.txt", "--out", tmp_path / "a") == 0
    config = tmp_path / "bert.yaml"
    config.write_text(
        "model: {kind: bert, layers: 1, hidden: 8, heads: 2, vocab: 261, seq: 64}\n"
        f"data: {{prefixes: ['{tmp_path / 'a'}'], split: [1, 0, 0]}}\n"
    )
    capsys.readouterr()
    assert data("show", config, "--sample", "3", "--json") == 0
    sample = json.loads(capsys.readouterr().out)
    assert data("show", config, "--sample", "3") == 0
    heading, shown = capsys.readouterr().out.rstrip("\n").split("\n")
    count = sum(sample["loss_mask"])
    kinds = r"\((\d+) masked, (\d+) changed, (\d+) kept"
    words = re.match(rf"sample 3 of train: (\d+) tokens of 64, (\d+) to predict {kinds}", heading)
    assert words is not None and int(words[2]) == count == sum(int(words[n]) for n in (3, 4, 5))
    assert int(words[1]) == sample["segments"].count(0)
    assert heading.endswith("swapped") == bool(sample["swapped"])
    text = re.sub(r"\{(?:[^{}=]*=)?([^{}=]*)\}", r"\1", shown)
    _, first, second, _ = re.split(r"\[CLS\] |\[SEP\] ?", text)
    whole = second + first if sample["swapped"] else first + second
    assert len(whole) == int(words[1]) - 3 and whole in "The quick brown fox jumps over the lazy dog. " * 3
    assert data("show", config, "model.kind=gpt", "--split", "train", "data.reset_attention=true") == 0
    assert "sample 0 of train: 64 tokens, of which 64 have a loss, 1 document apart" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sample", "-1"], "--sample -1 must not be negative"),
        (["--split", "test"], "leaves no test data"),
        (["model.vocab=260"], "model.vocab=260 leaves no room for the special tokens [257, 258, 259, 260]"),
        (["layout.cp=2"], "layout.cp=2 can't be combined with model.kind=bert yet: set layout.cp=1"),
        (["data.objective=causal"], "model.kind=bert learns masked tokens, and data.objective is causal"),
        (["model.position=alibi"], "model.position=alibi looks back only"),
        (["model.token_types=1"], "model.token_types=1 can't tell two segments apart"),
        (["data.mask_eod=true"], "data.mask_eod=true has no effect with data.objective=masked"),
        (["model.kind=gpt", "model.pooler=true"], "model.pooler=True has no effect with model.kind=gpt"),
        (["data.masked.specials=[1,2,2,3]"], "must be four different ids"),
        (["data.masked.share=1.5"], "data.masked.share=1.5 must be below 1"),
    ],
)
def test_mistakes_in_masked_data(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("some words")
    assert data("prepare", tmp_path / "a.txt", "--out", tmp_path / "a") == 0
    config = tmp_path / "bert.yaml"
    config.write_text(
        "model: {kind: bert, layers: 1, hidden: 8, heads: 2, vocab: 261, seq: 64}\n"
        f"data: {{prefixes: ['{tmp_path / 'a'}'], split: [1, 0, 0]}}\n"
    )
    assert data("show", config, *words) == 2
    assert message in capsys.readouterr().err
