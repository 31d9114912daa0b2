"""The page in a real Chromium, if Playwright and a Chromium are installed.

The tests cover every panel and button, a live run, a phone and dark colours, and allow no request to another server.
MESHWRIGHT_SCREENSHOTS=FOLDER keeps pictures of all states.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.watch.report import RunReport
from meshwright.watch.server import Runs, Server, whole_page
from tests.support.browser import SIZES, Visit, chromium, looks_right
from tests.watch.made import faulty, healthy, line_of, resumed

playwright = pytest.importorskip("playwright.sync_api", reason="pip install 'meshwright[browser]'")
PANELS = (
    "loss", "events", "time", "speed", "bytes", "memory", "pipeline", "ranks", "layers", "norm", "rate", "spread",
    "sources", "about",
)  # fmt: skip
MADE = {"healthy": healthy, "resumed": resumed, "faulty": faulty}


browser = pytest.fixture(scope="module")(chromium)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Server]:
    runs = [RunReport(faulty(tmp_path / "<script>alert(1)<")), RunReport(healthy(tmp_path / "b"))]
    with Server(Runs(runs), 0) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.shutdown()


def test_every_panel_and_button_works_live(browser: Any, served: Server) -> None:
    with Visit(browser) as visit:
        page = visit.open(served.address)
        page.wait_for_selector("#bytes td.bad")  # the plan arrives after the first picture
        assert "differs by −4.00 KiB, first seen at step" in page.locator("#bytes").inner_text()
        assert "meshwright comm bench --nproc 8" in page.locator("#time").inner_text()  # the hint for this very machine
        assert "planned for laptop, which stands for any CPU" in page.locator("#time").inner_text()
        said = page.evaluate("[1000, 1023, 1023 * 1024, 5e9].map(bytes).concat([1e-3, 0.9996e-3].map(seconds))")
        assert said == ["0.977 KiB", "0.999 KiB", "0.999 MiB", "4.66 GiB", "1 ms", "1000 µs"]
        assert page.evaluate("logTicks(0.9, 1.6).length") >= 2
        assert page.locator("h1").inner_text() == "<script>alert(1)<"
        for name in PANELS:
            section = page.locator(f"#{name}")
            assert section.is_visible(), name
            for button in section.locator("button").all():
                button.click()
            for canvas in section.locator("canvas:visible").all():
                canvas.scroll_into_view_if_needed()
                canvas.hover()
        page.locator("#ranks .ranks button").nth(2).click()
        page.wait_for_selector("#ranks td.bad")
        assert "waits 15 s" in page.locator("#ranks").inner_text()
        page.locator(".chip").nth(1).click()
        assert page.locator("h1").inner_text() == "b" and page.locator(".top .pill").inner_text() == "finished"
        page.wait_for_selector("#bytes td.ok")  # the plan of a run is asked for when the run is chosen
        assert page.locator("#bytes td.bad").count() == 0 and page.locator("#bytes td.ok").count() >= 4
        for _ in range(3):
            page.locator("#bar button[aria-label=colours]").click()
        assert visit.wrong == [] and {url.split("/")[2] for url in visit.asked} == {served.address.split("/")[2]}


def test_runs_are_listed_with_the_settings_in_which_they_differ(browser: Any, tmp_path: Path) -> None:
    for name in "abcdef":
        healthy(tmp_path / name)
        config = tmp_path / name / "config.yaml"
        config.write_text(config.read_text().replace("pp: 2", "pp: 1") if name == "b" else config.read_text())
        (tmp_path / name / "trace.json").unlink()
    page_file = tmp_path / "all.html"
    page_file.write_text(whole_page(Runs.of([tmp_path])))
    with Visit(browser) as visit:
        page = visit.open(f"file://{page_file}")
        assert page.locator("#runs tr").count() >= 7 and "6, of which 4 are drawn" in page.locator("#runs").inner_text()
        for name in "ab":
            page.locator(f"#runs input[aria-label='draw {name}']").set_checked(True)
        assert "layout.pp" in page.locator("#runs .settings").inner_text()
        page.locator("#runs button.run", has_text="b").click()
        assert page.locator("h1").inner_text() == "b" and not page.locator("#pipeline").is_visible()
        assert page.locator("#machine").is_visible() and visit.wrong == []


def test_values_beyond_the_edge_are_marked(browser: Any, tmp_path: Path) -> None:
    folder = healthy(tmp_path / "spikes")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[30]["phases"] = lines[30]["phases"] | {"forward": 30.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page_file = tmp_path / "page.html"
    page_file.write_text(whole_page(Runs([RunReport(folder)])))
    with Visit(browser) as visit:
        page = visit.open(f"file://{page_file}")
        clipped = "[...shared.charts].find((chart) => chart.options.label === 'seconds by phase').clipped"
        assert page.evaluate(clipped) == 1


def test_a_new_step_appears_by_itself(browser: Any, served: Server) -> None:
    with Visit(browser) as visit:
        page = visit.open(served.address)
        assert "step 47 of 60" in page.locator(".below").inner_text()
        with (served.runs.reports[0].path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line_of(48, {}, 1.2345)) + "\n")
        playwright.expect(page.locator(".below")).to_contain_text("step 48 of 60", timeout=10_000)
        assert page.locator(".tile .v").first.inner_text() == "1.2345"


def test_dragging_zooms_all_charts_and_a_double_click_undoes_it(browser: Any, tmp_path: Path) -> None:
    with Visit(browser) as visit:
        page = visit.open(_file(tmp_path, "healthy"))
        box = page.locator("#loss canvas").bounding_box()
        page.mouse.move(box["x"] + 200, box["y"] + 80)
        page.mouse.down()
        page.mouse.move(box["x"] + 420, box["y"] + 80, steps=4)
        page.mouse.up()
        low, high = page.evaluate("shared.zoom")
        assert 1 < low < high < 60
        assert page.evaluate("[...shared.charts].every(c => !c.zooms || !c.range || c.range[0] > 1)")
        page.locator("#loss canvas").dblclick()
        assert page.evaluate("shared.zoom") is None and visit.wrong == []


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("state", MADE)
def test_a_page_in_a_file_fits_and_asks_nobody(browser: Any, tmp_path: Path, state: str, size: str) -> None:
    address = _file(tmp_path, state)
    for dark in (False, True):
        looks_right(browser, Path(address.removeprefix("file://")), state, size, dark)
    with Visit(browser, size) as visit:
        page = visit.open(address)
        assert [one for one in PANELS if not page.locator(f"#{one}").is_visible()] == []


def _file(folder: Path, state: str) -> str:
    path = folder / f"{state}.html"
    path.write_text(whole_page(Runs([RunReport(MADE[state](folder / state))])))
    return f"file://{path}"
