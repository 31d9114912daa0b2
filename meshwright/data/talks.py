"""Make conversations from Python's standard library, as data for small twins of recipes.

The question is the name of a function or class, and the answer is the first line of its docstring. No torch.
"""

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

MOST, LONGEST = 2000, 60  # number of conversations, and characters of a question or an answer


def write_talks(prefix: str) -> None:
    """Write the conversations and their masks, in the same files as `data chat`."""
    tokenizer, learned = load_tokenizer("bytes"), 0
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    with TokenFileWriter(prefix, tokenizer.dtype) as tokens, TokenFileWriter(prefix + MASK, np.uint8) as masks:
        for question, answer in islice(_talks(), MOST):
            question_ids, answer_ids = (tokenizer.encode(text) for text in (f"{question}\n", answer))
            ids = np.asarray([*question_ids, *answer_ids, tokenizer.eod], tokens.dtype)
            mask = bytes([0] * len(question_ids) + [1] * (len(answer_ids) + 1))
            tokens.add_documents(ids.tobytes(), [len(ids)])
            masks.add_documents(mask, [len(ids)])
            learned += sum(mask)
        masks.finish()
        tokens.finish({".json": metadata(tokenizer, tokens, chat="chat", learned=learned, template="")})


def _talks() -> Iterator[tuple[str, str]]:
    """Yield pairs of a question and its answer."""
    for part in (part for file in find_files([STDLIB]) for part in read_documents(file, "text")):
        try:
            tree = ast.parse(part.text)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (docstring := ast.get_docstring(node)):
                yield f"{node.name}?"[:LONGEST], docstring.splitlines()[0][:LONGEST]
