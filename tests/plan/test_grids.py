"""The traffic and memory of grids match closed formulas to the byte, and one kind of grid sends less than another where
expected.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.plan.cluster import load_cluster
from meshwright.plan.grids import BlockCost, compare
from meshwright.plan.job import Job, job_of
from meshwright.plan.stack import EAGER
from tests.support.oracle import small_config

H = 512


def job(tp: int, tokens: int, sequences: int = 16, **model: Any) -> Job:
    """Return the job of one GPT block whose MLP is four times as wide as the model, with as many key-value heads as
    query heads and no biases.
    """
    shape = {"layers": 1, "hidden": H, "heads": 64, "vocab": 64, "seq": tokens // sequences, "bias": False} | model
    train = {"precision": "bf16", "micro_batch": sequences, "global_batch": sequences}
    config = small_config(model=shape, train=train, layout={"tp": tp})
    return job_of(config, tp, EAGER, cluster_node=8)


def ways(tp: int, tokens: int, **more: Any) -> dict[str, BlockCost]:
    return {one.name: one for one in compare(job(tp, tokens, **more), None)[0]}


def formulas(tp: int, t: int, h: int = H) -> dict[str, tuple[float, float]]:
    """Return by name the elements that a rank sends in the products of a block, and those that it sends once per step
    for copied weights.

    x, w and y are the summed sizes of [T, in], [in, out] and [T, out] over the four products.
    """
    x, w, y = 7 * t * h, 12 * h * h, 9 * t * h
    found = {"1D": (8 * (tp - 1) / tp * t * h, 0.0), "1D, sequence parallel": (10 * (tp - 1) / tp * t * h, 0.0)}
    powers = [2**n for n in range(7)]
    for r, c, d in ((r, c, tp // (r * c)) for r in powers for c in powers if tp % (r * c) == 0):
        for kept, times in (("", 3), (", gathered kept", 2)):
            flat = times * ((c - 1) / c * x / (r * d) + (r - 1) / r * w / c)
            if d == 1:
                found[f"2D {r}x{c}{kept}"] = (flat, 0.0)
            found[f"2.5D {r}x{c}x{d}{kept}"] = (flat, 2 * (d - 1) / d * w / (r * c))
            # In qkv and up, x (T h each) travels over row and y (3 and 4 T h) over col. In out and down it is the other
            # way round.
            over_row = (times * 2 * t * h + 2 * 2 * t * h) / (c * d)
            over_col = (times * 5 * t * h + 2 * 7 * t * h) / (r * d)
            cube = (r - 1) / r * over_row + (c - 1) / c * over_col + times * (d - 1) / d * w / (r * c)
            found[f"3D {r}x{c}x{d}{kept}"] = (cube, 0.0)
    assert x + y == 16 * t * h
    return found


@pytest.mark.parametrize(("tp", "tokens"), [(4, H), (8, H), (8, 4 * H), (16, 4 * H), (64, H // 4 * 16), (64, 64 * H)])
def test_bytes_are_those_of_the_formulas(tp: int, tokens: int) -> None:
    found, wanted = ways(tp, tokens, sequences=max(16, tp)), formulas(tp, tokens)
    assert len(found) > 3
    for name, one in found.items():
        products, gradients = wanted[name]
        assert one.products == 2 * products and one.gradients == 4 * gradients, name


def test_shared_sequences_also_send_keys_and_values() -> None:
    """2 sequences are shared by 4 rows, so every rank gathers all keys and values twice and scatters their
    gradients.
    """
    few, many = (ways(8, 4 * H, sequences=count)["2D 4x2"].products for count in (2, 4))
    assert few - many == 3 * 3 / 4 * 2 * (2 * 4 * H * H // 2)


def test_square_grids_have_the_usual_formulas() -> None:
    t, q = 4 * H, 2
    found = ways(8, t)
    assert found["2.5D 2x2x2"].products == 2 * 3 * (q - 1) / q**2 * (7 * t * H / 2 + 12 * H * H)
    assert found["3D 2x2x2, gathered kept"].products == 2 * 2 * (q - 1) / q**3 * (16 * t * H + 12 * H * H)
    assert found["3D 2x2x2"].products == 2 * (q - 1) / q**3 * (39 * t * H + 36 * H * H)
    assert ways(4, t)["2D 2x2"].products == 2 * 3 * (q - 1) / q**2 * (7 * t * H + 12 * H * H)


def test_crossovers() -> None:
    """1D and 3D with saved factors send the same on 8 ranks if tokens = hidden. With fewer tokens 1D sends less, with
    more tokens 3D does. A square 2D grid on 4 ranks needs more than 12 x hidden tokens to send less. On 64 ranks with 4
    x hidden tokens, 3D sends 4.4 times less than 1D.
    """
    kept = "3D 2x2x2, gathered kept"
    for tokens, sign in ((H // 2, 1), (H, 0), (2 * H, -1)):
        found = ways(8, tokens)
        gap = found[kept].products - found["1D"].products
        assert (gap > 0) - (gap < 0) == sign
    for ratio, less in ((12, False), (13, True)):
        found = ways(4, ratio * H)
        assert (found["2D 2x2"].products < found["1D"].products) == less
    found = ways(64, 4 * H, sequences=64)
    assert found["1D"].products / found["3D 4x4x4, gathered kept"].products == pytest.approx(4.4, abs=0.05)


def test_memory_is_divided_by_all_ranks() -> None:
    """Weights are divided by q^2 or q^3. Activations are divided by the number of ranks if gathered factors are not
    saved.
    """
    whole = 12 * H * H * 2
    for tp, name, parts in ((4, "2D 2x2", 4), (8, "2.5D 2x2x2", 4), (8, "3D 2x2x2", 8)):
        one = ways(tp, 16 * H)[name]
        assert one.weights == pytest.approx(whole / parts, rel=0.01)
        alone = ways(tp, 16 * H)["1D, sequence parallel"]
        assert one.activations == pytest.approx(alone.activations, rel=0.01)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["cost", "gpt3-175b", "--cluster", "h100-80g-dgx", "--devices", "8", "train.global_batch=8", "--compare-tp"]
    words += ["--layout", "tp=8,pp=1,micro_batch=4,zero=0", "model.hidden=1024", "model.heads=64", "model.ffn=4096"]
    assert main([*words, "--json", "--svg", str(tmp_path / "bytes.svg")]) == 0
    found = json.loads(capsys.readouterr().out)["ways"]
    assert {one["tp_kind"] for one in found} == {"", "2d", "2.5d", "3d"} and all(one["seconds"] > 0 for one in found)
    drawn = (tmp_path / "bytes.svg").read_text()
    assert all(f"{ranks} ranks" in drawn for ranks in (4, 8, 16, 64)) and "3D" in drawn
    assert main(words) == 0
    assert "sends the fewest bytes" in capsys.readouterr().out
    assert main([*words, "--layout", "tp=1,pp=1"]) == 2
    assert "layout.tp=1 cuts nothing" in capsys.readouterr().err


def test_seconds_follow_the_links() -> None:
    cluster = load_cluster("h100-80g-dgx")
    found = {one.name: one for one in compare(job(8, 16 * H), cluster)[0]}
    assert all(one.seconds > 0 for one in found.values())


def test_the_search_tries_grids_and_says_what_one_wins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "gpt3-175b", "model.heads=64", "model.hidden=8192", "model.ffn=32768", "layout.tp=64"]
    words += ["--seq", "8192"]
    words += ["--cluster", "h100-80g-dgx", "--devices", "64", "--global-batch", "64", "--out", str(tmp_path / "p.yaml")]
    assert main([*words, "--tp-grids"]) == 0
    told = capsys.readouterr().out
    assert "Along one axis instead of the grid 2.5d" in told and "more: tp +" in told
    assert "tp_kind: 2.5d" in (tmp_path / "p.yaml").read_text()
    assert main(words) == 0
    assert "grid" not in capsys.readouterr().out
    assert main([*words, "layout.tp_grid=[8,8]", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"]["layout"]["tp_grid"] == "2d 8x8"
