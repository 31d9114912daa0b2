"""Conversations made of Python's own standard library, for twins of recipes: the name of a function is asked for, and
the first line of its documentation is the answer. No torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from meshwright.data.documents import STDLIB, find_files, read_documents
from meshwright.data.packed import MASK
from meshwright.data.token_writer import TokenFileWriter, metadata
from meshwright.data.tokenizers import load_tokenizer

MOST, LONGEST = 2000, 60  # conversations, and characters of each half


def write_talks(prefix: str) -> None:
    """Write the conversations, and which of their tokens are learned, as `data chat` does."""
    tokenizer, learned = load_tokenizer("bytes"), 0
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    with TokenFileWriter(prefix, tokenizer.dtype) as tokens, TokenFileWriter(prefix + MASK, np.uint8) as masks:
        for question, answer in islice(_talks(), MOST):
            asked, said = (tokenizer.encode(text) for text in (f"{question}\n", answer))
            ids = np.asarray([*asked, *said, tokenizer.eod], tokens.dtype)
            mask = bytes([0] * len(asked) + [1] * (len(said) + 1))
            tokens.add_documents(ids.tobytes(), [len(ids)])
            masks.add_documents(mask, [len(ids)])
            learned += sum(mask)
        masks.finish()
        tokens.finish({".json": metadata(tokenizer, tokens, chat="chat", learned=learned, template="")})


def _talks() -> Iterator[tuple[str, str]]:
    for part in (part for file in find_files([STDLIB]) for part in read_documents(file, "text")):
        try:
            tree = ast.parse(part.text)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (said := ast.get_docstring(node)):
                yield f"{node.name}?"[:LONGEST], said.splitlines()[0][:LONGEST]
