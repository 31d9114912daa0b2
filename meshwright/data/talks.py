"""Conversations made of Python's own standard library, for twins of recipes: the name of a function is asked for, and
the first line of its documentation is the answer. No torch."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from meshwright.data.documents import STDLIB, find_files, read_documents
from meshwright.data.packed import MASK
from meshwright.data.token_file import METADATA_FORMAT
from meshwright.data.token_writer import TokenFileWriter
from meshwright.data.tokenizers import load_tokenizer

MOST, LONGEST = 2000, 60  # conversations, and characters of each half


def write_talks(prefix: str) -> int:
    """Writes the conversations and what of them is learned, as `data chat` does, and returns how many there are."""
    tokenizer, count, total, learned = load_tokenizer("bytes"), 0, 0, 0
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    with TokenFileWriter(prefix, tokenizer.dtype) as tokens, TokenFileWriter(prefix + MASK, np.uint8) as masks:
        for question, answer in _talks():
            asked, said = (tokenizer.encode(text) for text in (f"{question}\n", answer))
            ids = np.asarray([*asked, *said, tokenizer.eod], tokens.dtype)
            mask = bytes([0] * len(asked) + [1] * (len(said) + 1))
            tokens.add_documents(ids.tobytes(), [len(ids)])
            masks.add_documents(mask, [len(ids)])
            count, total, learned = count + 1, total + len(ids), learned + sum(mask)
        masks.finish()
        told = {
            "format": METADATA_FORMAT, "version": 1, "tokenizer": tokenizer.recipe.spec, "tokenizer_file": None,
            "tokenizer_digest": tokenizer.recipe.digest, "vocab_size": tokenizer.vocab_size, "eod": tokenizer.eod,
            "dtype": tokenizer.dtype.name, "documents": count, "tokens": total, "chat": "chat", "learned": learned,
            "template": "",
        }  # fmt: skip
        tokens.finish({".json": json.dumps(told, indent=1).encode() + b"\n"})
    return count


def _talks() -> Iterator[tuple[str, str]]:
    count = 0
    for part in (part for file in find_files([STDLIB]) for part in read_documents(file, "text")):
        try:
            tree = ast.parse(part.text)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (said := ast.get_docstring(node)):
                if count == MOST:
                    return
                count += 1
                yield f"{node.name}?"[:LONGEST], said.splitlines()[0][:LONGEST]
