"""Puts a page together from its data and scripts: one HTML file that loads nothing else. No torch.

All pages share `page/`: the frame, the style, charts and drawings. The page's own scripts come after these, and draw
its data.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "page"
SHARED = ("units.js", "chart.js", "drawings.js", "frame.js")


class PageScripts:
    """The scripts of a page, and its content security policy."""

    def __init__(self, *own: Path) -> None:
        self._files = (*(FOLDER / name for name in SHARED), *own)

    @cached_property
    def text(self) -> str:
        """The shared scripts, and then the page's own."""
        return '"use strict";\n' + "".join(path.read_text(encoding="utf-8") for path in self._files)

    @cached_property
    def policy(self) -> str:
        """The policy: the page may run only these scripts, recognised by their hash, and ask only its own server."""
        digest = base64.b64encode(hashlib.sha256(self.text.encode()).digest()).decode()
        return (
            f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'"
        )


def in_script(value: Any) -> str:
    """Return JSON that is safe inside a script element: it can't contain the tag that ends the element."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")


def page(title: str, data: Any, scripts: PageScripts, live: bool = False) -> str:
    """Return the page that draws `data`. A page that is not `live` is a file, without a server to ask."""
    html, style = ((FOLDER / name).read_text(encoding="utf-8") for name in ("page.html", "page.css"))
    filled = {
        "POLICY": escape(scripts.policy, quote=True), "TITLE": escape(title), "STYLE": style, "SCRIPT": scripts.text,
        "DATA": in_script(data), "LIVE": "live" if live else "file",
    }  # fmt: skip
    # Not a chain of `replace`: a value that contains a placeholder must not be filled in.
    text, *parts = html.split("{{")
    for part in parts:
        name, _, rest = part.partition("}}")
        text += filled[name] + rest
    return text
