"""A real Chromium for tests of pages, if Playwright and a Chromium are installed.

A test module makes its fixture with `browser = pytest.fixture(scope="module")(chromium)`. MESHWRIGHT_SCREENSHOTS=FOLDER
keeps pictures of all states.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SIZES = {"desktop": (1280, 900), "phone": (390, 844)}

# The contrast of each text with its background, as WCAG defines it, for texts that are large enough to be read.
CONTRASTS = """() => {
  const canvas = document.createElement("canvas"), pen = canvas.getContext("2d", { willReadFrequently: true });
  const over = (paints) => {
    pen.clearRect(0, 0, 1, 1);
    for (const paint of paints) { pen.fillStyle = paint; pen.fillRect(0, 0, 1, 1); }
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  for (const node of document.querySelectorAll("main *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility()) continue;
    const grounds = [];
    for (let at = node; at; at = at.parentElement) grounds.unshift(getComputedStyle(at).backgroundColor);
    const ground = over(grounds), ink = over([...grounds, getComputedStyle(node).color]);
    const [a, b] = [light(ground), light(ink)].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), node.textContent.trim().slice(0, 40), node.className]);
  }
  return found.sort((a, b) => a[0] - b[0]).slice(0, 3);
}"""


def chromium() -> Iterator[Any]:
    """Yield a browser, or skip the test if there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install 'meshwright[browser]'")
    with playwright.sync_playwright() as found:
        own = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        try:
            browser = found.chromium.launch(executable_path=own, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no Chromium: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


class Visit:
    """A tab that records its errors and the addresses that it requests."""

    def __init__(self, browser: Any, size: str = "desktop", dark: bool = False) -> None:
        wide, high = SIZES[size]
        colours = "dark" if dark else "light"
        self.context = browser.new_context(viewport={"width": wide, "height": high}, color_scheme=colours)
        self.page = self.context.new_page()
        self.wrong: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda said: self.wrong.append(said.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: self.wrong.append(f"dialog {dialog.message}"))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *error: object) -> None:
        self.context.close()

    def open(self, address: str) -> Any:
        self.page.goto(address)
        self.page.wait_for_selector("html[data-ready=yes]")
        return self.page


def looks_right(browser: Any, path: Path, name: str, size: str, dark: bool) -> None:
    """Check that a page in a file fits its window, can be read, has no errors, and requests nothing."""
    with Visit(browser, size, dark) as visit:
        page = visit.open(f"file://{path}")
        assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0], "it scrolls sideways"
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, ground.strip("rgb()").split(","))) < 200) == dark
        assert page.evaluate("[...document.querySelectorAll('canvas')].filter(c => c.width < 50).length") == 0
        assert min(page.evaluate(CONTRASTS), default=[9.0])[0] >= 3.0, page.evaluate(CONTRASTS)
        assert visit.wrong == [] and [url for url in visit.asked if not url.startswith(("file:", "data:"))] == []
        if folder := os.environ.get("MESHWRIGHT_SCREENSHOTS"):
            path = Path(folder) / f"{name}-{size}{'-dark' if dark else ''}.png"
            page.screenshot(path=str(path), full_page=True)
