"""Tests of all pages: links have targets, YAML blocks are valid configs, and the named commands and keys exist.

The site has every page, and the README every command.
"""

from __future__ import annotations

import argparse
import importlib
import keyword
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

import meshwright
from meshwright.cli.main import COMMANDS, MIXED
from meshwright.config.load import config_from, config_keys
from meshwright.config.presets import PRESETS
from tests.docs.pages import PAGES, ROOT, anchors, blocks, commands, links, prose

KEYS = {key.rstrip("=") for key in config_keys()}
SECTIONS = {key.split(".")[0] for key in KEYS}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: there is no such file"
        if anchor:
            assert anchor in anchors(target), f"{link}: there is no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_and_keys_are_real(page: Path) -> None:
    for block in blocks(page):
        assert block.text.strip(), "an empty block"
        if block.language == "yaml" and name_of(page).startswith(("docs/how-to", "docs/tutorial")):
            raw = yaml.safe_load(block.text)
            least = {"model": {"layers": 1, "hidden": 8, "heads": 1, "vocab": 8, "seq": 8}, "data": {"prefixes": ["x"]}}
            config_from(least | raw)
        if block.language == "python":
            compile(block.text, name_of(page), "exec")
    if name_of(page).startswith(("docs/how-to", "docs/tutorial", "docs/coming", "docs/trouble", "docs/glossary")):
        text = prose(page)
        # The left columns of that page's tables are options of other programs.
        if page.name == "coming-from.md":
            text = "\n".join(line.rpartition(" | ")[2] for line in text.splitlines())
        named = re.findall(r"`([a-z_]+\.[a-z_0-9.]+)(?:[:=][^`]*)?`", text)
        for key in named:
            if key.split(".")[0] in SECTIONS and "_" not in key.split(".")[0]:
                inside = any(known.startswith(f"{key}.") for known in KEYS)
                assert key in KEYS or inside or key.endswith((".json", ".jsonl", ".yaml")), f"{key} is no key"


def parser_of(name: str) -> argparse.ArgumentParser:
    module = importlib.import_module(f"meshwright.cli.{name}{'_' if keyword.iskeyword(name) else ''}")
    parser = argparse.ArgumentParser(exit_on_error=False)
    module.add_arguments(parser)
    if not getattr(module, "OWN_JSON", False):
        parser.add_argument("--json", action="store_true")
    return parser


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name_of)
def test_commands_can_be_parsed(page: Path) -> None:
    texts = [block.text for block in blocks(page) if block.language in ("bash", "text", "")]
    for line in (command for text in texts for command in commands(text)):
        words = shlex.split(re.sub(r"\s+\(.*\)$", "", line), comments=True)[1:]
        words = words[: next((i for i, word in enumerate(words) if word in (">", "|", "&&", "&", ";")), len(words))]
        name = words[0]
        assert name in COMMANDS or name.startswith("-"), line
        if "..." in words or "[" in line or name.startswith("-"):
            continue
        parser = parser_of(name)
        try:
            (parser.parse_intermixed_args if name in MIXED else parser.parse_args)(words[1:])
        except (SystemExit, argparse.ArgumentError) as error:
            pytest.fail(f"{line}: {error}")


def test_every_command_stands_in_the_table() -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    assert [name for name in COMMANDS if f"meshwright {name}" not in text] == []


def test_every_page_stands_in_the_site() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def files(entries: object) -> list[str]:
        if isinstance(entries, str):
            return [entries]
        inner = entries.values() if isinstance(entries, dict) else entries
        return [name for entry in inner for name in files(entry)]  # type: ignore[attr-defined]

    there = [page.relative_to(ROOT / "docs").as_posix() for page in ROOT.glob("docs/**/*.md")]
    assert sorted(files(site["nav"])) == sorted(there)


def test_papers_agree_on_name_version_and_licence() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert project["version"] == meshwright.__version__ == citation["version"]
    assert project["license"] == citation["license"] == "Apache-2.0"
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence and "END OF TERMS AND CONDITIONS" in licence
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert "## Unreleased" in changes and f"## {meshwright.__version__}" in changes
    assert "llama3-8b" in PRESETS
