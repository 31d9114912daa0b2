"""Read inputs that can't be read from the middle: .gz and .zst files, and parquet.

The planning process reads them, one task's worth at a time, and the tasks carry the content.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from meshwright.errors import UserError

LINE_END = re.compile(rb"\n")
LARGEST_LINE = 1 << 28  # bytes of a .jsonl line; a line is parsed as a whole, in memory
READ_BYTES = 1 << 15
ROWS = 256  # rows per parquet read
PACKED = (".gz", ".zst")
PARQUET = ".parquet"
# Files written with `zstd --long=31` need this much; the library's default limit is 128 MiB.
LARGEST_WINDOW = 1 << 31


class Content(NamedTuple):
    """A part of a file, unpacked."""

    data: bytes | tuple[str, ...]  # bytes, or the texts of parquet rows
    before: int  # lines or rows that precede it in the file
    stored: int  # bytes that it takes in the file, as stored
    last: bool  # the file ends with it

    @property
    def size(self) -> int:
        return len(self.data) if isinstance(self.data, bytes) else sum(map(len, self.data))


def too_long(where: str) -> UserError:
    """Return the error for a line longer than LARGEST_LINE."""
    return UserError(f"{where} has more than {LARGEST_LINE:,} bytes: end each document with a line end, or cut it")


def is_read_once(path: str) -> bool:
    """Return True if a file can only be read from its beginning."""
    return path.endswith((*PACKED, PARQUET))


def contents(path: str, cut: re.Pattern[bytes] | None, field: str, size: int) -> Iterator[Content]:
    """Yield a file in parts of about `size` bytes, which end at a match of `cut` (None: one part)."""
    return _parquet(path, field, size) if path.endswith(PARQUET) else _unpacked_content(path, cut, size)


def _unpacked_content(path: str, cut: re.Pattern[bytes] | None, size: int) -> Iterator[Content]:
    buffer = bytearray()
    searched = size  # no cut is looked for before this position of the buffer
    before, stored = 0, 0
    for data, read in _read_stream(path):
        buffer += data
        stored += read
        while cut is not None and len(buffer) > 2 * size:
            match = cut.search(buffer, searched)
            if match is None:
                if cut is LINE_END and len(buffer) > LARGEST_LINE + size:
                    raise too_long(f"{path} line {before + buffer.count(10, 0, searched) + 1}")
                searched = len(buffer) - 1  # a match may extend into the next read
                break
            part, searched = bytes(buffer[: match.end()]), size
            del buffer[: match.end()]
            yield Content(part, before, stored, last=False)
            before += part.count(b"\n")
            stored = 0
    yield Content(bytes(buffer), before, stored, last=True)


def _read_stream(path: str) -> Iterator[tuple[bytes, int]]:
    """Yield the content of a compressed file, each time with the number of stored bytes that it took.

    The file may be several compressed files joined together.
    """
    make, failures = _gz() if path.endswith(".gz") else _zst(path)
    unpack, begun = make(), False
    with open(path, "rb") as file:
        while data := file.read(READ_BYTES):
            read = len(data)
            # After the end of a compressed file there may be another one, or zeros that fill a block of a tape.
            while data := data if begun else data.lstrip(b"\0"):
                try:
                    out = unpack.decompress(data)
                except failures as error:
                    raise UserError(f"{path} is damaged ({error}): copy or pack it again") from None
                yield out, read
                read = 0
                begun = not unpack.eof
                data = unpack.unused_data
                if not begun:
                    unpack = make()
    if begun:
        raise UserError(f"{path} is damaged (it ends too early): copy or pack it again")


def _gz() -> tuple[Callable[[], Any], type[Exception]]:
    return lambda: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), zlib.error


def _zst(path: str) -> tuple[Callable[[], Any], type[Exception]]:
    try:
        import zstandard
    except ImportError:
        raise UserError(f"{path} needs the package zstandard: pip install 'meshwright[zst]'") from None
    library = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW)
    return library.decompressobj, zstandard.ZstdError


def _parquet(path: str, field: str, size: int) -> Iterator[Content]:
    """Yield the texts of one column. A row without a text counts as empty."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{path} needs the package pyarrow: pip install 'meshwright[parquet]'") from None
    try:
        with parquet.ParquetFile(path) as file:
            _check_column(path, file.schema_arrow, field)
            total = file.metadata.num_rows
            stored = os.path.getsize(path)
            rows: list[str] = []
            length = before = 0
            for batch in file.iter_batches(batch_size=ROWS, columns=[field]):
                texts = [text or "" for text in batch.column(0).to_pylist()]
                rows += texts
                length += sum(map(len, texts))
                if length >= size:
                    yield Content(tuple(rows), before, stored * len(rows) // total, last=False)
                    before = before + len(rows)
                    rows = []
                    length = 0
            yield Content(tuple(rows), before, stored * len(rows) // max(1, total), last=True)
    except (pyarrow.ArrowException, OSError) as error:
        what = str(error).partition("\n")[0]
        raise UserError(f"{path} is not a readable parquet file ({what}): copy or write it again") from None


def _check_column(path: str, schema: Any, field: str) -> None:
    from pyarrow import types

    at = schema.get_field_index(field)
    if at < 0:
        raise UserError(f"{path} has no column '{field}' ({', '.join(schema.names)}): name another with --field")
    kind = schema.field(at).type
    # A dictionary-encoded column of texts is read like a plain one.
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise UserError(f"{path}: column '{field}' is {kind}, not text: name another with --field")
