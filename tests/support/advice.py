"""Reads the advice of a refusal from its sentence."""

from __future__ import annotations

import re
from typing import Any

from meshwright.config.yaml_text import parse_yaml

KEY = re.compile(r"([a-z_]+(?:\.[a-z_]+)+)=(\[[^\]]*\]|[^\s,();:]+)")


def advised(sentence: str) -> list[dict[str, Any]]:
    """Return the advice after the last colon of a sentence: for each alternative, the keys that it sets.

    If several values are given for one key ("x.y=1 or 2"), the first one is taken.
    """
    if ": " not in sentence:
        return []
    head, text = sentence.rsplit(": ", 1)
    if (tried := re.match(r"try ([\w.]+)(?![\w.=])", text)) and (named := KEY.findall(head)):
        return [{named[0][0]: parse_yaml(tried[1], named[0][0])}]
    text = re.sub(r"=([a-z0-9.]+)((, [a-z0-9.]+)* or [a-z0-9.]+)(?=,? with |$)", r"=\1", text)
    # "layout.cp=model.seq" compares two keys and sets none.
    parts = [KEY.findall(part) for part in re.split(r",? or ", text)]
    found = [{key: value for key, value in part if "." not in value or value[0].isdigit()} for part in parts]
    return [{key: parse_yaml(value, key) for key, value in keys.items()} for keys in found if keys]
