"""`prepare` writes the same token file from a text with any number of workers, and never an incomplete file."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from meshwright.cli.main import main
from meshwright.data import documents
from meshwright.data import prepare as module
from meshwright.data.prepare import prepare
from meshwright.data.token_file import TokenFile, read_metadata
from meshwright.data.tokenizers import load_tokenizer
from meshwright.errors import UserError
from tests.support.token_files import sequences
from tests.support.waiting import HANG_S, until


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder with small files, one long text and a .jsonl file. Some of the text is not ASCII."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    words = ["the", "quick", "fox", "naïve", "x = 1\n", "—", "def f():\n   ", "1234", "end.", "\n\n"]

    def text(count: int) -> str:
        return " ".join(words[i] for i in rng.integers(0, len(words), count))

    for number in range(12):
        (folder / f"{number:02d}.txt").write_text(text(50))
    (folder / "empty.txt").write_text("")
    (folder / "long.txt").write_text(text(60_000))
    lines = [json.dumps({"text": text(30) if number % 7 else ""}) for number in range(300)]
    (folder / "many.jsonl").write_text("\n".join(lines))
    return folder


def texts_of(prefix: str, tokenizer: str) -> list[str]:
    """Return the decoded documents of a token file, each of which must end with the end token."""
    file, loaded = TokenFile(prefix), load_tokenizer(tokenizer)
    encoded = sequences(file)
    assert all(ids[-1] == loaded.eod and loaded.eod not in ids[:-1] for ids in encoded)
    return [loaded.decode(ids[:-1]) for ids in encoded]


def expected(corpus: Path) -> list[str]:
    """Return the texts of the corpus that are not empty."""
    texts = [path.read_text() for path in sorted(corpus.glob("*.txt"))]
    texts += [json.loads(line)["text"] for line in (corpus / "many.jsonl").read_text().splitlines()]
    return [text for text in texts if text]


def test_bytes(corpus: Path, tmp_path: Path) -> None:
    summary = prepare([str(corpus)], str(tmp_path / "new" / "a"))
    assert texts_of(summary.prefix, "bytes") == expected(corpus)
    assert (summary.empty, summary.replaced, summary.dtype) == (1 + 43, 0, "uint16")
    assert summary.files == [f"{summary.prefix}{suffix}" for suffix in (".bin", ".idx", ".json")]
    assert sorted(os.listdir(tmp_path / "new")) == ["a.bin", "a.idx", "a.json"]
    metadata = read_metadata(summary.prefix)
    assert metadata is not None and metadata["tokenizer"] == "bytes" and metadata["tokenizer_file"] is None
    assert (metadata["vocab_size"], metadata["eod"]) == (257, 256)
    file = TokenFile(summary.prefix)
    assert (metadata["documents"], metadata["tokens"]) == (file.document_count, file.token_count)
    assert (summary.documents, summary.tokens) == (file.document_count, file.token_count)


@pytest.mark.parametrize("tokenizer", ["bytes", "train:400"])
def test_workers_and_tasks_make_no_difference(
    corpus: Path, tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepare([str(corpus)], str(tmp_path / "whole"), tokenizer=tokenizer, workers=1)
    monkeypatch.setattr(documents, "TASK_BYTES", 5000)
    for workers in (1, 2):
        parts = prepare([str(corpus)], str(tmp_path / f"parts{workers}"), tokenizer=tokenizer, workers=workers)
        assert parts.workers == workers
        for suffix in (".bin", ".idx"):
            assert Path(parts.prefix + suffix).read_bytes() == Path(whole.prefix + suffix).read_bytes()


def test_a_trained_tokenizer_lies_beside(corpus: Path, tmp_path: Path) -> None:
    prefix = str(tmp_path / "a")
    summary = prepare([str(corpus)], prefix, tokenizer="train:300")
    assert texts_of(prefix, f"{prefix}.tokenizer.json") == expected(corpus)
    metadata = read_metadata(prefix)
    assert metadata is not None and metadata["tokenizer_file"] == metadata["tokenizer"] == "a.tokenizer.json"
    assert metadata["vocab_size"] == summary.vocab_size == 300
    prepare([str(corpus)], str(tmp_path / "b"), tokenizer=f"{prefix}.tokenizer.json")
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()
    prepare([str(corpus)], prefix, tokenizer="bytes", force=True)
    assert sorted(path.name for path in tmp_path.glob("a.*")) == ["a.bin", "a.idx", "a.json"]


def test_training_on_a_part_of_much_text(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "TRAINING_BYTES", 100_000)
    monkeypatch.setattr(documents, "TASK_BYTES", 10_000)
    summary = prepare([str(corpus)], str(tmp_path / "a"), tokenizer="train:300")
    assert texts_of(summary.prefix, f"{summary.prefix}.tokenizer.json") == expected(corpus)
    assert "the tokenizer is trained on a sample: 0 MB, spread over all" in capsys.readouterr().err


def test_a_wrong_field_is_found_before_any_work(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "last.jsonl").write_text('\n{"content": "x", "url": "y"}\n')
    monkeypatch.setattr(module, "train_tokenizer", lambda *_: pytest.fail("no tokenizer must be trained before"))
    inputs = [str(corpus), str(tmp_path / "last.jsonl")]
    with pytest.raises(UserError, match=r"last.jsonl line 2 has no field 'text' \(it has 'content', 'url'\)"):
        prepare(inputs, str(tmp_path / "a"), tokenizer="train:300")
    assert not list(tmp_path.glob("a.*"))


def test_files_of_other_kinds_are_counted_or_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a.txt", "b.md", "c.md", "d.rst"):
        (folder / name).write_text(f"text of {name}")
    assert main(["data", "prepare", str(folder), "--out", str(tmp_path / "some")]) == 0
    assert "3 files of other kinds (2 .md, 1 .rst): --glob '*.md' takes such files as text" in capsys.readouterr().out
    words = ["--glob", "*.md", "--glob", "a*"]
    assert main(["data", "prepare", str(folder), "--out", str(tmp_path / "more"), *words]) == 0
    assert texts_of(str(tmp_path / "more"), "bytes") == ["text of a.txt", "text of b.md", "text of c.md"]
    assert "1 file of other kinds (1 .rst)" in capsys.readouterr().out
    assert main(["data", "prepare", str(folder), "--out", str(tmp_path / "none"), "--glob", "*.tex"]) == 2
    assert "has a name like *.tex: check --glob" in capsys.readouterr().err


def test_a_tokenizer_that_cannot_be_cut(corpus: Path, tmp_path: Path) -> None:
    """A tokenizer with an unknown pre-tokenizer is run by its library without cutting. Its vocabulary is large."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    library = Tokenizer(models.WordLevel({"the": 0, "fox": 70_000, "<eos>": 1, "?": 2}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "t.json"))
    summary = prepare([str(corpus)], str(tmp_path / "a"), tokenizer=str(tmp_path / "t.json"), workers=2)
    assert (summary.dtype, summary.vocab_size, summary.eod) == ("int32", 70_001, 1)
    file = TokenFile(summary.prefix)
    assert sequences(file)[0][:-1] == library.encode((corpus / "00.txt").read_text()).ids


def test_bytes_that_are_not_utf8_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ok \xff")
    (tmp_path / "b.txt").write_bytes(b"ok")
    summary = prepare([str(tmp_path)], str(tmp_path / "out"))
    assert summary.replaced == 1
    assert texts_of(summary.prefix, "bytes") == ["ok \ufffd", "ok"]


def test_existing_output_is_refused(corpus: Path, tmp_path: Path) -> None:
    prefix = str(tmp_path / "a")
    source = str(corpus / "00.txt")
    prepare([source], prefix)
    before = (tmp_path / "a.bin").read_bytes()
    with pytest.raises(UserError, match=r"a.idx exists: add --force"):
        prepare([source], prefix)
    assert (tmp_path / "a.bin").read_bytes() == before
    prepare([str(corpus / "01.txt")], prefix, force=True)
    assert (tmp_path / "a.bin").read_bytes() != before
    for name in ("b.bin", "c.json", "d.tokenizer.json"):
        (tmp_path / name).write_text("someone else's")
        with pytest.raises(UserError, match="--force"):
            prepare([source], str(tmp_path / name[0]))
    prepare([source], str(tmp_path / "c"), force=True)


def test_mistakes_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"nope": 1}\n')
    (tmp_path / "empty.txt").write_text("")
    out = tmp_path / "out"
    for inputs, options, words in (
        (["bad.jsonl"], {}, "line 2"),
        (["bad.jsonl"], {"workers": 2}, "line 2"),
        (["bad.jsonl"], {"tokenizer": "train:300"}, "line 2"),
        (["empty.txt"], {}, "no text"),
        (["none.txt"], {}, "no such input"),
        (["empty.txt"], {"workers": 0}, "--workers"),
        (["empty.txt"], {"tokenizer": "gpt9"}, "unknown tokenizer"),
        (["empty.txt"], {"tokenizer": "train:9"}, "too small"),
    ):
        with pytest.raises(UserError, match=words):
            prepare([str(tmp_path / name) for name in inputs], str(out / "a"), **options)  # type: ignore[arg-type]
        assert not out.exists() or os.listdir(out) == []
    for wrong in ("a.bin", "a.idx", "folder/"):
        with pytest.raises(UserError, match="prefix"):
            prepare([str(tmp_path / "empty.txt")], str(out / wrong) + ("/" if wrong.endswith("/") else ""))


def children(pid: int) -> list[int]:
    """Return all descendants of a process, from /proc."""
    below: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            below += [child, *children(child)]
    return below


def gone(pid: int) -> bool:
    """Return whether a process has ended. A zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@contextlib.contextmanager
def stuck(folder: Path, workers: int) -> Iterator[subprocess.Popen[str]]:
    """Start a `data prepare` that writes some tokens and then waits forever for a pipe without a writer."""
    (folder / "a.txt").write_text("some words to write, line by line\n" * 100_000)
    os.mkfifo(folder / "z.txt")
    inputs = [str(folder / name) for name in ("a.txt", "z.txt")]
    command = ["data", "prepare", *inputs, "--out", str(folder / "out"), "--workers", str(workers)]
    command = [sys.executable, "-m", "meshwright", *command]
    # A test run in a shell's background ignores SIGINT, and its children would too.
    listen = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    run = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=listen)
    partial = folder / "out.bin.partial"
    try:
        until(lambda: partial.exists() and partial.stat().st_size > 1 << 20, run, "nothing was written")
        yield run
    finally:
        run.kill()
        run.communicate()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_run_leaves_nothing_that_opens(tmp_path: Path, workers: int) -> None:
    with stuck(tmp_path, workers) as run:
        below = children(run.pid)
        assert len(below) >= (workers if workers > 1 else 0)
    until(lambda: all(map(gone, below)), why="workers outlived the process that started them")
    assert not (tmp_path / "out.idx").exists()
    with pytest.raises(UserError, match="no token file"):
        TokenFile(tmp_path / "out")
    prepare([str(tmp_path / "a.txt")], str(tmp_path / "out"))
    assert TokenFile(tmp_path / "out").token_count == 34 * 100_000 + 1
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_a_worker_that_dies_is_reported(tmp_path: Path) -> None:
    with stuck(tmp_path, workers=2) as run:
        workers = {below for child in children(run.pid) for below in children(child)}
        assert len(workers) == 2
        os.kill(workers.pop(), signal.SIGKILL)
        out, err = run.communicate(timeout=HANG_S)
    assert run.returncode == 2 and out == ""
    assert "try fewer with --workers" in err and err.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "z.txt"]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupted_run_cleans_up(tmp_path: Path, workers: int) -> None:
    with stuck(tmp_path, workers) as run:
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=HANG_S)
    assert run.returncode == 130 and out == ""
    assert err == "meshwright: interrupted\n"
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "z.txt"]
