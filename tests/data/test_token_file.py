"""Tests of token files: Megatron's byte format, the round trip, damaged files, and writers that die half-way."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.data.token_file import TokenFile, read_metadata, token_dtype
from meshwright.data.token_writer import TokenFileWriter
from meshwright.errors import UserError
from tests.support.token_files import sequences, write_documents, write_sequences

# Two documents, [1, 2, 3] and [4] + [5, 6] (two sequences), as megatron-core 0.16.1 writes them in uint16.
GOLDEN_BIN = bytes.fromhex("010002000300040005000600")
GOLDEN_IDX = (
    bytes.fromhex("4d4d494449445800000100000000000000080300000000000000" + "0300000000000000")
    + struct.pack("<3i", 3, 1, 2)
    + struct.pack("<3q", 0, 6, 8)
    + struct.pack("<3q", 0, 1, 3)
)


def test_golden_bytes(tmp_path: Path) -> None:
    """The files equal Megatron's byte for byte.

    The writer makes one sequence of each document, so that with the same sequences only the documents' bounds differ.
    """
    with TokenFileWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_documents(GOLDEN_BIN[:8], [3, 1])
        writer.add_documents(GOLDEN_BIN[8:], [2])
        writer.finish()
    assert (tmp_path / "a.bin").read_bytes() == GOLDEN_BIN
    head = GOLDEN_IDX[:26] + struct.pack("<Q", 4)
    assert (tmp_path / "a.idx").read_bytes() == head + GOLDEN_IDX[34:-24] + struct.pack("<4q", 0, 1, 2, 3)
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]
    write_sequences(tmp_path / "b", [[[1, 2, 3]], [[4], [5, 6]]], np.uint16)
    assert (tmp_path / "b.idx").read_bytes() == GOLDEN_IDX and (tmp_path / "b.bin").read_bytes() == GOLDEN_BIN


def test_reads_golden_bytes_with_modes(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(GOLDEN_BIN)
    (tmp_path / "a.idx").write_bytes(GOLDEN_IDX + b"\x00\x01\x00")
    file = TokenFile(tmp_path / "a")
    assert (len(file), file.document_count, file.token_count, file.dtype) == (3, 2, 6, np.uint16)
    assert sequences(file) == [[1, 2, 3], [4], [5, 6]]
    assert file.sizes.tolist() == [3, 1, 2] and file.document_indices.tolist() == [0, 1, 3]
    assert not file.sizes.flags.owndata and not file.tokens.flags.owndata
    assert file.metadata() is None


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 127), max_size=6), max_size=3), max_size=8),
    dtype=st.sampled_from(["uint8", "int8", "int16", "uint16", "int32", "int64"]),
)
def test_round_trip(tmp_path: Path, documents: list[list[list[int]]], dtype: str) -> None:
    flat = [sequence for document in documents for sequence in document]
    ends = np.cumsum([0] + [len(document) for document in documents])
    many, single = write_sequences(tmp_path / "a", documents, dtype), write_documents(tmp_path / "b", flat, dtype)
    assert many.document_count == len(documents) and many.document_indices.tolist() == ends.tolist()
    assert single.document_count == len(flat) and single.document_indices.tolist() == list(range(len(flat) + 1))
    for file in (many, single):
        assert file.dtype == dtype and file.token_count == sum(map(len, flat))
        assert sequences(file) == flat


def test_pieces_of_a_long_document(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "a", np.uint8) as writer:
        writer.add_documents(b"\1\2\3", [1, 2], last_open=True)
        writer.add_documents(b"\4", [1], last_open=True)
        writer.add_documents(b"", [])
        writer.add_documents(b"\5\6\7", [1, 2])
        assert (writer.document_count, writer.token_count) == (3, 7)
        writer.finish()
    file = TokenFile(tmp_path / "a")
    assert sequences(file) == [[1], [2, 3, 4, 5], [6, 7]]
    assert file.document_indices.tolist() == [0, 1, 2, 3]


def test_dtype_as_megatron_chooses() -> None:
    assert [token_dtype(size).name for size in (257, 65499, 65500, 130_000)] == ["uint16", "uint16", "int32", "int32"]


def test_a_document_too_long_for_the_index(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "a", np.uint16) as writer:
        writer._open = 2**31 - 1
        with pytest.raises(UserError, match="split it"):
            writer.add_documents(bytes(2), [1])


def damaged(tmp_path: Path, idx: bytes | None, data: bytes | None) -> str:
    """Write a pair of files, None for a missing one, which can't be opened. Return the error message."""
    for name, content in (("a.idx", idx), ("a.bin", data)):
        (tmp_path / name).unlink(missing_ok=True)
        if content is not None:
            (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        TokenFile(tmp_path / "a")
    assert str(tmp_path / "a") in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_damage_is_one_sentence(tmp_path: Path) -> None:
    def patched(at: int, value: bytes) -> bytes:
        return GOLDEN_IDX[:at] + value + GOLDEN_IDX[at + len(value) :]

    assert "meshwright data prepare" in damaged(tmp_path, None, None)
    assert "a.idx is missing" in damaged(tmp_path, None, GOLDEN_BIN)
    assert "a.bin is missing" in damaged(tmp_path, GOLDEN_IDX, None)
    assert "does not begin with MMIDIDX" in damaged(tmp_path, b"", GOLDEN_BIN)
    assert "does not begin with MMIDIDX" in damaged(tmp_path, patched(0, b"X"), GOLDEN_BIN)
    assert "within its header" in damaged(tmp_path, GOLDEN_IDX[:20], GOLDEN_BIN)
    assert "version 2" in damaged(tmp_path, patched(9, b"\x02"), GOLDEN_BIN)
    assert "dtype code 9" in damaged(tmp_path, patched(17, b"\x09"), GOLDEN_BIN)
    assert "floats" in damaged(tmp_path, patched(17, b"\x07"), GOLDEN_BIN)
    assert f"({len(GOLDEN_IDX) - 1} bytes of {len(GOLDEN_IDX)})" in damaged(tmp_path, GOLDEN_IDX[:-1], GOLDEN_BIN)
    assert "truncated (11 bytes of the 12" in damaged(tmp_path, GOLDEN_IDX, GOLDEN_BIN[:-1])
    assert "truncated (0 bytes" in damaged(tmp_path, GOLDEN_IDX, b"")
    assert "damaged" in damaged(tmp_path, patched(len(GOLDEN_IDX) - 8, b"\x02"), GOLDEN_BIN)
    assert "damaged" in damaged(tmp_path, patched(34 + 12, b"\x02"), GOLDEN_BIN)
    (tmp_path / "a.idx").write_bytes(GOLDEN_IDX)
    with pytest.raises(UserError, match="by its prefix"):
        TokenFile(tmp_path / "a.bin")


def test_metadata_that_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1]")
    assert read_metadata(str(tmp_path / "a")) is None
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(UserError, match="a.json"):
        read_metadata(str(tmp_path / "a"))


def test_leaving_without_finish_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), TokenFileWriter(tmp_path / "sub" / "a", np.uint16) as writer:
        writer.add_documents(bytes(2), [1])
        raise RuntimeError
    assert os.listdir(tmp_path / "sub") == []


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_documents(b"\1\0\2\0", [2])
        with pytest.raises(UserError, match="another process is writing"):
            TokenFileWriter(tmp_path / "a", np.uint16)
        writer.finish()
    assert sequences(TokenFile(tmp_path / "a")) == [[1, 2]]


CRASH = """
import json, os, sys
import numpy as np
from meshwright.data.token_file import TokenFile, read_metadata
from meshwright.data.token_writer import TokenFileWriter
from meshwright.errors import UserError
from tests.support.token_files import sequences

prefix = sys.argv[1]

def counted(real):
    def call(*args):
        global steps
        if steps == 0:
            os._exit(9)
        steps -= 1
        return real(*args)
    return call

def state():
    try:
        file = TokenFile(prefix)
    except UserError:
        return "broken" if os.path.exists(prefix + ".idx") else "none"
    found = sequences(file)
    if found == [[7, 8, 9]] and read_metadata(prefix) is not None:
        return "new"
    return "old" if found == [[1, 2], [3]] else "mixed"

states = []
for limit in range(60):
    child = os.fork()
    if not child:
        steps = limit
        os.replace, os.unlink, os.fsync = counted(os.replace), counted(os.unlink), counted(os.fsync)
        writer = TokenFileWriter(prefix, np.uint16)
        writer.add_documents(np.array([7, 8, 9], np.uint16).tobytes(), [3])
        writer.finish({".json": b'{"format": "meshwright tokens"}'})
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    states.append(state())
    if code != 9:
        break
print(json.dumps([code, states]))
"""


def test_a_crash_at_any_step_leaves_nothing_that_opens(tmp_path: Path) -> None:
    """A writer that dies while it replaces an older pair of files leaves the old pair, none or the new one.

    It never leaves a mixture of both.
    """
    write_documents(tmp_path / "a", [[1, 2], [3]])
    command = [sys.executable, "-c", CRASH, str(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    code, states = json.loads(done.stdout)
    assert code == 0 and list(dict.fromkeys(states)) == ["old", "none", "new"], states
    assert states == sorted(states, key=["old", "none", "new"].index)
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx", "a.json"]


FULL = """
import resource, sys
import numpy as np
from meshwright.data.token_writer import TokenFileWriter
from meshwright.errors import UserError
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    with TokenFileWriter(sys.argv[1], np.uint16) as writer:
        writer.add_documents(bytes(2 * int(sys.argv[2])), [int(sys.argv[2])])
        writer.finish()
except UserError as error:
    print(error)
"""


# The first number is refused when the buffer is flushed, the second at once.
@pytest.mark.parametrize("tokens", [4000, 4_000_000])
def test_no_space_left(tmp_path: Path, tokens: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "a"), str(tokens)], capture_output=True, text=True, check=True
    )
    assert "cannot write" in done.stdout and "free some space" in done.stdout, done.stderr
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        TokenFileWriter(tmp_path / "file" / "a", np.uint16)
