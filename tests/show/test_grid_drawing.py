"""The drawing of a grid shows the parts of weights that each rank holds by the parameters' records."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.show.grid_drawing import _place, describe, draw, places
from meshwright.spec.layout.grid import Grid
from meshwright.spec.model.description import layout_of, model_of
from meshwright.spec.model.part import coordinate_of
from tests.support.oracle import small_config


@pytest.mark.parametrize("grid", [Grid("2d", 2, 4), Grid("2.5d", 2, 2, 2), Grid("3d", 4, 1, 2), Grid("3d", 2, 2, 2)])
def test_blocks_are_where_records_say(grid: Grid) -> None:
    tp = grid.row * grid.col * grid.depth
    model = {"hidden": 64, "heads": 8, "layers": 1}
    config = small_config(model=model, layout={"tp": tp, **grid.keys}, train={"micro_batch": 8})
    layout, described = layout_of(config, tp), model_of(config)
    for rank, at in enumerate(places(grid)):
        assert {axis: layout.coordinate(rank)[axis] for axis in at} == at
        records = described.records(coordinate_of(layout, rank, False))
        for key, roles in (("up", grid.first), ("down", grid.second)):
            (box,) = records[f"blocks.0.mlp.{key}.weight"].boxes
            for dim, axes in ((0, (roles.y.features, roles.weight)), (1, (roles.summed,))):
                index, _ = _place(grid, at, axes)
                assert box.start[dim] == index * box.shape[dim]


def test_the_command_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["layout", "--world", "8", "--tp", "8", "--tp-grid", "2x2x2"]
    assert main([*words, "--tp-kind", "3d", "--svg", str(tmp_path / "3d.svg")]) == 0
    assert describe(Grid("3d", 2, 2, 2)) in capsys.readouterr().out
    assert (tmp_path / "3d.svg").read_text() == draw(Grid("3d", 2, 2, 2))
    assert "gathered over tp.depth" in draw(Grid("3d", 2, 2, 2)) and "a sum over tp.col" in draw(Grid("3d", 2, 2, 2))
    for wrong, sentence in (([], "set layout.tp_kind"), (["--tp-kind", "2d"], "takes layout.tp_grid=[row, col]")):
        assert main([*words, *wrong]) == 2
        assert sentence in capsys.readouterr().err
    assert main(["layout", "--devices", "4", "--tp-kind", "2d"]) == 2
    assert "give --tp-grid too" in capsys.readouterr().err
