"""Functions that parse the project's Markdown pages into headings, links and fenced blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```\s*$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block: `info` is the text after its opening fence, and `text` its content."""

    info: str
    text: str

    @property
    def language(self) -> str:
        return self.info.split()[0] if self.info.split() else ""

    @property
    def is_output(self) -> bool:
        return 'title="output"' in self.info


def blocks(page: Path) -> list[Block]:
    return [Block(info.strip(), text) for info, text in FENCE.findall(page.read_text(encoding="utf-8"))]


def prose(page: Path) -> str:
    """Return the text of a page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as Markdown renderers make them."""
    headings = re.findall(r"^#{1,6} +(.+?)\s*$", prose(page), re.M)
    plain = (re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", lambda m: m[1] or "", text) for text in headings)
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in plain}


def links(page: Path) -> list[str]:
    return re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(page)))


def commands(text: str) -> list[str]:
    """Return the `meshwright ...` commands of a text, each as one line."""
    joined = re.sub(r"\\\n\s*", " ", text)
    return [line.strip() for line in joined.splitlines() if line.strip().startswith("meshwright ")]
