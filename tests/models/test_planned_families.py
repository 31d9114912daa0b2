"""Every family of transformers that has a plan, tiny and random.

The logits equal those of transformers. The gradients on tp 2, pp 2, tp 2 x pp 2 and tp 2 x dp 2 x ZeRO 3 equal those of
one process in float64. Refused layouts really give wrong gradients.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.planned_files import PlannedFolder
from meshwright.errors import UserError
from meshwright.models.wrapped.blueprint import transformers
from meshwright.spec.model.wrapped.families import REFUSED, VERIFIED
from tests.models.planned_families import (
    LAYOUTS,
    PAGE,
    TOO_LARGE,
    alone,
    families,
    layouts_of,
    measure,
    table,
    tiny,
    write_tiny,
)
from tests.support.ranks import RankFailed, run_ranks

PER_LAUNCH = 6
ALL = sorted(name for name in VERIFIED if VERIFIED[name])
PIECES = [ALL[at : at + PER_LAUNCH] for at in range(0, len(ALL), PER_LAUNCH)]
WRONG = 1e-6
# The files of these families hold a parameter in a form that can't be read by boxes.
UNREAD = ("hrm_text", "inkling2_text")


def test_the_page_has_the_table() -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), "run `python -m tests.models.planned_families`"


@pytest.mark.wide
def test_the_table_has_every_family() -> None:
    assert sum(set(axes) == {"tp", "pp"} for axes in VERIFIED.values()) >= 60
    assert set(families()) == {*VERIFIED, *REFUSED}


@pytest.mark.wide
@pytest.mark.parametrize("names", PIECES, ids=lambda names: f"{names[0]}-{names[-1]}")
def test_gradients_are_those_of_one_process(tmp_path: Path, names: list[str]) -> None:
    by_layouts: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        by_layouts.setdefault(tuple(layouts_of(VERIFIED[name])), []).append(name)
    for layouts, same in by_layouts.items():
        folders = [write_tiny(name, tmp_path) for name in same]
        found = [alone(folder) for folder in folders]
        assert {name: each.logits for name, each in zip(same, found, strict=True) if each.logits > 1e-12} == {}
        for by_family in run_ranks(4, measure, folders, found, list(layouts), deadline=60.0 + 30.0 * len(same)):
            for name, errors in zip(same, by_family, strict=True):
                assert all(error < 1e-10 for error, _ in errors.values()), (name, errors)


@pytest.mark.wide
def test_files_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """The files are those that `save_pretrained` writes, for every family. Some hold a parameter in a form that is
    refused by name.
    """
    library, wrong, refused = transformers(), {}, set()
    for name in ALL:
        at = tmp_path / name
        library.AutoModelForCausalLM.from_config(tiny(name)).save_pretrained(at)
        theirs = library.AutoModelForCausalLM.from_pretrained(at).state_dict()
        try:
            ours = PlannedFolder(at)
        except UserError as error:
            assert "in a form that can't be read by boxes" in str(error), name
            refused.add(name)
            continue
        held = [*ours.shapes, *ours.buffers]
        wrong |= {(name, key): 1 for key in held if not torch.equal(ours.whole(key), theirs[key])}
        shutil.rmtree(at)
    assert not wrong and refused <= set(UNREAD), (list(wrong)[:5], refused)


@pytest.mark.wide
@pytest.mark.parametrize(("name", "axis"), [(n, a) for n in sorted({*REFUSED} - {*TOO_LARGE}) for a in REFUSED[n]])
def test_what_is_refused_is_wrong(tmp_path: Path, name: str, axis: str) -> None:
    layout = layouts_of([axis])[0]
    assert layout in LAYOUTS
    try:
        folder = write_tiny(name, tmp_path)
        found = run_ranks(4, measure, [folder], [alone(folder)], [layout], deadline=60.0)
    # The tiny model can't be built or run, or not on several ranks.
    except (RankFailed, Exception):
        return
    assert max(errors[layout][0] for by_family in found for errors in by_family) > WRONG, f"{name} is right on {layout}"
