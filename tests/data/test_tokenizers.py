"""Tests of tokenizers by name, and of the word cache, which must give the same ids as the library."""

from __future__ import annotations

import builtins
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from meshwright.data.tokenizers import JsonTokenizer, TokenizerSource, load_tokenizer, train_tokenizer, trained_size
from meshwright.data.words import CUT, CUT_BYTES, LLAMA3_SOURCE, ascii_words
from meshwright.errors import UserError

TEXTS = [
    "the quick brown fox jumps over the lazy dog, and it's 12345 times they've said 'so'\n\n\tdef f(x):\n    return x",
    "  naïve café “quoted” — em-dash… the quick brown fox\r\n\r\n  1,234.5 ALL CAPS I'LL we'd",
]


@cache
def byte_level(pattern: str | None = None) -> Tokenizer:
    """Train a small byte-level BPE that splits words as GPT-2 does, or by another pattern."""
    library = Tokenizer(models.BPE())
    if pattern is None:
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.pre_tokenizer = pre_tokenizers.Sequence([split, level])
        library.normalizer = normalizers.NFC()
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(TEXTS, trainer)
    return library


@cache
def wrapped(pattern: str | None = None) -> JsonTokenizer:
    return made_of(byte_level(pattern))


def made_of(library: Tokenizer) -> JsonTokenizer:
    return JsonTokenizer(TokenizerSource("json", library.to_str().encode(), None, "test"))


PATTERNS = [None, LLAMA3_SOURCE, LLAMA3_SOURCE.replace("{1,3}", "")]
PARTS = ["the", "fox", " ", "  ", "\n", "\r\n", "\t", "\x0b", "\x1c", "\x1f", "'s", "'LL", "'", "1", "2345", ".", "--"]
PARTS += ["é", "“", "\u00a0", "\u2003", "\u0085", "e\u0301", "中文", "²", "_", "\u017f", "<|endoftext|>", "<|pad|", "A"]
messy = st.lists(st.sampled_from(PARTS), max_size=40).map("".join)


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=150)
@given(text=st.one_of(messy, st.text(max_size=60), st.text(st.characters(max_codepoint=127), max_size=60)))
@example(text=TEXTS[0])
@example(text=TEXTS[1])
@example(text="x" * 100 + " y" * 300 + " é")
def test_word_cache_equals_the_library(pattern: str | None, text: str) -> None:
    tokenizer = wrapped(pattern)
    assert tokenizer._words is not None
    (ids,) = tokenizer.encode_batch([text])
    assert ids.tolist() == tokenizer.encode(text)
    assert ids.dtype == np.uint16


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=100)
@given(text=messy)
def test_text_may_be_cut_where_it_says(pattern: str | None, text: str) -> None:
    """Long documents are split at these places, so the ids of the parts must be those of the whole text."""
    library = byte_level(pattern)
    parts = [library.encode(part).ids for part in CUT.split(text)]
    assert sum(parts, []) == library.encode(text).ids
    data = text.encode()
    assert [match.end() for match in CUT_BYTES.finditer(data)] == [
        len(text[: match.end()].encode()) for match in CUT.finditer(text)
    ]


def test_the_cache_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.data.words.MAX_WORDS", 20)
    tokenizer = made_of(byte_level())
    assert tokenizer._words is not None
    for number in range(100):
        text = f"word{number} other{number} thing{number}é"
        (ids,) = tokenizer.encode_batch([text])
        assert ids.tolist() == tokenizer.encode(text)
    assert len(tokenizer._words) < 40


def changed(**changes: Any) -> Tokenizer:
    """Return the byte-level BPE with some of its settings replaced."""
    config = json.loads(byte_level().to_str())
    return Tokenizer.from_str(json.dumps({**config, **changes}))


def test_the_cache_is_refused_where_it_would_not_be_exact() -> None:
    assert ascii_words(byte_level()) is not None
    level = json.loads(byte_level().to_str())["pre_tokenizer"]
    model = json.loads(byte_level().to_str())["model"]
    assert ascii_words(changed(pre_tokenizer={**level, "add_prefix_space": True})) is None
    assert ascii_words(changed(pre_tokenizer={**level, "use_regex": False})) is None
    assert ascii_words(changed(pre_tokenizer={"type": "Whitespace"})) is None
    assert ascii_words(changed(pre_tokenizer=None)) is None
    assert ascii_words(changed(normalizer={"type": "Lowercase"})) is None
    assert ascii_words(changed(model={**model, "dropout": 0.1})) is None
    spaced = changed()
    spaced.add_special_tokens([AddedToken("<a b>")])
    assert ascii_words(spaced) is None
    stripping = changed()
    stripping.add_special_tokens([AddedToken("<a>", rstrip=True)])
    assert ascii_words(stripping) is None
    plain = made_of(changed(pre_tokenizer={**level, "add_prefix_space": True}))
    assert plain.cut is None and plain.encode_batch(["the fox"])[0].tolist() == plain.encode("the fox")


def test_bytes() -> None:
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.encode("aé") == [97, 195, 169]
    (ids,) = tokenizer.encode_batch(["aé"])
    assert ids.tolist() == [97, 195, 169] and ids.dtype == np.uint16
    assert tokenizer.decode([97, 195, 169, 256, 300]) == "aé"
    with pytest.raises(UserError, match="leave out --eod"):
        load_tokenizer("bytes", "x")


def test_tokenizer_json_by_file_and_folder(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    for spec in (tmp_path / "tokenizer.json", tmp_path):
        tokenizer = load_tokenizer(str(spec))
        assert tokenizer.vocab_size == byte_level().get_vocab_size() and tokenizer.eod == 0
        assert tokenizer.decode(tokenizer.encode(TEXTS[1]) + [tokenizer.eod]) == TEXTS[1]
    assert load_tokenizer(str(tmp_path), "<|pad|>").eod == 1
    again = load_tokenizer(str(tmp_path)).recipe.make()
    assert again.encode("the fox") == byte_level().encode("the fox").ids
    with pytest.raises(UserError, match="no token '<nope>'.*--eod"):
        load_tokenizer(str(tmp_path), "<nope>")


def test_an_end_token_must_be_found(tmp_path: Path) -> None:
    library = Tokenizer(models.WordLevel({"a": 0, "b": 7, "<stop>": 3}, unk_token="a"))
    library.save(str(tmp_path / "t.json"))
    with pytest.raises(UserError, match="--eod TOKEN"):
        load_tokenizer(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(str(tmp_path / "t.json"), "<stop>")
    # The ids may have gaps, so the vocabulary size is the largest id plus one.
    assert (tokenizer.eod, tokenizer.vocab_size) == (3, 8)
    Tokenizer(models.WordLevel({"2": 5, "a": 0, "b": 2}, unk_token="a")).save(str(tmp_path / "t.json"))
    assert load_tokenizer(str(tmp_path / "t.json"), "2").eod == 2, "a number is an id, not the text of a digit"
    with pytest.raises(UserError, match="no token with the id 9"):
        load_tokenizer(str(tmp_path / "t.json"), "9")
    with pytest.raises(UserError, match="--eod 2 is the id of a token"):
        train_tokenizer(["some text"], 300, "train:300", "2")
    for end in ("</s>", "<eos>", "<|end_of_text|>"):
        Tokenizer(models.WordLevel({"a": 0, end: 1}, unk_token="a")).save(str(tmp_path / "t.json"))
        assert load_tokenizer(str(tmp_path / "t.json")).eod == 1


def test_tokenizers_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("{}")
    (tmp_path / "t.model").write_bytes(b"nonsense")
    (tmp_path / "x").write_text("")
    with pytest.raises(UserError, match="not a readable tokenizer.json"):
        load_tokenizer(str(tmp_path / "t.json"))
    with pytest.raises(UserError, match="not a SentencePiece model"):
        load_tokenizer(str(tmp_path / "t.model"))
    with pytest.raises(UserError, match="unknown tokenizer"):
        load_tokenizer(str(tmp_path / "x"))
    for missing in ("none.json", "none.model"):
        with pytest.raises(UserError, match="no tokenizer at"):
            load_tokenizer(str(tmp_path / missing))


def test_sentencepiece(tmp_path: Path) -> None:
    import sentencepiece

    text = tmp_path / "text.txt"
    text.write_text("\n".join(["the quick brown fox", "jumps over the lazy dog", "a quick dog"] * 20))
    options = f"--input={text} --model_prefix={tmp_path / 'm'} --vocab_size=60 --hard_vocab_limit=false --minloglevel=2"
    sentencepiece.SentencePieceTrainer.train(options)
    tokenizer = load_tokenizer(str(tmp_path / "m.model"))
    ids = tokenizer.encode("the quick dog")
    assert tokenizer.decode(ids) == "the quick dog" and tokenizer.eod == 2
    assert tokenizer.encode_batch(["the quick dog", ""])[0].tolist() == ids
    assert load_tokenizer(str(tmp_path / "m.model"), "<s>").eod == 1
    assert tokenizer.recipe.make().encode("the quick dog") == ids


def test_sentencepiece_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name == "sentencepiece":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"pip install meshwright\[sentencepiece\]"):
        TokenizerSource("model", b"", None, "x.model").make()


def test_training_is_repeatable() -> None:
    one, two = (train_tokenizer(iter(TEXTS * 3), 300, "t.json") for _ in range(2))
    assert one.recipe == two.recipe
    assert one.vocab_size == 300 and one.eod == 0 and one.cut is CUT_BYTES
    assert one.decode(one.encode(TEXTS[1])) == TEXTS[1]
    assert train_tokenizer(iter(TEXTS), 300, "t.json", "<end>").encode("<end>") == [0]


def test_train_specs() -> None:
    assert trained_size("train:8_192") == 8192 and trained_size("bytes") is None
    for wrong in ("train:", "train:big", "train:256", "train:-5", "train:99999999999"):
        with pytest.raises(UserError, match="train:"):
            trained_size(wrong)
