"""Merge token files: write the documents of all of them, in order, to one file. Their tokenizers must be the same."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.dataset import document_table
from meshwright.data.packed import is_chat
from meshwright.data.prepare import Progress, check_out, no_progress
from meshwright.data.token_file import Metadata, TokenFile
from meshwright.data.token_writer import TokenFileWriter
from meshwright.disk import refusal
from meshwright.errors import UserError

COPIED_BYTES = 16 << 20  # per copy
# The metadata that must be equal, and words that say how a file differs.
SAME = {"tokenizer_digest": "another tokenizer", "vocab_size": "another vocabulary", "eod": "another end token"}


@dataclass(frozen=True)
class MergeSummary:
    """A summary of a merge."""

    prefix: str
    files: list[str]
    inputs: int
    documents: int
    sequences: int
    tokens: int
    dtype: str
    checked: bool  # the files have metadata, so their tokenizers could be compared


def merge(out: str, prefixes: Sequence[str], *, force: bool = False, progress: Progress = no_progress) -> MergeSummary:
    """Write OUT.bin and OUT.idx with the documents of the files, and the side files of the first one."""
    _check_names(out, prefixes)
    check_out(out, force, "OUT")
    files = [TokenFile(prefix) for prefix in prefixes]
    metadata = _check_same(files)
    total = sum(file.token_count * file.dtype.itemsize for file in files)
    with TokenFileWriter(out, files[0].dtype) as writer, progress("joining", total) as advance:
        for file in files:
            for tokens, lengths, counts in _read_documents(file):
                writer.add_documents(tokens, lengths, counts=counts)
                advance(len(tokens))
        side_files = _side_files(out, files[0], metadata, writer) if metadata else {}
        writer.finish(side_files)
    return MergeSummary(
        out, [out + suffix for suffix in (".bin", ".idx", *side_files)], len(files), writer.document_count,
        writer.sequence_count, writer.token_count, files[0].dtype.name, bool(metadata),
    )  # fmt: skip


def _check_names(out: str, prefixes: Sequence[str]) -> None:
    if len(prefixes) < 2:
        raise UserError("merge joins two token files or more: name where to write, then their prefixes")
    place = os.path.realpath(out)
    for prefix in prefixes:
        if os.path.realpath(prefix) == place or _same_file(f"{out}.bin", f"{prefix}.bin"):
            raise UserError(f"{out} is both an input and where to write: the first name is OUT, choose another for it")


def _same_file(one: str, other: str) -> bool:
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


def _check_same(files: Sequence[TokenFile]) -> Metadata | None:
    """Return the metadata of the first file, or None if no file has any. Raise a UserError if files don't match."""
    first, metadata = files[0], files[0].metadata()
    for file in files:
        if is_chat(file.prefix):
            raise UserError(
                f"{file.prefix} holds conversations with a loss mask, which merge does not join: "
                "give all their inputs to one `meshwright data chat`"
            )
        if file.dtype != first.dtype:
            raise UserError(
                f"{file.prefix} holds {file.dtype.name} and {first.prefix} {first.dtype.name}: "
                "prepare them with the same tokenizer"
            )
        theirs = file.metadata()
        if (metadata is None) != (theirs is None):
            unlabelled = file.prefix if theirs is None else first.prefix
            raise UserError(
                f"{unlabelled}.json is missing, so nobody knows which tokenizer made {unlabelled}: "
                "bring it there, or prepare the data again"
            )
        for key, difference in SAME.items():
            if metadata is not None and theirs is not None and metadata.get(key) != theirs.get(key):
                raise UserError(
                    f"{file.prefix} was made with {difference} than {first.prefix}: prepare one of them again with the "
                    "other's --tokenizer"
                )
    return metadata


def _read_documents(file: TokenFile) -> Iterator[tuple[bytes, list[int], list[int]]]:
    """Yield the tokens, the sequences' lengths and the documents' numbers of sequences, some documents at a time."""
    size = file.dtype.itemsize
    # This also checks that the documents follow one another without gaps, which the copy below relies on.
    pointers, lengths = document_table(file, 0, file.document_count)
    ends = pointers // size + lengths
    begin = at = 0
    while begin < file.document_count:
        # At least one document, even if it is larger than COPIED_BYTES.
        end = max(begin + 1, int(np.searchsorted(ends, at + COPIED_BYTES // size, side="right")))
        until = int(ends[end - 1])
        bounds = file.document_indices[begin : end + 1]
        sizes = file.sizes[int(bounds[0]) : int(bounds[-1])]
        if (sizes < 0).any() or int(sizes.sum(dtype=np.int64)) != until - at:
            raise UserError(f"{file.idx_path} is damaged (its documents and sequences disagree): prepare it again")
        yield file.tokens[at:until].tobytes(), sizes.tolist(), np.diff(bounds).tolist()
        begin, at = end, until


def _side_files(out: str, first: TokenFile, metadata: Metadata, writer: TokenFileWriter) -> dict[str, bytes]:
    """Return the first file's metadata with the counts of all files, and its tokenizer if one was trained for it."""
    content: dict[str, Any] = dict(metadata) | {"documents": writer.document_count, "tokens": writer.token_count}
    files = {}
    if tokenizer_file := metadata.get("tokenizer_file"):
        path = Path(first.prefix).parent / tokenizer_file
        try:
            files[".tokenizer.json"] = path.read_bytes()
        except OSError as error:
            raise refusal(f"cannot read {path}, the tokenizer of {first.prefix}", error, path) from None
        content["tokenizer"] = content["tokenizer_file"] = f"{os.path.basename(out)}.tokenizer.json"
    return files | {".json": json.dumps(content, indent=1).encode() + b"\n"}
