"""Checks the form of texts and names: `python -m tests.support.english [FILE or FOLDER ...]` lists complaints.

A check of form cannot tell good English from bad. It stops the habits that made earlier texts hard to read: functions
described by a noun or a fragment, "what is" used as a noun, and words that only this project used.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("meshwright", "tests", "benchmarks", "examples")

# A docstring that starts with one of these is a fragment.
FRAGMENTS = {
    "what", "those", "whether", "of", "where", "who", "whose", "whom", "which", "how", "why", "when", "that", "by",
    "with", "from", "for", "on", "at", "as", "no", "not", "after", "before", "between", "if", "unless",
}  # fmt: skip

# The verbs that a function's docstring may start with. Add one to the file when a function needs it.
VERBS = frozenset((Path(__file__).parent / "verbs.txt").read_text(encoding="utf-8").split())

# Phrases of earlier texts that a native speaker would not write, with what to write instead.
PHRASES = {
    r"(?<=[a-z,] )what (is|are|was|were|a|an|the|it|they)\b": "name the thing instead of `what is ...`",
    r"\b(is|are|was|were|be|been|being) told\b": "receive, know, be passed, be broadcast",
    r"\blaid to\b": "attributed to",
    r"\bso many\b": "that many, or name the number",
    r"\bof (its|their|one's|our) own\b": "its own ..., or nothing",
    r"\bsomebody\b|\beverybody\b|\bnobody\b": "name who",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bbesides\b": "in addition, also",
    r"\bcome[s]? from a checkpoint\b": "resumed from a checkpoint",
    r"\bgoes on\b|\bgo on\b|\bwent on\b|\bgoing on\b": "continue",
    r"\bstand[s]? for itself\b|\bstands in for nothing\b": "say what it does",
    r"\bthe likes of\b": "name them",
    r"\bat which (it|they) (stands?|lies?)\b": "its position",
    r"\bunder way\b": "in flight, in progress",
    r"\bdealt\b": "assigned, distributed",
    r"\bfor want of\b": "without",
    r"\bis due of\b": "is due",
    r"\bnot any (more|longer)\b|\bany more\b": "no longer",
}  # fmt: skip

_PHRASES = [(re.compile(pattern, re.IGNORECASE), instead) for pattern, instead in PHRASES.items()]

Complaint = tuple[int, str]


def sources(paths: Iterable[Path]) -> list[Path]:
    """Return the Python files among and below some paths, sorted."""
    return sorted(found for path in paths for found in (path.rglob("*.py") if path.is_dir() else [path]))


def _documented(tree: ast.Module) -> Iterator[tuple[ast.AST, int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node, node.body[0].lineno, text


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = {getattr(each, "attr", getattr(each, "id", "")) for each in node.decorator_list}
    return bool(names & {"property", "cached_property", "fixture"})


def _opening(node: ast.AST, text: str, statements: bool) -> str | None:
    """Return a complaint about the first word of a docstring. `statements`: functions may begin with any sentence."""
    first = re.match(r"[\w'-]+", text)
    word = first.group().lower() if first else ""
    if word in FRAGMENTS:
        return f"starts with {first.group()!r}: start with a verb, or say what it is"  # type: ignore[union-attr]
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if not is_function or statements or _is_property(node) or word in VERBS:  # type: ignore[arg-type]
        return None
    return f"starts with {text.split()[0]!r}: start with an imperative verb"


def _phrases(text: str) -> Iterator[str]:
    plain = re.sub(r"`[^`]*`", "``", " ".join(text.split()))
    for pattern, instead in _PHRASES:
        if found := pattern.search(plain):
            yield f"{plain[max(0, found.start() - 30) : found.end() + 20]!r}: {instead}"


def _nested(tree: ast.Module) -> Iterator[int]:
    """Yield the lines of conditional expressions that contain another one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            parts = (part for child in ast.iter_child_nodes(node) for part in ast.walk(child))
            if any(isinstance(part, ast.IfExp) for part in parts):
                yield node.lineno


def complaints(source: str, in_tests: bool = False) -> list[Complaint]:
    """Return (line, complaint) for every docstring, comment and expression of a module that breaks a rule.

    The name of a test is already a sentence, so its docstring may be any sentence.
    """
    tree = ast.parse(source)
    nested = "a conditional expression inside another: use statements"
    found: list[Complaint] = [(line, nested) for line in _nested(tree)]
    for node, line, text in _documented(tree):
        statements = in_tests and getattr(node, "name", "").startswith("test")
        if complaint := _opening(node, text, statements):
            found.append((line, complaint))
        found += [(line, each) for each in _phrases(text)]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("#!", "# fmt:", "# type:", "# noqa")):
            found += [(token.start[0], each) for each in _phrases(token.string)]
    return sorted(found)


def duplicate_classes(paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Return the public classes that several files define under one name, with those files."""
    by_name: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                by_name[node.name].append(path)
    return {name: files for name, files in sorted(by_name.items()) if len(files) > 1}


def main(arguments: list[str]) -> int:
    """Print the complaints about some files or folders; return 1 if there are any."""
    paths = [Path(argument) for argument in arguments] or [ROOT / folder for folder in FOLDERS]
    total = 0
    for path in sources(paths):
        in_tests = "tests" in path.resolve().relative_to(ROOT).parts
        for line, complaint in complaints(path.read_text(encoding="utf-8"), in_tests):
            print(f"{path}:{line}: {complaint}")
            total += 1
    print(f"{total} complaints", file=sys.stderr)
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
