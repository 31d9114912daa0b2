"""Tests of documents that `prepare` leaves out (by length, and duplicates), and of sentences as sequences."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data import documents
from meshwright.data.masked import DocumentPieces
from meshwright.data.prepare import prepare
from meshwright.data.selection import Selection
from meshwright.data.sentences import split_sentences
from meshwright.data.token_file import TokenFile
from meshwright.errors import UserError
from tests.support.token_files import sequences


def texts_of(prefix: Path | str) -> list[str]:
    """Return the documents of a file of bytes, with the sequences of each joined."""
    file = TokenFile(prefix)
    parts = sequences(file)
    bounds = file.document_indices.tolist()
    joined = [sum(parts[a:b], []) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    assert all(ids[-1] == 256 for ids in joined)
    return [bytes(ids[:-1]).decode() for ids in joined]


def write_lines(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.mark.parametrize("sentences", [False, True])
@pytest.mark.parametrize(("workers", "task"), [(1, 5), (2, 5), (1, 1 << 20)])
def test_lengths_and_duplicates(
    tmp_path: Path, workers: int, task: int, sentences: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of equal documents stays, over all files and tasks. A long text is one document in any tasks."""
    first = write_lines(tmp_path / "a.jsonl", ["One. Two.", "éé", "", "äöü", "One. Two.", "One. Two. "])
    second = write_lines(tmp_path / "b.jsonl", ["äöü", "longer than the limit is", "new", "One. Two."])
    long = tmp_path / "c.txt"
    long.write_text("line\n" * 4)
    monkeypatch.setattr(documents, "TASK_BYTES", task)
    selection = Selection(min_chars=3, max_chars=20, dedup=True, sentences=sentences)
    summary = prepare([first, second, str(long)], str(tmp_path / "out"), workers=workers, selection=selection)
    assert texts_of(summary.prefix) == ["One. Two.", "äöü", "One. Two. ", "new", "line\n" * 4]
    assert (summary.empty, summary.filtered, summary.duplicates, summary.documents) == (1, 2, 3, 5)
    assert summary.sequences == len(TokenFile(summary.prefix)) == (7 if sentences else 5)


def test_the_tokenizer_is_trained_on_what_stays(tmp_path: Path) -> None:
    kept, other = ["banana " * 4] * 3, ["quick fox jumps " * 9]
    both, alone = write_lines(tmp_path / "a.jsonl", kept + other), write_lines(tmp_path / "b.jsonl", kept)
    limit = Selection(max_chars=50)
    first = prepare([both], str(tmp_path / "a"), tokenizer="train:280", selection=limit)
    second = prepare([alone], str(tmp_path / "b"), tokenizer="train:280")
    assert Path(f"{first.prefix}.tokenizer.json").read_bytes() == Path(f"{second.prefix}.tokenizer.json").read_bytes()


def test_limits_that_leave_nothing(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ["abc", ""])
    for limits, words in (
        ({"min_chars": 4}, "no document is left, 1 are too short or too long: change --min-chars"),
        ({"min_chars": 4, "max_chars": 3}, "--max-chars 3 is below --min-chars 4"),
        ({"min_chars": -1}, "--min-chars -1"),
    ):
        with pytest.raises(UserError, match=words):
            prepare([path], str(tmp_path / "out"), selection=Selection(**limits))
    assert sorted(tmp_path.iterdir()) == [tmp_path / "a.jsonl"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three?\nFour", ["One.", " Two!", " Three?", "\nFour"]),
        ('He said "no." Then "Yes!" (I saw it.) End. ', ['He said "no."', ' Then "Yes!"', " (I saw it.)", " End. "]),
        ("Dr. J. Smith, e.g. Ann, saw 3.5 m... and left. 12 came.",
         ["Dr. J. Smith, e.g. Ann, saw 3.5 m... and left.", " 12 came."]),
        ("a title\n\nthe text etc.\n \ngoes on\n\n", ["a title", "\n\nthe text etc.", "\n \ngoes on\n\n"]),
        ("你好。他说：“走！”然后 走了。", ["你好。", "他说：“走！”", "然后 走了。"]),
        ("", [""]),
        (" \n\n ", [" \n\n "]),
    ],
)  # fmt: skip
def test_where_sentences_end(text: str, expected: list[str]) -> None:
    assert split_sentences(text) == expected


@given(st.text(st.sampled_from("aB1 .!?\n\t\"')。”…é"), max_size=60))
def test_sentences_are_the_text(text: str) -> None:
    sentences = split_sentences(text)
    assert "".join(sentences) == text
    assert all(sentence.strip() for sentence in sentences) or len(sentences) == 1


def test_a_page_of_stops_takes_no_time() -> None:
    begin = time.process_time()
    for text in ("." * 200_000 + "a", "a" + "\n" * 200_000, ". " * 100_000, ("." + '"' * 50) * 4000, "。" * 200_000):
        split_sentences(text)
    assert time.process_time() - begin < 3


@pytest.mark.parametrize("tokenizer", ["bytes", "train:300"])
def test_sentences_change_no_token(tmp_path: Path, tokenizer: str) -> None:
    """Splitting into sentences does not change the token ids. The masked objective knows where sentences begin."""
    texts = [f"This is number {n}. It has sentences! Are there {n} of them? Yes.\n\nNo, Dr. Who." for n in range(20)]
    path = write_lines(tmp_path / "a.jsonl", texts)
    plain = prepare([path], str(tmp_path / "plain"), tokenizer=tokenizer)
    split = prepare([path], str(tmp_path / "split"), tokenizer=tokenizer, selection=Selection(sentences=True))
    assert (tmp_path / "plain.bin").read_bytes() == (tmp_path / "split.bin").read_bytes()
    assert (split.documents, split.sequences, plain.sequences) == (20, 100, 20)
    file = TokenFile(tmp_path / "split")
    assert np.array_equal(file.document_indices, np.arange(0, 101, 5))
    piece = DocumentPieces(file, 200, seed=0, documents=(0, 20)).sample(0)
    assert len(piece.sentences) == 4
    if tokenizer == "bytes":
        parts = [bytes(part.tolist()).decode() for part in np.split(piece.tokens, piece.sentences)]
        assert [part[:5] for part in parts] == ["This ", " It h", " Are ", " Yes.", "\n\nNo,"]
