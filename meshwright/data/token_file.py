"""Token files: Megatron's .bin/.idx pair, read through a memory map.

PREFIX.bin holds token ids back to back. PREFIX.idx says where each sequence begins and which sequences form a document.
The index is little-endian throughout:

    9 bytes   "MMIDIDX\\0\\0"
    uint64    version, 1
    uint8     code of the tokens' dtype
    uint64    S, number of sequences
    uint64    D + 1, number of document boundaries
    int32[S]  tokens of each sequence
    int64[S]  byte in PREFIX.bin where each sequence begins
    int64[D+1] first sequence of each document, closed by S
    int8[S]   mode of each sequence (optional and ignored)
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from meshwright.disk import refusal
from meshwright.errors import UserError
from meshwright.outside import of_kind, read_json

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_NAMES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
TOKEN_DTYPES: dict[int, np.dtype[Any]] = {code: np.dtype(name) for code, name in DTYPE_NAMES.items()}
FLOAT_CODES = (6, 7)
CODES = {dtype: code for code, dtype in TOKEN_DTYPES.items()}
METADATA_FORMAT = "meshwright tokens"


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype that Megatron would choose for a vocabulary: uint16 below 65,500 entries, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


class Metadata(TypedDict, total=False):
    """The content of PREFIX.json: facts about the tokens that models and samplers need."""

    tokenizer: str
    tokenizer_file: str | None
    tokenizer_digest: str
    vocab_size: int
    eod: int
    chat: str  # of conversations: their kind, as in `packed.KINDS`
    learned: int  # of conversations: the tokens that are learned
    seq: int  # of conversations: the length of samples that `data chat --seq` named


def read_metadata(prefix: str) -> Metadata | None:
    """Return the metadata that `data prepare` wrote beside a token file, or None if Megatron wrote the file."""
    path = f"{prefix}.json"
    try:
        content = read_json(Path(path))
        if not isinstance(content, dict) or content.get("format") != METADATA_FORMAT:
            return None
        of_kind(content, Metadata, "it")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({error}): prepare the data again, or remove that file") from None
    return cast(Metadata, content)


class TokenFile:
    """A token file, opened read-only and memory-mapped. Opening it reads only the header and the last entries.

    `tokens` is all of PREFIX.bin as one flat array. `sizes` int32[S], `pointers` int64[S] (bytes) and
    `document_indices` int64[D+1] are views of PREFIX.idx.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        self.idx_path, self.bin_path = f"{self.prefix}.idx", f"{self.prefix}.bin"
        self._check_present()
        index = self._map(self.idx_path, np.dtype("u1"))
        sequences, boundaries = self._read_header(index)
        offset = HEADER.size
        arrays = []
        for dtype, count in (("<i4", sequences), ("<i8", sequences), ("<i8", boundaries)):
            arrays.append(np.frombuffer(index, dtype=dtype, count=count, offset=offset))
            offset += arrays[-1].nbytes
        self.sizes, self.pointers, self.document_indices = arrays
        self._check_index()
        self.tokens: NDArray[np.integer[Any]] = self._map(self.bin_path, self.dtype)

    def __len__(self) -> int:
        return int(self.sizes.shape[0])

    @property
    def document_count(self) -> int:
        return int(self.document_indices.shape[0]) - 1

    @property
    def token_count(self) -> int:
        if not len(self):
            return 0
        return int(self.pointers[-1]) // self.dtype.itemsize + int(self.sizes[-1])

    def metadata(self) -> Metadata | None:
        """Return the metadata if `data prepare` wrote them, with at least `vocab_size` and `eod`; otherwise None."""
        metadata = read_metadata(self.prefix)
        for key in ("vocab_size", "eod"):
            if metadata is not None and key not in metadata:
                raise UserError(
                    f"{self.prefix}.json is damaged (it has no number {key}): prepare the data again, or remove it"
                )
        return metadata

    def _check_present(self) -> None:
        has_idx, has_bin = os.path.isfile(self.idx_path), os.path.isfile(self.bin_path)
        if has_idx and has_bin:
            return
        if has_bin:
            raise UserError(f"{self.idx_path} is missing, so {self.bin_path} is not complete: prepare the data again")
        if has_idx:
            raise UserError(
                f"{self.bin_path} is missing beside {self.idx_path}: copy it there or prepare the data again"
            )
        bare, suffix = os.path.splitext(self.prefix)
        if suffix in (".bin", ".idx") and os.path.isfile(self.prefix):
            raise UserError(f"{self.prefix} is one file of a pair: name the pair by its prefix, {bare}")
        raise UserError(
            f"no token file {self.prefix} (.idx and .bin): check the path, or make it with "
            f"`meshwright data prepare INPUT --out {self.prefix}`"
        )

    def _read_header(self, index: NDArray[np.uint8]) -> tuple[int, int]:
        """Check the header and the file's size, set `dtype`, and return the numbers of sequences and of boundaries."""
        path = self.idx_path
        head = index[: HEADER.size].tobytes()
        if not head.startswith(MAGIC):
            raise UserError(
                f"{path} is not a token index (it does not begin with MMIDIDX): "
                "name a prefix written by `meshwright data prepare` or by Megatron's preprocess_data.py"
            )
        if len(head) < HEADER.size:
            raise UserError(f"{path} ends within its header: prepare the data again")
        _, version, code, sequences, boundaries = HEADER.unpack(head)
        if version != VERSION:
            raise UserError(
                f"{path} has version {version}, this release reads version {VERSION}: prepare the data again"
            )
        if code in FLOAT_CODES:
            raise UserError(f"{path} says its .bin holds floats, not token ids: prepare the data again")
        if code not in TOKEN_DTYPES:
            raise UserError(f"{path} has the unknown dtype code {code}: prepare the data again")
        self.dtype = TOKEN_DTYPES[code]
        needed = HEADER.size + 12 * sequences + 8 * boundaries
        if len(index) < needed:
            raise UserError(
                f"{path} is truncated ({len(index)} bytes of {needed}): copy it again or prepare the data again"
            )
        return sequences, boundaries

    def _check_index(self) -> None:
        """Check that the three arrays agree with one another and with the .bin file, as far as that is cheap."""
        documents = self.document_indices
        consistent = len(documents) > 0 and documents[0] == 0 and documents[-1] == len(self)
        if len(self):
            first, last = self.pointers[0], self.pointers[-1]
            consistent = consistent and first == 0 and last >= 0 and self.sizes[-1] >= 0
        if not consistent:
            raise UserError(
                f"{self.idx_path} is damaged (its documents and sequences disagree): prepare the data again"
            )
        length = os.path.getsize(self.bin_path)
        needed = self.token_count * self.dtype.itemsize
        if length < needed:
            raise UserError(
                f"{self.bin_path} is truncated ({length} bytes of the {needed} its index names): "
                "copy it again or prepare the data again"
            )

    @staticmethod
    def _map(path: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return the file as an array over a read-only memory map."""
        count = os.path.getsize(path) // dtype.itemsize
        if not count:  # an empty file can't be mapped
            return np.empty(0, dtype)
        try:
            return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=(count,)))
        except OSError as error:
            raise refusal(f"cannot read {path}", error, path, "another file") from None
