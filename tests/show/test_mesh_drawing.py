"""The drawing of a mesh shows every rank once for each axis, and each group has one colour."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from meshwright.errors import UserError
from meshwright.show.mesh_drawing import mesh_svg
from meshwright.spec.layout.layout import Layout


def test_ranks_of_one_group_have_one_colour() -> None:
    layout = Layout(16, tp=2, pp=2, cp=2)
    text = mesh_svg(layout)
    ElementTree.fromstring(text)
    found = re.findall(r"<title>rank (\d+): (\w+) group ([\d ]+)</title>.*?fill=\"(#\w+)\"", text)
    assert len(found) == 16 * 4 and {axis for _, axis, _, _ in found} == {"tp", "cp", "dp", "pp"}
    for axis in ("tp", "cp", "dp", "pp"):
        colours = {int(rank): colour for rank, name, _, colour in found if name == axis}
        groups = layout.groups(axis)
        assert all(len({colours[rank] for rank in group}) == 1 for group in groups)
        assert len(set(colours.values())) == len(groups) == 8


def test_what_can_t_be_drawn_is_refused() -> None:
    ElementTree.fromstring(mesh_svg(Layout(1)))
    with pytest.raises(UserError, match="at most 256"):
        mesh_svg(Layout(512))
