"""Find and read documents: text, .jsonl and parquet files, folders of them, and Python's own standard library.

Inputs become byte ranges of single files, and byte ranges become tasks of about a megabyte. The planning process reads
almost nothing: workers read, decode and parse their byte ranges. Files that can't be read from the middle (`unpack.py`)
are the exception: their tasks carry the content. A text file is one document. A long one is cut into several byte
ranges where its tokenizer allows it, and the last range ends the document.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from meshwright.data.unpack import LARGEST_LINE, LINE_END, PACKED, PARQUET, Content, contents, is_read_once, too_long
from meshwright.disk import refusal
from meshwright.errors import UserError, either
from meshwright.outside import parse_json

TASK_BYTES = 1 << 20
WINDOW_BYTES = 1 << 16  # read at a time in the search for a place to cut
STDLIB = "stdlib"
STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"})
PLAIN = {".txt": False, ".jsonl": True}  # suffix -> whether every line is a document
SUFFIXES = PLAIN | {plain + packed: PLAIN[plain] for plain in PLAIN for packed in PACKED} | {PARQUET: True}
PACKED_SHARE = 0.25  # compressed size of a typical text, as a share of its size
# Halves of surrogate pairs. JSON can escape them on their own, but UTF-8 can't encode them.
LONE_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class ByteRange:
    """The bytes [start, end) of a file.

    With `lines`, every line (in parquet, every row) is a document; otherwise the whole file is one document. With
    `last`, a document ends where the range ends. For a file that must be unpacked, `content` holds the unpacked data,
    and `start` and `end` are positions in the unpacked data.
    """

    path: str
    lines: bool
    start: int
    end: int
    last: bool = True
    content: Content | None = None

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def stored_bytes(self) -> int:
        """The number of bytes that the range takes in its file, as stored."""
        return self.size if self.content is None else self.content.stored

    @property
    def likely_text(self) -> int:
        """An estimate of the bytes of text in a whole file."""
        return int(self.size / PACKED_SHARE) if is_read_once(self.path) else self.size

    @property
    def goes_on(self) -> bool:
        """True if the range continues a document that began in an earlier one."""
        return bool(self.start) and not self.lines


Task = tuple[ByteRange, ...]


@dataclass(frozen=True)
class DocumentPart:
    """A document, or part of one: only the final part has `last`. With `replaced`, it held bytes that are not UTF-8."""

    text: str
    last: bool
    replaced: bool


def find_files(inputs: Iterable[str], globs: Sequence[str] = ()) -> list[ByteRange]:
    """Return every file that the inputs name as one range, in the order given and sorted within a folder.

    With `globs`, the files of a folder are those whose names match one of these patterns. A file with another suffix
    than the known ones is then one document of text.
    """
    files: list[ByteRange] = []
    for name in inputs:
        named_files = list(_files_of(name, globs))
        if not named_files and globs:
            raise UserError(f"no file in {name} has a name like {either(globs)}: check --glob")
        if not named_files:
            raise UserError(
                f"no .txt or .jsonl files in {name} (nor packed ones, nor parquet): check the folder, or name others "
                "with --glob"
            )
        files.extend(named_files)
    if not files:
        raise UserError("no input: name .txt or .jsonl files, folders of them, or the word stdlib")
    return files


def left_out(inputs: Iterable[str], files: Iterable[ByteRange]) -> dict[str, int]:
    """Return how many files in the folders among the inputs are not in `files`, by suffix."""
    taken = {file.path for file in files}
    paths = {path for name in inputs if os.path.isdir(name) for path in _walk(name, ("",), frozenset())}
    return dict(Counter(os.path.splitext(path)[1] or os.path.basename(path) for path in sorted(paths - taken)))


def check_first_records(files: Iterable[ByteRange], field: str) -> None:
    """Read the first record of every file of records, so that a wrong field is found before any work is done."""
    for file in files:
        if file.lines and (task := next(plan_tasks([file], LINE_END, field), None)):
            next(read_documents(task[0], field), None)


def _files_of(name: str, globs: Sequence[str]) -> Iterator[ByteRange]:
    if name == STDLIB:
        for path in _walk(sysconfig.get_paths()["stdlib"], (".py",), STDLIB_SKIPPED):
            yield _whole_file(path, lines=False)
    elif os.path.isdir(name):
        for path in _walk(name, ("",) if globs else tuple(SUFFIXES), frozenset()):
            if not globs or _matches(path, globs):
                yield _whole_file(path, SUFFIXES.get(_suffix(path), False))
    elif not os.path.exists(name):
        kinds = ".txt or .jsonl, both also as .gz or .zst, or .parquet"
        raise UserError(f"no such input '{name}': give a file that is there ({kinds}), a folder, or the word stdlib")
    else:
        suffix = _suffix(name)
        if suffix not in SUFFIXES and not _matches(name, globs):
            raise UserError(
                f"cannot tell what '{name}' holds: name it .txt (one document), .jsonl (one JSON object per line), "
                "either with .gz or .zst behind it, or .parquet, or take it as text with --glob"
            )
        yield _whole_file(name, SUFFIXES.get(suffix, False))


def _matches(path: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(os.path.basename(path), glob) for glob in globs)


def _suffix(path: str) -> str:
    """Return the known suffix that a name ends with, or an empty string."""
    return next((suffix for suffix in SUFFIXES if path.endswith(suffix)), "")


def _walk(root: str, suffixes: tuple[str, ...], skipped: frozenset[str]) -> Iterator[str]:
    def fail(error: OSError) -> None:
        raise _unreadable(error.filename, error) from None

    seen: set[str] = set()  # real paths, because a symlink may lead back up
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


def _whole_file(path: str, lines: bool) -> ByteRange:
    try:
        return ByteRange(path, lines, 0, os.path.getsize(path))
    except OSError as error:
        raise _unreadable(path, error) from None


def plan_tasks(files: Iterable[ByteRange], cut: re.Pattern[bytes] | None, field: str = "text") -> Iterator[Task]:
    """Yield tasks of about TASK_BYTES, in order.

    `cut` matches where the tokenizer lets a document be split; None means nowhere. `field` is the text column of
    parquet files.
    """
    task: list[ByteRange] = []
    size = 0
    for whole in files:
        split = _read_ranges if is_read_once(whole.path) else _split_ranges
        for span in split(whole, LINE_END if whole.lines else cut, field):
            task.append(span)
            size += span.size
            if size >= TASK_BYTES:
                yield tuple(task)
                task, size = [], 0
    if task:
        yield tuple(task)


def _read_ranges(whole: ByteRange, cut: re.Pattern[bytes] | None, field: str) -> Iterator[ByteRange]:
    """Read a file that has to be unpacked, and yield it as ranges that carry their content."""
    start = 0
    try:
        for content in contents(whole.path, cut, field, TASK_BYTES):
            end = start + content.size
            yield ByteRange(whole.path, whole.lines, start, end, whole.lines or content.last, content)
            start = end
    except OSError as error:
        raise _unreadable(whole.path, error) from None


def _split_ranges(whole: ByteRange, cut: re.Pattern[bytes] | None, field: str) -> Iterator[ByteRange]:
    """Yield the ranges that a file is split into, reading only near the cuts. `field` is not used."""
    if cut is None or whole.size <= 2 * TASK_BYTES:
        yield whole
        return
    start = 0
    try:
        with open(whole.path, "rb") as file:
            while start < whole.end:
                end = whole.end
                if end - start > 2 * TASK_BYTES:
                    end = _next_boundary(file.fileno(), start + TASK_BYTES, whole.end, cut)
                if whole.lines and end - start > LARGEST_LINE + TASK_BYTES:
                    before = os.pread(file.fileno(), TASK_BYTES, start).count(b"\n")
                    raise too_long(_place(replace(whole, start=start), before))
                yield replace(whole, start=start, end=end, last=whole.lines or end == whole.end)
                start = end
    except OSError as error:
        raise _unreadable(whole.path, error) from None


def _next_boundary(handle: int, position: int, size: int, cut: re.Pattern[bytes]) -> int:
    """Return the first position at or after `position` where the file may be cut, or its end if there is none.

    The search also stops, and returns the end, after a line that is longer than LARGEST_LINE; the caller reports it.
    """
    begin = position
    while position < size:
        window = os.pread(handle, WINDOW_BYTES, position)
        match = cut.search(window)
        if match:
            return position + match.end()
        if len(window) < 2 or (cut is LINE_END and position - begin > LARGEST_LINE + TASK_BYTES):
            break
        # Windows overlap by one byte: a pattern matches one byte and may look at the next.
        position += len(window) - 1
    return size


def read_documents(span: ByteRange, field: str) -> Iterator[DocumentPart]:
    """Yield the documents of a byte range, or its part of one. Empty lines of a .jsonl file are skipped."""
    data = _read(span) if span.content is None else span.content.data
    if isinstance(data, tuple):
        yield from (DocumentPart(text, True, False) for text in data)
        return
    # Some programs begin a file with a byte order mark, which is not part of the text.
    if not span.start:
        data = data.removeprefix(codecs.BOM_UTF8)
    if span.lines:
        yield from _lines(span, data, field)
    else:
        text, replaced = _decode(data)
        yield DocumentPart(text, span.last, replaced)


def _read(span: ByteRange) -> bytes:
    try:
        with open(span.path, "rb") as file:
            file.seek(span.start)
            return file.read(span.size)
    except OSError as error:
        raise _unreadable(span.path, error) from None


def _lines(span: ByteRange, data: bytes, field: str) -> Iterator[DocumentPart]:
    for number, line in enumerate(data.split(b"\n")):
        if not line.strip():
            continue
        text, replaced = _decode(line)
        try:
            record = parse_json(text)
            value = record[field]
        except ValueError as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else error
            raise UserError(f"{_place(span, number)} is not JSON ({reason}): correct or remove the line") from None
        except (KeyError, IndexError, TypeError):
            has = f" (it has {', '.join(map(repr, record))})" if isinstance(record, dict) and record else ""
            raise UserError(
                f"{_place(span, number)} has no field '{field}'{has}: correct the line, or name another with --field"
            ) from None
        if not isinstance(value, str):
            raise UserError(f"{_place(span, number)}: field '{field}' is not text: name another with --field")
        clean = value if value.isascii() else LONE_SURROGATES.sub("\ufffd", value)
        yield DocumentPart(clean, True, replaced or clean != value)


def _decode(data: bytes) -> tuple[str, bool]:
    """Return the text of some bytes, and whether some were not UTF-8 and had to be replaced."""
    try:
        return data.decode("utf-8"), False
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace"), True


def _place(span: ByteRange, line: int) -> str:
    """Return "FILE line N", where N is counted from the beginning of the file."""
    if span.content is not None:
        return f"{span.path} line {span.content.before + line + 1}"
    with open(span.path, "rb") as file:
        while file.tell() < span.start:
            line += file.read(min(TASK_BYTES, span.start - file.tell())).count(b"\n")
    return f"{span.path} line {line + 1}"


def _unreadable(path: str, error: OSError) -> UserError:
    return refusal(f"cannot read {path}", error, path, "another file")
