"""Write token files so that a killed run never leaves an incomplete one that can be opened.

Everything is written under PREFIX.*.partial and synced. Then an old index is removed, PREFIX.bin and its side files are
renamed to their final names, and PREFIX.idx is renamed last. Without an index there is no token file. A lock on the
partial .bin keeps a second writer away; the operating system releases it when the process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike

from meshwright.data.token_file import CODES, HEADER, MAGIC, METADATA_FORMAT, VERSION, read_metadata
from meshwright.data.tokenizers import Tokenizer
from meshwright.disk import refusal
from meshwright.errors import UserError

PARTIAL = ".partial"
SIDE_FILES = (".json", ".tokenizer.json")  # the metadata, and the tokenizer if it was trained on the input


class TokenFileWriter:
    """A writer of PREFIX.bin and PREFIX.idx. Use it as a context manager, and call `finish` after the last document.

    Leaving the context without `finish` removes the partial files. The writer holds 4 bytes per sequence and 4 per
    document in memory.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: DTypeLike) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        assert self.dtype in CODES, f"a token file cannot hold {self.dtype.name}"
        self._sizes = array("i")  # tokens of each sequence
        self._counts = array("i")  # sequences of each document
        self._open = 0  # tokens so far of the document that the next call continues
        self.token_count = 0
        try:
            os.makedirs(os.path.dirname(self.prefix) or ".", exist_ok=True)
            self._bin = self._open_locked(self.prefix + ".bin" + PARTIAL)
            self._remove_partials((".idx", *SIDE_FILES))
        except OSError as error:
            raise self._write_error(error) from None

    def __enter__(self) -> TokenFileWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        """Remove the partial files unless `finish` was called. Files with their final names are never touched."""
        if not self._bin.closed:
            self._remove_partials((".bin", ".idx", *SIDE_FILES))
            with contextlib.suppress(OSError):  # on a full disk flushing the last buffer fails too
                self._bin.close()

    @property
    def document_count(self) -> int:
        return len(self._counts)

    @property
    def sequence_count(self) -> int:
        return len(self._sizes)

    def add_documents(
        self, tokens: bytes, lengths: Sequence[int], last_open: bool = False, counts: Sequence[int] | None = None
    ) -> None:
        """Append documents whose `tokens`, in the file's dtype, are back to back.

        `lengths` has one entry per document. With `counts` it has one entry per sequence, and counts[i] of them belong
        to document i. With `last_open` the last document continues in the next call, whose first length is added to it.
        A document larger than memory is written in this way.
        """
        assert counts is None or (sum(counts) == len(lengths) and not last_open and not self._open), "whole documents"
        count = sum(lengths)
        assert len(tokens) == count * self.dtype.itemsize, f"{len(tokens)} bytes, lengths say {count} tokens"
        if not lengths and not counts:
            return
        try:
            self._bin.write(tokens)
        except OSError as error:
            raise self._write_error(error) from None
        self.token_count += count
        complete = list(lengths)
        if self._open:
            complete[0] += self._open
        self._open = complete.pop() if last_open else 0
        self._counts.extend([1] * len(complete) if counts is None else counts)
        # The array holds 32-bit integers, as the index does.
        try:
            self._sizes.extend(complete)
        except OverflowError:
            raise UserError(
                f"a document of {max(complete):,} tokens does not fit a token file (at most 2,147,483,647): "
                "split it into several documents"
            ) from None

    def finish(self, side_files: Mapping[str, bytes] | None = None) -> None:
        """Rename the files to their final names, the index last. `side_files` maps a suffix (".json") to content."""
        assert not self._open, "the last document is still open"
        extra = dict(side_files or {})
        assert set(extra) <= set(SIDE_FILES), f"only {SIDE_FILES} lie beside a token file"
        try:
            _sync(self._bin)
            for suffix, content in extra.items():
                self._write_partial(suffix, [content])
            self._write_partial(".idx", self._index())

            # The folder is synced between the steps, so that after a crash no old index is beside a new .bin.
            Path(self.prefix + ".idx").unlink(missing_ok=True)
            self._remove_stale(extra)
            self._sync_folder()
            for suffix in (".bin", *extra):
                os.replace(self.prefix + suffix + PARTIAL, self.prefix + suffix)
            self._sync_folder()
            os.replace(self.prefix + ".idx" + PARTIAL, self.prefix + ".idx")
            self._sync_folder()
            self._bin.close()
        except OSError as error:
            raise self._write_error(error) from None

    def _open_locked(self, path: str) -> BinaryIO:
        """Open the partial .bin, locked and emptied. It overwrites the file of a killed run, but not of a live one."""
        while True:
            file = open(path, "ab", buffering=1 << 20)  # noqa: SIM115
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                raise UserError(
                    f"another process is writing {self.prefix}: wait for it, or choose another place"
                ) from None
            except OSError:
                pass  # a file system without locks
            if os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                file.truncate(0)
                return file
            # The path names another file now: its writer finished between our opening and locking it. Try again.
            file.close()

    def _remove_partials(self, suffixes: Sequence[str]) -> None:
        """Remove the temporary files of this run, or of an earlier one that was killed."""
        for suffix in suffixes:
            Path(self.prefix + suffix + PARTIAL).unlink(missing_ok=True)

    def _remove_stale(self, kept: Mapping[str, bytes]) -> None:
        """Remove the side files of an older token file with this name. Files of other programs stay."""
        try:
            ours = read_metadata(self.prefix) is not None
        except UserError:
            return
        if ours:
            for suffix in set(SIDE_FILES) - set(kept):
                Path(self.prefix + suffix).unlink(missing_ok=True)

    def _index(self) -> list[Any]:
        """Return the index in parts, in the order in which they are written."""
        sizes = np.frombuffer(self._sizes, dtype=np.intc).astype("<i4") if self._sizes else np.empty(0, "<i4")
        pointers = np.zeros(len(sizes), "<i8")
        np.cumsum(sizes[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self.dtype.itemsize
        documents = np.zeros(len(self._counts) + 1, "<i8")
        if self._counts:
            np.cumsum(np.frombuffer(self._counts, dtype=np.intc), dtype=np.int64, out=documents[1:])
        head = HEADER.pack(MAGIC, VERSION, CODES[self.dtype], len(sizes), len(documents))
        return [head, sizes.data, pointers.data, documents.data]

    def _write_partial(self, suffix: str, parts: Sequence[Any]) -> None:
        with open(self.prefix + suffix + PARTIAL, "wb") as file:
            for part in parts:
                file.write(part)
            _sync(file)

    def _sync_folder(self) -> None:
        """Make the renames so far durable. On file systems that can't sync a folder, nothing guarantees their order."""
        with contextlib.suppress(OSError):
            handle = os.open(os.path.dirname(self.prefix) or ".", os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def _write_error(self, error: OSError) -> UserError:
        return refusal(f"cannot write {self.prefix}", error, self.prefix)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def metadata(tokenizer: Tokenizer, writer: TokenFileWriter, trained: bool = False, **more: Any) -> bytes:
    """Return the content of PREFIX.json: facts about the tokens that models and samplers need."""
    spec = tokenizer.recipe.spec
    content = {
        "format": METADATA_FORMAT, "version": 1,
        "tokenizer": spec, "tokenizer_file": spec if trained else None, "tokenizer_digest": tokenizer.recipe.digest,
        "vocab_size": tokenizer.vocab_size, "eod": tokenizer.eod, "dtype": tokenizer.dtype.name,
        "documents": writer.document_count, "tokens": writer.token_count, **more,
    }  # fmt: skip
    return json.dumps(content, indent=1).encode() + b"\n"
