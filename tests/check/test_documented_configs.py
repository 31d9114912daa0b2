"""Every config that the documentation shows gives the gradients of one process: `meshwright check` runs on each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import meshwright.cli.check as command
from meshwright.cli.main import main
from tests.check.test_planted import CONFIG
from tests.docs.pages import PAGES, ROOT, blocks
from tests.models.planned_families import write_tiny


def merged(base: dict[str, Any], shown: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with the keys of `shown`, section by section."""
    result = dict(base)
    for key, value in shown.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def shown_configs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (page and number, config) of every YAML block in the pages, and of the example configs."""
    for page in PAGES:
        for number, block in enumerate(b for b in blocks(page) if b.language == "yaml"):
            shown = yaml.safe_load(block.text)
            if isinstance(shown, dict):
                yield f"{page.relative_to(ROOT).with_suffix('')}-{number}", shown
    for path in sorted(ROOT.glob("examples/*.yaml")):
        yield f"examples/{path.stem}", yaml.safe_load(path.read_text(encoding="utf-8"))


SHOWN = dict(shown_configs())


def test_the_pages_show_enough_configs() -> None:
    # A change of the pages' form must not empty the test below.
    assert len(SHOWN) >= 18


@pytest.mark.wide
@pytest.mark.parametrize("name", SHOWN)
def test_a_shown_config_agrees_with_one_process(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "ranks_here", lambda: 8)
    shown = SHOWN[name]
    # A whole config is checked as it is. Fragments are settings of a small model.
    base = {} if name.startswith("examples/") else yaml.safe_load(CONFIG)
    if "kind" in shown.get("model", {}) or "hf" in shown.get("model", {}):
        base = {key: value for key, value in base.items() if key != "model"}
    config = merged(base, shown)
    if "hf" in config.get("model", {}):
        # Granite has no description here, so it stands for any family. Adapters need one that has.
        family = "llama" if "tune" in config else "granite"
        config["model"]["hf"] = write_tiny(family, tmp_path)
        config.get("tune", {}).pop("base", None)
    path = tmp_path / "shown.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    assert main(["check", str(path)]) == 0
