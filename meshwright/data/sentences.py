"""Where sentences end, by a simple rule for languages that are written with . ! ? or their full-width forms.

A sentence ends after . ! ? or … (with quotes and brackets that close behind it) where white space follows, and after it
no small letter; after 。！？ in any case; and before an empty line. A full stop behind a single letter (J. Smith, e.g.)
or a common abbreviation (Dr. Smith) ends none. What a sentence begins with is the white space before it, so that all of
them together are the text.
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
# It begins with a set of characters, which is found fast, and takes every run as a whole: a page of dots takes no
# longer than one of letters.
STOP_AND_GAP = re.compile(rf"[{STOPS}\n](?:(?<=\n)|[{STOPS}]*+[{CLOSING}]*+)(?P<gap>\s*+)")
LAST_WORD = re.compile(r"[^\W\d_]+\Z")
LONGEST_ABBREVIATION = max(map(len, ABBREVIATIONS))


def split_sentences(text: str) -> list[str]:
    """Returns the sentences of a text, one at least; joined they are the text."""
    found = (_end(text, match) for match in STOP_AND_GAP.finditer(text) if match.end() < len(text))
    edges = [0, *(at for at in found if at), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def _end(text: str, found: re.Match[str]) -> int:
    """Returns where a sentence ends at a stop or a new line, and 0 if none does."""
    begin, gap, end = found.start(), found.start("gap"), found.end()
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
