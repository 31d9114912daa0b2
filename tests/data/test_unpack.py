"""Compressed files and parquet give the same token file as plain text, with any size of tasks; damage is reported."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.data import documents
from meshwright.data.prepare import prepare
from meshwright.data.selection import Selection
from meshwright.errors import UserError

TEXTS = [f"document {n}: " + "naïve words, " * (n % 40) + "\n\nend." for n in range(120)]
LINES = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS).encode()


def zst(data: bytes) -> bytes:
    packed: bytes = pytest.importorskip("zstandard").ZstdCompressor().compress(data)
    return packed


def pairs(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".zst", zst)])
def test_packed_is_as_plain(
    tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compressed files give the same tokens, also if they are joined from several and padded with zeros."""
    long = "\n".join(TEXTS).encode()
    for name, data in (("a.jsonl", LINES), ("b.txt", b"\xef\xbb\xbf" + long)):
        (tmp_path / "plain" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "plain" / name).write_bytes(data)
        (tmp_path / "packed" / name).parent.mkdir(exist_ok=True)
        half = len(data) // 2
        (tmp_path / "packed" / f"{name}{suffix}").write_bytes(pack(data[:half]) + pack(data[half:]) + bytes(512))
    prepare([str(tmp_path / "plain")], str(tmp_path / "a"))
    seen: list[int] = []
    monkeypatch.setattr(documents, "TASK_BYTES", 1000)
    summary = prepare([str(tmp_path / "packed")], str(tmp_path / "b"), workers=workers, progress=counting(seen))
    assert pairs(tmp_path / "a") == pairs(tmp_path / "b")
    assert sum(seen) == summary.input_bytes == sum(path.stat().st_size for path in (tmp_path / "packed").iterdir())


def counting(seen: list[int]) -> Any:
    """Return a progress bar that appends each advance to `seen`."""
    import contextlib

    return lambda label, total: contextlib.nullcontext(seen.append)


def test_bad_lines_of_packed_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "TASK_BYTES", 64)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "good"}\n' * 20 + b"{\n" + b'{"text": ""}\n' * 20))
    with pytest.raises(UserError, match=r"a\.jsonl\.gz line 21 is not JSON"):
        prepare([str(tmp_path)], str(tmp_path / "out"), workers=1)


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".zst", zst)])
def test_broken_files_are_named(tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]) -> None:
    path, good = tmp_path / f"a.jsonl{suffix}", pack(LINES)
    changed = bytearray(good)
    changed[len(good) // 2] ^= 0xFF
    for data in (good[:-5], bytes(changed), good + b"behind", LINES):
        path.write_bytes(data)
        with pytest.raises(UserError, match=rf"a\.jsonl\{suffix} (is damaged|line \d+ is not JSON)"):
            prepare([str(path)], str(tmp_path / "out"), workers=1)
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, package, extra in (("a.jsonl.zst", "zstandard", "zst"), ("a.parquet", "pyarrow", "parquet")):
        monkeypatch.setitem(sys.modules, package, None)
        (tmp_path / name).write_bytes(b"something")
        words = rf"{name} needs the package {package}: pip install 'meshwright\[{extra}\]'"
        with pytest.raises(UserError, match=words):
            prepare([str(tmp_path / name)], str(tmp_path / "out"))


def test_parquet_is_as_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "a.jsonl").write_bytes(LINES)
    prepare([str(tmp_path / "a.jsonl")], str(tmp_path / "a"))
    monkeypatch.setattr(documents, "TASK_BYTES", 1000)
    monkeypatch.setattr("meshwright.data.unpack.ROWS", 7)
    for kind in (arrow.string(), arrow.large_string()):
        columns = {"n": list(range(len(TEXTS) + 1)), "body": arrow.array([None, *TEXTS], kind)}
        parquet.write_table(arrow.table(columns), tmp_path / "b.parquet", row_group_size=50)
        options: dict[str, Any] = {"selection": Selection(field="body"), "force": True}
        summary = prepare([str(tmp_path / "b.parquet")], str(tmp_path / "b"), **options)
        assert pairs(tmp_path / "a") == pairs(tmp_path / "b") and summary.empty == 1
    for field, words in (("text", r"has no column 'text' \(n, body\).*--field"), ("n", "is int64, not text")):
        with pytest.raises(UserError, match=words):
            prepare([str(tmp_path / "b.parquet")], str(tmp_path / "c"), selection=Selection(field=field))
    (tmp_path / "b.parquet").write_bytes((tmp_path / "b.parquet").read_bytes()[:-20])
    with pytest.raises(UserError, match=r"b\.parquet is not a readable parquet file"):
        prepare([str(tmp_path / "b.parquet")], str(tmp_path / "c"))
