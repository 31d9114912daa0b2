"""The page as one HTML text that loads nothing: its parts lie beside this file, the data are put in. No torch."""

from __future__ import annotations

import base64
import hashlib
import json
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "page"
SCRIPTS = ("units.js", "chart.js", "drawings.js", "panels.js", "more_panels.js", "main.js")


@lru_cache(maxsize=1)
def _parts() -> tuple[str, str, str]:
    script = "".join((FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS)
    html, style = ((FOLDER / name).read_text(encoding="utf-8") for name in ("page.html", "page.css"))
    return html, style, f'"use strict";\n{script}'


def policy() -> str:
    """What the page may do: run its own script, and ask the server that it came from for data. Nothing else, of nobody
    else."""
    digest = base64.b64encode(hashlib.sha256(_parts()[2].encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


def in_script(value: Any) -> str:
    """JSON that can't end the element it stands in."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")


def page(title: str, data: Any, live: bool) -> str:
    html, style, script = _parts()
    filled = {
        "POLICY": escape(policy(), quote=True), "TITLE": escape(title), "STYLE": style, "SCRIPT": script,
        "DATA": in_script(data), "LIVE": "live" if live else "file",
    }  # fmt: skip
    head, *pieces = html.split("{{")
    for piece in pieces:
        name, _, rest = piece.partition("}}")
        head += filled[name] + rest
    return head
