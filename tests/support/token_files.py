"""Token files for tests: written by the writer, written by hand in a form that only Megatron uses, and read by
sequence.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from meshwright.data.token_file import CODES, TokenFile
from meshwright.data.token_writer import TokenFileWriter


def write_documents(prefix: Path | str, documents: Sequence[ArrayLike], dtype: DTypeLike = np.uint16) -> TokenFile:
    with TokenFileWriter(prefix, dtype) as writer:
        for document in documents:
            tokens = np.asarray(document, writer.dtype)
            writer.add_documents(tokens.tobytes(), [tokens.size])
        writer.finish()
    return TokenFile(prefix)


def write_sequences(prefix: Path | str, documents: Sequence[Sequence[ArrayLike]], dtype: DTypeLike) -> TokenFile:
    """Write documents of several sequences each, laid out by hand from the description in `data/token_file.py`."""
    kind = np.dtype(dtype).newbyteorder("<")
    flat = [np.asarray(sequence, kind) for document in documents for sequence in document]
    sizes = [len(sequence) for sequence in flat]
    starts = [sum(sizes[:n]) * kind.itemsize for n in range(len(sizes))]
    bounds = [sum(map(len, documents[:n])) for n in range(len(documents) + 1)]
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[kind], len(sizes), len(bounds))
    arrays = np.array(sizes, "<i4").tobytes() + np.array(starts, "<i8").tobytes() + np.array(bounds, "<i8").tobytes()
    Path(f"{prefix}.bin").write_bytes(b"".join(sequence.tobytes() for sequence in flat))
    Path(f"{prefix}.idx").write_bytes(head + arrays)
    return TokenFile(prefix)


def sequences(file: TokenFile) -> list[list[int]]:
    """Return the tokens of every sequence of a file."""
    starts = (file.pointers // file.dtype.itemsize).tolist()
    return [file.tokens[a : a + n].tolist() for a, n in zip(starts, file.sizes.tolist(), strict=True)]
