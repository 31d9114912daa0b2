"""The documentation works: its commands are executed in an empty folder, as a person would type them.

This covers the tutorial, the how-tos, the concepts, the pages on plugins and Python, the README, the table of commands,
and the figures that pages show. The site builds, and the wheel works without the repository.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, blocks, commands

pytestmark = pytest.mark.wide
EXECUTED = [
    page for page in PAGES
    if page.name in ("tutorial.md", "plugins.md", "python.md") or page.parent.name in ("how-to", "concepts")
]
PLACEHOLDER = re.compile(r"\b[A-Z]{2,}\b|\.\.\.|\[|CONFIG|\bMODEL\b|\bRUN\b|\bDIR\b|\bN\b")


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """Environment variables in which `meshwright` and `python` run this project, with a temporary home folder."""
    there = tmp_path / "bin"
    there.mkdir()
    for name, words in (("meshwright", "-m meshwright"), ("python", "")):
        script = there / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
        script.chmod(0o755)
    more = {"PATH": f"{there}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "COLUMNS": "100"}
    return os.environ | more | {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("page", EXECUTED, ids=lambda page: page.stem)
def test_a_page_can_be_followed(page: Path, tmp_path: Path, shell: dict[str, str]) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    output = ""
    for block in blocks(page):
        if block.language == "bash":
            source = f"set -e\n{block.text}"
            done = subprocess.run(
                ["bash", "-c", source], cwd=folder, env=shell, capture_output=True, text=True, timeout=600
            )
            output = done.stdout + done.stderr
            assert done.returncode == 0, f"{block.text}\n{output[-3000:]}"
        elif block.language == "python":
            done = subprocess.run(
                [sys.executable, "-c", block.text], cwd=folder, env=shell, capture_output=True, text=True, timeout=600
            )
            assert done.returncode == 0, done.stderr[-3000:]
        elif block.is_output:
            for line in block.text.splitlines():
                assert line.strip() in output, f"the page shows '{line}', and the command printed:\n{output[-3000:]}"
    for figure in re.findall(r"!\[[^\]]*\]\(([^)]+\.svg)\)", page.read_text(encoding="utf-8")):
        assert (folder / figure).read_text() == (page.parent / figure).read_text(), f"{figure}: make it again"


def test_the_readme_and_the_table_of_commands_run(tmp_path: Path, shell: dict[str, str]) -> None:
    """Commands with a placeholder, and those that need the reader's own files, are left out."""
    pages = [ROOT / "README.md", ROOT / "docs" / "commands.md"]
    texts = [page.read_text().replace("\\|", "|") for page in pages]
    inline = [line for text in texts for line in re.findall(r"`(meshwright [^`]+)`", text)]
    fenced = [line for page in pages for block in blocks(page) for line in commands(block.text)]
    chosen = [line.split("  #")[0] for line in dict.fromkeys([*inline, *fenced]) if not PLACEHOLDER.search(line)]
    needs_files = re.compile(r"books/|talks\.jsonl|examples/|(mine|tune|here)\.yaml|runs/(mine|tune)|\.\.\.|\|")
    chosen = [line for line in chosen if not needs_files.search(line)]
    chosen = [line for line in chosen if len(line.split()) > 2]
    assert len(chosen) >= 4, chosen
    for line in chosen:
        typed = ["bash", "-c", line]
        done = subprocess.run(typed, cwd=tmp_path, env=shell, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{line}\n{done.stderr[-2000:]}"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="pip install 'meshwright[docs]'")
    pytest.importorskip("material", reason="pip install 'meshwright[docs]'")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    text = (tmp_path / "site" / "tutorial.html").read_text()
    assert "From text to an exported model" in text or "from text to an exported model" in text
    outside = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', text)
    assert outside == [], "the site loads something from elsewhere"


def test_the_wheel_works_in_a_clean_environment(tmp_path: Path) -> None:
    """The wheel is built from the sources and works outside the repository, with the packages installed here."""
    sources = tmp_path / "sources"
    shutil.copytree(ROOT / "meshwright", sources / "meshwright", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources / name)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(sources)]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    if done.returncode and "Could not find a version" in done.stderr:
        pytest.skip("no setuptools can be had here")
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("meshwright-*.whl")
    place = tmp_path / "clean"
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    packages = [path for path in sys.path if path.endswith("site-packages")]
    where = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"], capture_output=True, text=True, check=True
    )
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, env=env, cwd=tmp_path)
    (Path(where.stdout.strip()) / "zz-others.pth").write_text("\n".join(packages))
    command = place / "bin" / "meshwright"
    steps = [
        [command, "--version"],
        [command, "layout", "--world", "8", "--tp", "2"],
        [command, "data", "prepare", "stdlib", "--out", "data/text", "--tokenizer", "train:300"],
        [command, "init", "--model", "tiny", "--data", "data/text", "--devices", "1", "--out", "c.yaml"],
        [command, "train", "c.yaml", "train.steps=2", "train.global_batch=4", "train.micro_batch=4", "lr.warmup=1"],
        [command, "watch", "runs/c", "--html", "page.html"],
    ]
    for words in steps:
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{words}\n{done.stderr[-2000:]}"
    imported_from = [python, "-c", "import meshwright; print(meshwright.__file__)"]
    done = subprocess.run(imported_from, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert str(place) in done.stdout, "the repository's package was used instead of the wheel"
    assert "<title>c · Meshwright</title>" in (tmp_path / "page.html").read_text()
