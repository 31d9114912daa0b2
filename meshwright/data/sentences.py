"""Where sentences end, by a simple rule for languages that are written with . ! ? or their full-width forms.

A sentence ends after . ! ? or … (with quotes and brackets that close behind it) where white space follows, and after it
no small letter; after 。！？ in any case; and before an empty line. A full stop behind a single letter (J. Smith, e.g.)
or a common abbreviation (Dr. Smith) ends none. What a sentence begins with is the white space before it, so that all of
them together are the text.
"""

from __future__ import annotations

import re

ABBREVIATIONS = frozenset(
    ("mr", "mrs", "ms", "dr", "prof", "st", "sr", "jr", "vs", "etc", "fig", "eq", "vol", "pp", "cf", "al", "inc", "ltd")
)
CLOSING = "\"'”’»)\\]"
# Runs are matched from their beginning and as a whole: a page of dots takes no longer than one of letters.
ENDS = re.compile(
    rf"(?<![.!?…])(?P<stop>[.!?…]++[{CLOSING}]*+)(?=\s++(?P<next>\S))"
    r"|(?<![。！？])[。！？]++[”’」』）]*+(?=\s*+\S)"
    r"|(?<=\S)(?=[^\S\n]*+\n[^\S\n]*+\n\s*+\S)"
)
LAST_WORD = re.compile(r"[^\W\d_]+\Z")
LONGEST_ABBREVIATION = max(map(len, ABBREVIATIONS))


def split_sentences(text: str) -> list[str]:
    """Returns the sentences of a text, one at least; joined they are the text."""
    cuts = [found.end() for found in ENDS.finditer(text) if _ends(text, found)]
    edges = [0, *cuts, len(text)]
    return [text[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True) if b > a] or [text]


def _ends(text: str, found: re.Match[str]) -> bool:
    stop = found["stop"]
    if stop is None:
        return True
    if found["next"].islower():
        return False
    if stop != ".":
        return True
    word = LAST_WORD.search(text[max(0, found.start() - LONGEST_ABBREVIATION - 1) : found.start()])
    return word is None or (len(word[0]) > 1 and word[0].lower() not in ABBREVIATIONS)
