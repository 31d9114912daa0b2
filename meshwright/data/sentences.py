"""Split text into sentences, by a simple rule for languages that use . ! ? or their full-width forms.

A sentence ends after . ! ? or … (and closing quotes and brackets), if white space and then no lower-case letter
follows. It always ends after 。！？ and before an empty line. A full stop after a single letter (J. Smith, e.g.) or a
common abbreviation (Dr. Smith) ends no sentence. White space between two sentences belongs to the second, so that all
sentences joined are the text.
"""

from __future__ import annotations

import re
from itertools import pairwise

ABBREVIATIONS = frozenset(
    ("mr", "mrs", "ms", "dr", "prof", "st", "sr", "jr", "vs", "etc", "fig", "eq", "vol", "pp", "cf", "al", "inc", "ltd")
)
FULL_WIDTH = frozenset("。！？")
STOPS = ".!?…。！？"
CLOSING = "\"'”’»)\\]」』）"
# The pattern begins with a set of characters, which `re` finds fast. The possessive quantifiers take every run as a
# whole, so that a page of dots takes no longer than one of letters.
STOP_AND_GAP = re.compile(rf"[{STOPS}\n](?:(?<=\n)|[{STOPS}]*+[{CLOSING}]*+)(?P<gap>\s*+)")
LAST_WORD = re.compile(r"[^\W\d_]+\Z")
LONGEST_ABBREVIATION = max(map(len, ABBREVIATIONS))


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text, at least one. Joined, they are the text."""
    ends = (_end(text, match) for match in STOP_AND_GAP.finditer(text) if match.end() < len(text))
    edges = [0, *(end for end in ends if end), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def _end(text: str, match: re.Match[str]) -> int:
    """Return the position where a sentence ends at this match, or 0 if none ends there."""
    begin = match.start()
    gap = match.start("gap")
    end = match.end()
    if text[begin] == "\n":
        if text.find("\n", gap, end) < 0:
            return 0
        while begin and text[begin - 1].isspace():
            begin -= 1
        return begin
    if text.count("\n", gap, end) > 1 or not FULL_WIDTH.isdisjoint(text[begin:gap]):
        return gap
    if gap == end or text[end].islower():
        return 0
    if text[begin:gap] == ".":
        word = LAST_WORD.search(text[max(0, begin - LONGEST_ABBREVIATION - 1) : begin])
        if word and (len(word[0]) == 1 or word[0].lower() in ABBREVIATIONS):
            return 0
    return gap
