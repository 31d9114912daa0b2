"""`data merge` writes the file that `data prepare` would write from all inputs, completely or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from meshwright.cli.main import main
from meshwright.data import merge as module
from meshwright.data.merge import merge
from meshwright.data.prepare import prepare
from meshwright.data.selection import Selection
from meshwright.data.token_file import TokenFile, read_metadata
from meshwright.errors import UserError
from tests.support.token_files import sequences, write_documents, write_sequences


@pytest.fixture
def texts(tmp_path: Path) -> tuple[str, str]:
    """Two .jsonl files. Some documents are longer than a copied chunk in these tests, and all end with a blank."""
    paths = []
    for name, count in (("one", 30), ("two", 5)):
        lines = [json.dumps({"text": f"{name} is number {n}. And so on. " * (n % 9 + 1)}) for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        paths.append(str(tmp_path / f"{name}.jsonl"))
    return paths[0], paths[1]


@pytest.mark.parametrize("sentences", [False, True])
@pytest.mark.parametrize("copied", [100, 1 << 20])
def test_merged_is_prepared_from_all(
    texts: tuple[str, str], tmp_path: Path, sentences: bool, copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COPIED_BYTES", copied)
    selection = Selection(sentences=sentences)
    for name, inputs in (("all", texts), ("a", texts[:1]), ("b", texts[1:])):
        prepare(inputs, str(tmp_path / name), selection=selection)
    merged = merge(str(tmp_path / "new" / "m"), [str(tmp_path / "a"), str(tmp_path / "b")])
    for suffix in (".bin", ".idx", ".json"):
        assert (tmp_path / "new" / f"m{suffix}").read_bytes() == (tmp_path / f"all{suffix}").read_bytes()
    assert merged.documents == 35 and merged.sequences == len(TokenFile(merged.prefix)) and merged.checked
    assert sorted(os.listdir(tmp_path / "new")) == ["m.bin", "m.idx", "m.json"]


def test_a_trained_tokenizer_goes_along(texts: tuple[str, str], tmp_path: Path) -> None:
    prepare(texts[:1], str(tmp_path / "a"), tokenizer="train:300")
    prepare(texts[1:], str(tmp_path / "b"), tokenizer=str(tmp_path / "a.tokenizer.json"))
    merge(str(tmp_path / "new" / "m"), [str(tmp_path / "a"), str(tmp_path / "b")])
    metadata = read_metadata(str(tmp_path / "new" / "m"))
    assert metadata is not None and metadata["tokenizer_file"] == metadata["tokenizer"] == "m.tokenizer.json"
    assert (tmp_path / "new" / "m.tokenizer.json").read_bytes() == (tmp_path / "a.tokenizer.json").read_bytes()
    assert sequences(TokenFile(tmp_path / "new" / "m"))[30:] == sequences(TokenFile(tmp_path / "b"))


def test_files_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files of Megatron, which do not name their tokenizer, can be merged with a warning.

    Documents without a sequence and empty files are kept.
    """
    write_sequences(tmp_path / "a", [[[1, 2], [3]], [], [[4]]], np.int32)
    write_sequences(tmp_path / "b", [], np.int32)
    write_sequences(tmp_path / "c", [[[5], [6, 7]]], np.int32)
    assert main(["data", "merge", *(str(tmp_path / name) for name in "mabc"), "--json"]) == 0
    captured = capsys.readouterr()
    assert "only their dtypes were compared" in captured.err and json.loads(captured.out)["documents"] == 4
    file = TokenFile(tmp_path / "m")
    assert sequences(file) == [[1, 2], [3], [4], [5], [6, 7]]
    assert file.document_indices.tolist() == [0, 2, 2, 3, 5]
    assert not (tmp_path / "m.json").exists()


def test_what_does_not_go_together(
    texts: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    prepare(texts[:1], "a")
    prepare(texts[1:], "b")
    prepare(texts[1:], "other", tokenizer="train:300")
    write_documents("foreign", [[1, 2]])
    write_documents("wide", [[1, 2]], np.int32)
    write_documents("talks", [[1, 2]])
    Path("talks.json").write_text(Path("a.json").read_text().replace("{", '{"chat": "chat",', 1))
    Path("link.bin").symlink_to("a.bin")
    Path("link.idx").symlink_to("a.idx")
    before = sorted(os.listdir())
    for words, sentence in (
        ("a a b --force", "a is both an input and where to write"),
        ("./a b a --force", "both an input and where to write"),
        ("a b link --force", "both an input and where to write"),
        ("b a a", "b.idx exists: add --force to write it again, or choose another OUT"),
        ("m a", "two token files or more"),
        ("m a none", "no token file none"),
        ("m a other", "other was made with another tokenizer than a"),
        ("m a foreign", "foreign.json is missing"),
        ("m foreign a", "foreign.json is missing"),
        ("m a wide", "wide holds int32 and a uint16"),
        ("m talks a", "talks holds conversations"),
        ("m.bin a b", "OUT is a prefix"),
    ):
        assert main(["data", "merge", *words.split()]) == 2
        captured = capsys.readouterr()
        assert sentence in captured.err and captured.err.count("\n") == 1 and captured.out == ""
    assert sorted(os.listdir()) == before
    with Path("b.idx").open("r+b") as file:
        # The length of the first sequence is at offset 34.
        file.seek(34)
        file.write(b"\x01\x00\x00\x00")
    with pytest.raises(UserError, match=r"b\.idx is damaged"):
        merge("m", ["a", "b"])
    assert sorted(os.listdir()) == before
