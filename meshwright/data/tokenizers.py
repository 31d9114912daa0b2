"""Tokenizers by name: bytes, a Hugging Face tokenizer.json, a SentencePiece .model, or one trained on the input.

`encode` never adds tokens at the beginning of a text, and `prepare` ends every document with `eod`. A recipe is the
plain data from which a worker process makes the same tokenizer again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.data.token_file import token_dtype
from meshwright.disk import hub_hint, refusal
from meshwright.errors import UserError
from meshwright.outside import of_kind, parse_json

END_TOKENS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")
SMALLEST_TRAINED = 257
LARGEST_TRAINED = 2**24
SPEC_FORMS = "bytes, PATH/tokenizer.json, PATH.model or train:SIZE"

Ids = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class TokenizerSource:
    """The data from which a tokenizer is made: its `kind` (bytes, json or model) and the `content` of its file."""

    kind: str
    content: bytes
    eod: str | None
    spec: str

    @property
    def digest(self) -> str:
        """A hash of the tokenizer: files with the same digest have the same ids for the same text.

        Differences that writing or loading a tokenizer.json causes don't count: white space, the order of keys,
        truncation and padding.
        """
        content = self.content
        if self.kind == "json":
            settings = of_kind(parse_json(content.decode("utf-8", "replace")), dict[str, Any], "it")
            relevant = {key: value for key, value in settings.items() if key not in ("truncation", "padding")}
            content = json.dumps(relevant, sort_keys=True).encode()
        return f"{self.kind}:{hashlib.sha256(content).hexdigest()}"

    def make(self) -> Tokenizer:
        kinds: dict[str, Callable[[TokenizerSource], Tokenizer]]
        kinds = {"bytes": ByteTokenizer, "json": JsonTokenizer, "model": SentencePieceTokenizer}
        return kinds[self.kind](self)


# Tokenizers decode a character whose last tokens are still missing to this.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Tokenizer(Protocol):
    """The interface of a tokenizer that `prepare` and `generate` use.

    A document's bytes may be split where a match of `cut` ends, without changing its ids. If `cut` is None, a document
    must not be split.
    """

    recipe: TokenizerSource
    vocab_size: int
    eod: int
    cut: re.Pattern[bytes] | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of ids in a token file."""
        return token_dtype(self.vocab_size)

    def encode(self, text: str) -> list[int]: ...

    def encode_with_special_tokens(self, text: str) -> list[int]:
        """Encode a text with the special tokens that the tokenizer puts around it, as its models expect."""
        return self.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text, in the token file's dtype."""

    def decode(self, ids: Sequence[int]) -> str: ...

    def pieces(self) -> list[str]:
        """Return the vocabulary's spelling of each id, or an empty string for ids that it leaves out."""


class ByteTokenizer(Tokenizer):
    """A tokenizer whose ids are the 256 byte values of UTF-8 text, and 256 for the end of a document."""

    vocab_size = 257
    eod = 256
    cut = re.compile(rb"\n")

    def __init__(self, recipe: TokenizerSource) -> None:
        if recipe.eod is not None:
            raise UserError("the bytes tokenizer ends documents with its own token, 256: leave out --eod")
        self.recipe = recipe

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(self.dtype) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text. The end token, and ids that exist only in a padded vocabulary, are left out."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def pieces(self) -> list[str]:
        """Return ASCII bytes as characters, all others as a letter, and an empty string for the end token.

        `word_parts` looks at the first and last character: with a letter, the bytes of other scripts form words.
        """
        return [chr(i) if i < 128 else "\u00ff" for i in range(256)] + [""]


class JsonTokenizer(Tokenizer):
    """A Hugging Face tokenizer.json. It encodes through the word cache if that is exact."""

    def __init__(self, recipe: TokenizerSource) -> None:
        from tokenizers import Tokenizer as Library

        from meshwright.data.words import CUT_BYTES, WordCache, ascii_words

        try:
            self._library: Any = Library.from_str(recipe.content.decode("utf-8", "replace"))
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"{recipe.spec} is not a readable tokenizer.json ({error}): check the file") from None
        # A tokenizer.json may store settings for truncation and padding, which would change documents.
        self._library.no_truncation()
        self._library.no_padding()
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError(f"{recipe.spec} has an empty vocabulary: check the file")
        self.recipe = recipe
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod = _end_token(vocabulary, recipe)
        pattern = ascii_words(self._library)
        self._words = WordCache(self._library, pattern, self.dtype) if pattern else None
        self.cut = CUT_BYTES if pattern else None

    def encode(self, text: str) -> list[int]:
        return list(self._library.encode(text, add_special_tokens=False).ids)

    def encode_with_special_tokens(self, text: str) -> list[int]:
        return list(self._library.encode(text).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        if self._words is not None:
            return [self._words.encode(text) for text in texts]
        encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._library.decode(list(map(int, ids)), skip_special_tokens=True))

    def pieces(self) -> list[str]:
        return [self._library.id_to_token(i) or "" for i in range(self.vocab_size)]


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece .model."""

    def __init__(self, recipe: TokenizerSource) -> None:
        try:
            import sentencepiece
        except ImportError:
            raise UserError(f"{recipe.spec} needs SentencePiece: pip install meshwright[sentencepiece]") from None
        # The library takes empty bytes to mean that no model is given, and reports errors only later.
        if not recipe.content:
            raise UserError(f"{recipe.spec} is not a SentencePiece model (it is empty): check the file")
        try:
            self._library: Any = sentencepiece.SentencePieceProcessor(model_proto=recipe.content)
        except Exception as error:  # RuntimeError or ValueError, depending on the library's version
            raise UserError(f"{recipe.spec} is not a SentencePiece model ({error}): check the file") from None
        self.recipe = recipe
        self.vocab_size = int(self._library.get_piece_size())
        pieces = {self._library.id_to_piece(i): i for i in range(self.vocab_size)}
        eos = int(self._library.eos_id())  # -1 if the model has none
        self.eod = eos if recipe.eod is None and eos >= 0 else _end_token(pieces, recipe)

    def encode(self, text: str) -> list[int]:
        return list(self._library.encode(text, out_type=int))

    def encode_with_special_tokens(self, text: str) -> list[int]:
        begin = int(self._library.bos_id())
        return ([begin] if begin >= 0 else []) + self.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        # One thread, because the worker processes already use all cores.
        lists = self._library.encode(list(texts), out_type=int, num_threads=1)
        return [np.array(ids, dtype=self.dtype) for ids in lists]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._library.decode(list(map(int, ids))))

    def pieces(self) -> list[str]:
        return [str(self._library.id_to_piece(i)) for i in range(self.vocab_size)]


def load_tokenizer(spec: str, eod: str | None = None) -> Tokenizer:
    """Return the tokenizer that a spec names: `bytes`, a tokenizer.json (or its folder), or a SentencePiece .model."""
    if spec == "bytes":
        return TokenizerSource("bytes", b"", eod, spec).make()
    path = os.path.join(spec, "tokenizer.json") if os.path.isdir(spec) else spec
    kind = os.path.splitext(path)[1].removeprefix(".")
    if kind not in ("json", "model"):
        raise UserError(f"unknown tokenizer '{spec}'{hub_hint(spec)}: give {SPEC_FORMS}")
    try:
        with open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        raise UserError(f"no tokenizer at '{path}': give {SPEC_FORMS}") from None
    except OSError as error:
        raise refusal(f"cannot read the tokenizer {spec}", error, path, "another tokenizer") from None
    return TokenizerSource(kind, content, eod, path).make()


def trained_size(spec: str) -> int | None:
    """Return SIZE of `train:SIZE`, or None for any other spec."""
    if not spec.startswith("train:"):
        return None
    try:
        size = int(spec.removeprefix("train:").replace(",", "").replace("_", ""))
    except ValueError:
        raise UserError(f"'{spec}' does not name a vocabulary size: write for example train:8192") from None
    if size < SMALLEST_TRAINED:
        raise UserError(f"'{spec}' is too small: 256 bytes and an end token need train:{SMALLEST_TRAINED} at least")
    if size > LARGEST_TRAINED:
        raise UserError(f"'{spec}' is too large: a trained vocabulary has at most {LARGEST_TRAINED} entries")
    return size


def train_tokenizer(texts: Iterable[str], size: int, spec: str, eod: str | None = None) -> Tokenizer:
    """Train a byte-level BPE of at most `size` entries, including the end token.

    The same texts always give the same tokenizer.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if eod and eod.isdecimal():
        raise UserError(f"--eod {eod} is the id of a token, and a new tokenizer has none yet: name a text, e.g. </s>")
    end = eod or END_TOKENS[0]
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[end], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    library.train_from_iterator(texts, trainer)
    return TokenizerSource("json", library.to_str().encode(), end, spec).make()


def _end_token(vocabulary: dict[str, int], recipe: TokenizerSource) -> int:
    """Return the id of the token that ends a document. If the recipe names it by digits, they are an id, not a text."""
    if recipe.eod is not None and recipe.eod.isdecimal():
        if int(recipe.eod) in vocabulary.values():
            return int(recipe.eod)
        raise UserError(f"{recipe.spec} has no token with the id {recipe.eod}: name one it has with --eod TOKEN or ID")
    for token in END_TOKENS if recipe.eod is None else (recipe.eod,):
        if token in vocabulary:
            return vocabulary[token]
    if recipe.eod is not None:
        raise UserError(f"{recipe.spec} has no token '{recipe.eod}': name one it has with --eod TOKEN")
    usual = ", ".join(END_TOKENS)
    raise UserError(
        f"{recipe.spec} has none of the usual end-of-document tokens ({usual}): name its own with --eod TOKEN"
    )
