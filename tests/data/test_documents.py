"""Tests of reading inputs into documents: which files are found, how they are cut into tasks, and errors in them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.data import documents
from meshwright.data.documents import ByteRange, DocumentPart, find_files, plan_tasks, read_documents
from meshwright.errors import UserError


def parts_of(path: Path, field: str = "text") -> list[DocumentPart]:
    """Return the parts of a file's documents, in all of its tasks."""
    (source,) = find_files([str(path)])
    tasks = plan_tasks([source], re.compile(rb"\n"))
    return [part for task in tasks for span in task for part in read_documents(span, field)]


def texts(path: Path, field: str = "text") -> list[str]:
    return [part.text for part in parts_of(path, field)]


def test_folders_are_sorted_and_inputs_keep_their_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.jsonl", "sub/z.txt", "sub/deep/y.jsonl", "sub/skip.md", "c.TXT"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    found = find_files([str(tmp_path / "sub" / "z.txt"), str(tmp_path)])
    names = [Path(source.path).relative_to(tmp_path).as_posix() for source in found]
    assert names == ["sub/z.txt", "a.jsonl", "b.txt", "sub/z.txt", "sub/deep/y.jsonl"]
    assert [source.lines for source in found] == [False, True, False, False, True]


def test_stdlib_is_python_source() -> None:
    found = find_files(["stdlib"])
    paths = [source.path for source in found]
    assert len(paths) > 300 and all(path.endswith(".py") for path in paths)
    assert any(path.endswith("/argparse.py") for path in paths)
    assert not any(re.search("/(site-packages|test|idlelib)/", path) for path in paths)
    assert found == find_files(["stdlib"])


def test_inputs_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_text("")
    (tmp_path / "empty").mkdir()
    for name, words in (("a.pdf", "cannot tell"), ("none.txt", "no such input"), ("empty", "no .txt or .jsonl")):
        with pytest.raises(UserError, match=words):
            find_files([str(tmp_path / name)])
    with pytest.raises(UserError, match="no input"):
        find_files([])
    for broken in (ByteRange(str(tmp_path / "gone.txt"), False, 0, 1), ByteRange(str(tmp_path), False, 0, 1)):
        with pytest.raises(UserError, match="cannot read"):
            list(read_documents(broken, "text"))
    with pytest.raises(UserError, match="cannot read"):
        list(plan_tasks([ByteRange(str(tmp_path / "gone.txt"), False, 0, 1 << 30)], re.compile(rb"\n")))
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="cannot read"):
        find_files([str(tmp_path)])


def test_text_is_decoded_with_replacement(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\xff two")
    assert parts_of(path) == [DocumentPart("one\r\n\ufffd two", True, True)]
    path.write_bytes("é".encode())
    assert parts_of(path) == [DocumentPart("é", True, False)]


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [b'\xef\xbb\xbf{"text": "one\\n", "body": "1"}', b"", b'{"text": "\\ud83d\\ude00", "body": ""}\r', b"  "]
    path.write_bytes(b"\n".join(lines))
    assert texts(path) == ["one\n", "😀"]
    assert texts(path, "body") == ["1", ""]
    path.write_bytes(b'{"text": "\xff"}\n{"text": "x\\ud800\\u00e9"}')
    assert parts_of(path) == [DocumentPart("\ufffd", True, True), DocumentPart("x\ufffdé", True, True)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is not JSON"),
        ("nonsense", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"other": "x"}', "no field 'text'.*--field"),
        ('["text"]', "no field 'text'"),
        ('"text"', "no field 'text'"),
        ("3", "no field 'text'"),
        ('{"text": 3}', "is not text"),
        ('{"text": null}', "is not text"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "TASK_BYTES", 64)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n' * 20 + "\n" + line + "\n" + '{"text": "good"}\n' * 20)
    with pytest.raises(UserError, match=f"a.jsonl line 22.*{words}"):
        texts(path)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.lists(st.text("ab\n é😀", max_size=40), max_size=8),
    size=st.integers(1, 30),
    window=st.integers(2, 9),
    pattern=st.sampled_from([rb"\n", rb"[!-~](?= )"]),
)
def test_cutting_loses_nothing(tmp_path: Path, content: list[str], size: int, window: int, pattern: bytes) -> None:
    """Text files come back whole, with one last part each, and lines one by one, however small the tasks are."""
    text, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_text("".join(content), newline="")
    lines.write_text("".join(json.dumps({"text": entry}, ensure_ascii=False) + "\n" for entry in content))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "TASK_BYTES", size)
        patch.setattr(documents, "WINDOW_BYTES", window)
        sources = find_files([str(text), str(lines)])
        spans = [span for task in plan_tasks(sources, re.compile(pattern)) for span in task]
        found = [(span.path, part) for span in spans for part in read_documents(span, "text")]
    parts = [part for path, part in found if path == str(text)]
    assert "".join(part.text for part in parts) == "".join(content)
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert not any(part.replaced for _, part in found)
    assert [part.text for path, part in found if path == str(lines)] == content


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    for name in ("in/a.txt", "else/b.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("text")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "else")
    (tmp_path / "else" / "up").symlink_to(tmp_path / "in")
    names = [Path(source.path).name for source in find_files([str(tmp_path / "in")])]
    assert names == ["a.txt", "b.txt"]


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "sub").mkdir()
    listed = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match="sub.*Permission denied"):
        find_files([str(tmp_path)])
