"""The data of a page in a file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any


def page_data(path: Path) -> Any:
    """Return the data that a page draws, and check that it loads nothing from elsewhere."""
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", text) and "@import" not in text
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])
