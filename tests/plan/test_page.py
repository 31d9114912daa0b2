"""The page of a plan: its data agree with the commands, and it looks right in a browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from tests.support.browser import SIZES, Visit, chromium, looks_right
from tests.support.page_data import page_data

WORDS = ["gpt2-124m", "--cluster", "h100-80g-dgx", "--devices", "4", "--global-batch", "8"]
NARROW = ["zero.stage=1", "train.micro_batch=1", "layout.sequence_parallel=false", "layout.tp=2"]

browser = pytest.fixture(scope="module")(chromium)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a page, and the config of its best layout beside it."""
    folder = tmp_path_factory.mktemp("plan")
    files = ["--html", str(folder / "plan.html"), "--out", str(folder / "plan.yaml")]
    words = ["plan", *WORDS[:1], *NARROW, *WORDS[1:], "--tokens", "3B", *files, "--json"]
    assert main([*words, "--why", "layout.pp=2", "--why", "layout.pp=3"]) == 0
    return folder / "plan.html"


def test_the_numbers_of_the_page_add_up(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = page_data(planned)
    best, answer = page["ranking"][0], page["answer"]
    assert sum(best["memory"].values()) == pytest.approx(best["memory_gib"])
    assert sum(best["parts"].values()) == pytest.approx(best["step_s"])
    capsys.readouterr()
    where = ["--cluster", "h100-80g-dgx", "--devices", "4", "--json"]
    assert main(["cost", str(planned.with_suffix(".yaml")), *where, "--tokens", "3B"]) == 0
    cost = json.loads(capsys.readouterr().out)
    assert cost["step_time_s"] == pytest.approx(answer["step_s"]) and cost["mfu"] == pytest.approx(answer["mfu"])
    assert cost["memory"]["needed_gib"] == pytest.approx(best["memory_gib"])
    assert cost["run"]["cost_usd"] == pytest.approx(answer["cost_usd"])
    assert cost["run"]["energy_mwh"] == pytest.approx(answer["energy_mwh"])


def test_the_page_states_its_question(planned: Path) -> None:
    page = page_data(planned)
    expected = {"model", "sequence", "global batch", "whole run", "devices", "cluster", "precision", "software"}
    assert expected | {"memory", "command"} == set(page["facts"])
    assert page["facts"]["global batch"] == "8 sequences, 8,192 tokens"
    assert page["facts"]["command"].startswith("meshwright") and "5.8 %" in page["error"]
    assert {"links", "efficiency", "price and power", "whole run"} == set(page["assumptions"])


def test_sliders_start_at_the_plan_and_follow_the_network(planned: Path) -> None:
    page = page_data(planned)
    sliders, (devices, network) = page["sliders"], page["sliders"]["at"]
    here = sliders["cells"][devices][network]
    assert sliders["devices"][devices] == 4 and here["step_s"] == page["answer"]["step_s"]
    assert here["cost_usd"] == page["answer"]["cost_usd"]
    across = next(row for size, row in zip(sliders["devices"], sliders["cells"], strict=True) if size > 8)
    steps = [cell["step_s"] for cell in across]
    assert steps == sorted(steps, reverse=True) and steps[0] > steps[-1], "a faster network between nodes is not slower"


def test_why_not_gives_the_best_such_layout_or_the_reason(planned: Path) -> None:
    page = page_data(planned)
    slower, impossible = page["asked"]
    assert slower["words"] == "layout.pp=2" and "The best such layout takes" in slower["answer"]
    assert impossible["answer"].startswith("No such layout is possible")
    grid = page["outcomes"]
    cell = grid["cells"][grid["tp"].index(2)][grid["pp"].index(1)]
    assert cell["kind"] == "fits" and cell["why"].startswith(cell["text"])


def test_why_takes_only_keys_that_the_search_chooses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", WORDS[0], *NARROW, *WORDS[1:], "--why", "train.steps=3"]) == 2
    assert "--why train.steps=3: ask about keys that the search chooses" in capsys.readouterr().err


def test_a_default_batch_is_said_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", WORDS[0], *NARROW, *WORDS[1:-2]]) == 0
    assert "(the default: set --global-batch)" in capsys.readouterr().out


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_the_page_of_a_plan_looks_right(browser: Any, planned: Path, size: str, dark: bool) -> None:
    looks_right(browser, planned, "plan", size, dark)


def test_sliders_and_cells_answer(browser: Any, planned: Path) -> None:
    with Visit(browser) as visit:
        page = visit.open(f"file://{planned}")
        before = page.locator("#whatif .tile .v").first.inner_text()
        page.locator("#whatif input").first.fill("4")
        assert page.locator("#whatif .tile .v").first.inner_text() != before
        assert page.locator("#whatif b").first.inner_text() == "16"
        page.locator("#refused button.fits").first.click()
        assert "tp 2, pp 1:" in page.locator("#refused").inner_text()
        page.locator("#bar button[aria-label=colours]").click()
        assert visit.wrong == []


@pytest.mark.parametrize("size", SIZES)
def test_the_page_of_scaling_looks_right(browser: Any, tmp_path: Path, size: str) -> None:
    path = tmp_path / "scaling.html"
    assert main(["scaling", "gpt2-124m", "--cluster", "h100-80g-dgx", "--devices", "2,4", "--html", str(path)]) == 0
    for dark in (False, True):
        looks_right(browser, path, "scaling", size, dark)
