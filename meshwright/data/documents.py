"""Where documents come from: text files, .jsonl files, folders of them, and Python's own standard library. Inputs
become byte ranges of single files, and byte ranges become tasks of about a megabyte, so that the planning process reads
next to nothing and workers read, decode and parse for themselves. A text file is one document; a long one is cut into
several byte ranges where its tokenizer allows, the last of which ends the document."""

from __future__ import annotations

import json
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshwright.errors import UserError

TASK_BYTES = 1 << 20
WINDOW_BYTES = 1 << 16
LINE_END = re.compile(rb"\n")
STDLIB = "stdlib"
STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"})
SUFFIXES = {".txt": False, ".jsonl": True}
BOM = "\ufeff"


@dataclass(frozen=True)
class Source:
    """One input file. With `lines`, every line is a JSON document; otherwise the whole file is one document."""

    path: str
    lines: bool
    size: int


@dataclass(frozen=True)
class ByteRange:
    """The bytes [start, end) of a file. With `last`, a document ends where the range does."""

    path: str
    lines: bool
    start: int
    end: int
    last: bool = True


Task = tuple[ByteRange, ...]


@dataclass(frozen=True)
class DocumentPart:
    """A document, or without `last` a part of one. `replaced` says whether it held bytes that are not UTF-8."""

    text: str
    last: bool
    replaced: bool


def find_sources(inputs: Iterable[str]) -> list[Source]:
    """Returns every file that the inputs name, in the order given and sorted within a folder; finding none is an
    error."""
    sources: list[Source] = []
    for name in inputs:
        found = list(_sources_of(name))
        if not found:
            raise UserError(f"no .txt or .jsonl files in {name}: check the folder")
        sources.extend(found)
    if not sources:
        raise UserError("no input: name .txt or .jsonl files, folders of them, or the word stdlib")
    return sources


def _sources_of(name: str) -> Iterator[Source]:
    if name == STDLIB:
        root = sysconfig.get_paths()["stdlib"]
        for path in _walk(root, (".py",), STDLIB_SKIPPED):
            yield _source(path, lines=False)
    elif os.path.isdir(name):
        for path in _walk(name, tuple(SUFFIXES), frozenset()):
            yield _source(path, SUFFIXES[os.path.splitext(path)[1]])
    elif not os.path.exists(name):
        raise UserError(f"no such input '{name}': give a .txt or .jsonl file, a folder, or the word stdlib")
    else:
        suffix = os.path.splitext(name)[1]
        if suffix not in SUFFIXES:
            raise UserError(
                f"cannot tell what '{name}' holds: name it .txt (one document) or .jsonl (one JSON object per line)"
            )
        yield _source(name, SUFFIXES[suffix])


def _walk(root: str, suffixes: tuple[str, ...], skipped: frozenset[str]) -> Iterator[str]:
    def fail(error: OSError) -> None:
        raise _unreadable(error.filename, error) from None

    seen: set[str] = set()  # a symlink may lead back up
    for folder, folders, files in os.walk(root, onerror=fail, followlinks=True):
        here = os.path.realpath(folder)
        if here in seen:
            folders.clear()
            continue
        seen.add(here)
        folders[:] = sorted(name for name in folders if name not in skipped)
        for name in sorted(files):
            if name.endswith(suffixes):
                yield os.path.join(folder, name)


def _source(path: str, lines: bool) -> Source:
    try:
        return Source(path, lines, os.path.getsize(path))
    except OSError as error:
        raise _unreadable(path, error) from None


def plan_tasks(sources: Iterable[Source], cut: re.Pattern[bytes] | None) -> Iterator[Task]:
    """Yields tasks of about TASK_BYTES, in order. `cut` matches where the tokenizer lets a document be split."""
    task: list[ByteRange] = []
    size = 0
    for source in sources:
        for span in _byte_ranges(source, LINE_END if source.lines else cut):
            task.append(span)
            size += span.end - span.start
            if size >= TASK_BYTES:
                yield tuple(task)
                task, size = [], 0
    if task:
        yield tuple(task)


def _byte_ranges(source: Source, cut: re.Pattern[bytes] | None) -> Iterator[ByteRange]:
    if cut is None or source.size <= 2 * TASK_BYTES:
        yield ByteRange(source.path, source.lines, 0, source.size)
        return
    start = 0
    try:
        with open(source.path, "rb") as file:
            while start < source.size:
                end = source.size
                if end - start > 2 * TASK_BYTES:
                    end = _next_cut(file.fileno(), start + TASK_BYTES, source.size, cut)
                yield ByteRange(source.path, source.lines, start, end, last=source.lines or end == source.size)
                start = end
    except OSError as error:
        raise _unreadable(source.path, error) from None


def _next_cut(handle: int, position: int, size: int, cut: re.Pattern[bytes]) -> int:
    """Returns the first place at or after `position` where the file may be cut, or its end."""
    while position < size:
        window = os.pread(handle, WINDOW_BYTES, position)
        found = cut.search(window)
        if found:
            return position + found.end()
        if len(window) < 2:
            break
        position += len(window) - 1  # a match may lie across two windows
    return size


def read_documents(span: ByteRange, field: str) -> Iterator[DocumentPart]:
    """Yields the documents of a byte range, or its part of one; empty lines of a .jsonl file are skipped."""
    try:
        with open(span.path, "rb") as file:
            file.seek(span.start)
            data = file.read(span.end - span.start)
    except OSError as error:
        raise _unreadable(span.path, error) from None
    if span.lines:
        yield from _lines(span, data, field)
        return
    text, replaced = _decode(data)
    yield DocumentPart(text if span.start else text.removeprefix(BOM), span.last, replaced)


def _lines(span: ByteRange, data: bytes, field: str) -> Iterator[DocumentPart]:
    for number, line in enumerate(data.split(b"\n")):
        if not line.strip():
            continue
        text, replaced = _decode(line)
        if not number and not span.start:
            text = text.removeprefix(BOM)
        try:
            found = json.loads(text)[field]
        except (ValueError, RecursionError) as error:
            what = error.msg if isinstance(error, json.JSONDecodeError) else error
            raise UserError(f"{_place(span, number)} is not JSON ({what}): correct or remove the line") from None
        except (KeyError, IndexError, TypeError):
            raise UserError(
                f"{_place(span, number)} has no field '{field}': correct the line, or name another with --field"
            ) from None
        if not isinstance(found, str):
            raise UserError(f"{_place(span, number)}: field '{field}' is not text: name another with --field")
        clean, halved = _encodable(found)
        yield DocumentPart(clean, True, replaced or halved)


def _decode(data: bytes) -> tuple[str, bool]:
    try:
        return data.decode("utf-8"), False
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace"), True


def _encodable(text: str) -> tuple[str, bool]:
    """Replaces halves of surrogate pairs, which JSON can name and UTF-8 can't hold; says whether there were any."""
    try:
        if not text.isascii():
            text.encode("utf-8")
        return text, False
    except UnicodeEncodeError:
        return re.sub("[\ud800-\udfff]", "\ufffd", text), True


def _place(span: ByteRange, line: int) -> str:
    """Returns "FILE line N", counted from the beginning of the file."""
    with open(span.path, "rb") as file:
        while file.tell() < span.start:
            line += file.read(min(TASK_BYTES, span.start - file.tell())).count(b"\n")
    return f"{span.path} line {line + 1}"


def _unreadable(path: str, error: OSError) -> UserError:
    return UserError(f"cannot read {path}: {error.strerror or error}; check the file and its permissions")
