"""`Layout` against a definition by counting: an odometer that turns its fastest wheel first."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import UserError
from meshwright.show.layout_drawing import draw
from meshwright.spec.layout import Layout
from meshwright.spec.layout.layout import AXES, GROUP_KINDS

DENSE = ("tp", "cp", "dp", "pp")
EXPERT = ("etp", "ep", "edp", "pp")
PARTED = Layout(16, tp=4, pp=2, parts=(("tp", (("tp.kv", 2), ("tp.q", 2))),))


def odometer(layout: Layout, view: tuple[str, ...]) -> list[dict[str, int]]:
    """Return the coordinates of rank 0, 1, 2, ... in one view, by counting."""
    words = layout.order.split("-") + [axis for axis in AXES if axis not in layout.order]
    axes = [{"dp": "edp", "tp": "etp"}.get(word, word) if view is EXPERT else word for word in words]
    axes = [axis for axis in axes if axis in view]
    wheels = [range(getattr(layout, axis)) for axis in reversed(axes)]
    return [dict(zip(reversed(axes), turn, strict=True)) for turn in itertools.product(*wheels)]


def count_groups(places: list[dict[str, int]], words: list[str]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that differ only in `words`, in the order of their first ranks."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(places):
        groups.setdefault(tuple(at for axis, at in place.items() if axis not in words), []).append(rank)
    return tuple(tuple(ranks) for ranks in groups.values())


def divisor(draw: st.DrawFn, number: int) -> int:
    return draw(st.sampled_from([d for d in range(1, number + 1) if number % d == 0]))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    sizes = st.integers(1, 4)
    tp, cp, dp, pp = (draw(sizes) for _ in range(4))
    order = "-".join(draw(st.permutations(AXES)))
    node_size = draw(st.none() | st.integers(1, 9))
    etp = draw(st.sampled_from([tp, divisor(draw, tp * cp * dp)]))
    etp = etp if tp * cp * dp % etp == 0 else tp
    ep = divisor(draw, tp * cp * dp // etp)
    return Layout(tp * cp * dp * pp, tp, pp, cp, ep, order, node_size, etp=etp)


@settings(max_examples=60)
@given(layouts(), st.randoms(use_true_random=False))
def test_groups_of_every_product_equal_those_found_by_counting(layout: Layout, rng: random.Random) -> None:
    for view in (DENSE, EXPERT):
        places = odometer(layout, view)
        for length in range(1, 5):
            for words in itertools.combinations(view, length):
                if view is EXPERT and not {"ep", "edp", "etp"} & set(words):
                    continue
                name = "-".join(rng.sample(words, length))
                groups = layout.groups(name)
                assert groups == count_groups(places, list(words))
                assert layout.groups(layout.canonical(name)) == groups
                assert {layout.canonical("-".join(p)) for p in itertools.permutations(words)} == {
                    layout.canonical(name)
                }
                assert layout.size(name) == len(groups[0])
                for group in groups:
                    assert list(group) == sorted(group)
                    assert layout.crosses_node(group) == (
                        layout.node_size is not None and len({rank // layout.node_size for rank in group}) > 1
                    )
                    for rank in group:
                        assert layout.group(name, rank) == group


@settings(max_examples=60)
@given(layouts())
def test_coordinates_and_ranks_are_each_others_inverse(layout: Layout) -> None:
    assert [layout.coordinate(rank) for rank in range(layout.world)] == odometer(layout, DENSE)
    assert [layout.expert_coordinate(rank) for rank in range(layout.world)] == odometer(layout, EXPERT)
    for rank in range(layout.world):
        assert layout.rank_at(**layout.coordinate(rank)) == rank
        assert layout.rank_at(**layout.expert_coordinate(rank)) == rank
    views = list(zip(odometer(layout, DENSE), odometer(layout, EXPERT), strict=True))
    same = all(dense["pp"] == expert["pp"] for dense, expert in views)
    if layout.etp == layout.tp:
        same &= all(dense["tp"] == expert["etp"] for dense, expert in views)
    assert layout.views_agree == same


@settings(max_examples=40)
@given(layouts())
def test_embedding_groups_are_the_ends_of_each_pipeline(layout: Layout) -> None:
    ends = tuple(tuple(dict.fromkeys((stages[0], stages[-1]))) for stages in layout.groups("pp"))
    assert layout.groups("embedding") == ends
    assert layout.groups("position_embedding") == tuple(stages[:1] for stages in layout.groups("pp"))
    assert layout.groups("world") == (tuple(range(layout.world)),)
    for name in ("embedding", "position_embedding", "world"):
        held = {rank: group for group in layout.groups(name) for rank in group}
        assert layout.size(name) == len(layout.groups(name)[0])
        assert layout.canonical(name) == name
        for rank in range(layout.world):
            assert layout.group(name, rank) == held.get(rank, ())


@settings(max_examples=40)
@given(layouts())
def test_every_layout_can_be_drawn(layout: Layout) -> None:
    assert f"world {layout.world}" in draw(layout)


def test_example_of_16_ranks() -> None:
    layout = Layout(world=16, tp=4, pp=2)
    assert (layout.dp, layout.edp) == (2, 2)
    assert layout.groups("tp") == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))
    assert layout.groups("dp") == ((0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15))
    assert layout.groups("pp") == tuple((rank, rank + 8) for rank in range(8))
    assert layout.groups("tp-pp") == ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
    assert layout.groups("tp-dp-cp") == (tuple(range(8)), tuple(range(8, 16)))
    assert layout.coordinate(13) == {"tp": 1, "cp": 0, "dp": 1, "pp": 1}
    assert layout.rank_at(tp=1, pp=1) == 9
    assert layout == Layout(16, 4, 2) and hash(layout) == hash(Layout(16, 4, 2))


# The first 16 digits of the SHA-256 of the JSON of all groups from the rank generator of Megatron-core 0.16.
GOLDEN = [
    (16, 4, 2, 1, 1, "tp-cp-ep-dp-pp", "14c46a68de5109a3"),
    (24, 2, 2, 2, 3, "tp-cp-ep-dp-pp", "85046ce1678b5dd9"),
    (64, 4, 2, 2, 8, "tp-cp-ep-dp-pp", "ccd2bf6ff764a3b4"),
    (96, 2, 3, 4, 8, "tp-ep-dp-cp-pp", "3144c803fe9cfb08"),
    (120, 5, 3, 2, 4, "dp-pp-ep-tp-cp", "398da2488c84be9e"),
    (48, 2, 4, 1, 1, "tp-pp-dp", "0445d518d30c78f1"),
    (4480, 8, 35, 1, 1, "tp-cp-ep-dp-pp", "577d40cdd613d328"),
    (16384, 8, 16, 2, 64, "tp-cp-ep-dp-pp", "2fd2ee5dc7ac6de9"),
]


@pytest.mark.parametrize(("world", "tp", "pp", "cp", "ep", "order", "digest"), GOLDEN)
def test_groups_equal_megatrons(world: int, tp: int, pp: int, cp: int, ep: int, order: str, digest: str) -> None:
    layout = Layout(world, tp, pp, cp, ep, order)
    text = json.dumps({name: layout.groups(name) for name in GROUP_KINDS})
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


def test_expert_parallelism_need_not_divide_dp() -> None:
    layout = Layout(24, tp=2, pp=2, cp=2, ep=3, order="pp-ep-tp-cp-dp")
    assert (layout.dp, layout.edp) == (3, 2)
    assert layout.groups("ep")[:3] == ((0, 2, 4), (1, 3, 5), (6, 8, 10))
    assert layout.groups("edp") == tuple((rank, rank + 12) for rank in range(12))
    assert layout.groups("tp")[0] == (0, 2), "tp is of the dense view whatever ep is"
    assert not layout.views_agree


def test_experts_fold_over_the_ranks_of_tp_cp_and_dp() -> None:
    layout = Layout(16, tp=4, pp=2, ep=4, etp=1)
    assert (layout.dp, layout.edp) == (2, 2)
    assert layout.groups("ep")[:2] == ((0, 1, 2, 3), (4, 5, 6, 7)), "ep crosses tp"
    assert layout.groups("edp")[0] == (0, 4)
    assert Layout(16, tp=2, pp=2, ep=2, etp=4).groups("etp")[0] == (0, 1, 2, 3), "etp crosses dp"
    assert Layout(16, tp=2, pp=2, ep=2).groups("tp-ep")[0] == (0, 1, 2, 3)
    for broken, reason in (({"etp": 3}, "etp=3 does not divide"), ({"ep": 16, "etp": 1}, "choose ep=1, 2, 4 or 8")):
        with pytest.raises(UserError, match=reason):
            Layout(16, tp=4, pp=2, **broken)


def test_parts_of_an_axis() -> None:
    assert PARTED.groups("tp.kv")[:3] == ((0, 1), (2, 3), (4, 5))
    assert PARTED.groups("tp.q")[:3] == ((0, 2), (1, 3), (4, 6))
    assert PARTED.groups("dp-tp.q")[0] == (0, 2, 4, 6)
    assert PARTED.groups("tp.q-tp.kv") == PARTED.groups("tp")
    assert PARTED.canonical("pp-tp.q-tp.kv") == "tp-pp"
    assert PARTED.canonical("dp-tp.q") == "tp.q-dp"
    assert PARTED.group("tp.q", 15) == (13, 15)
    assert PARTED.coordinate(14) == {"tp": 2, "cp": 0, "dp": 1, "pp": 1, "tp.kv": 0, "tp.q": 1}
    assert PARTED.rank_at(**{"tp.kv": 1, "tp.q": 1, "dp": 1}) == 7
    for rank in range(16):
        assert PARTED.rank_at(**PARTED.coordinate(rank)) == rank
        assert PARTED.rank_at(**PARTED.expert_coordinate(rank)) == rank


def test_parts_of_dp_and_ep_belong_to_their_views() -> None:
    parts = (("dp", (("in_node", 2), ("nodes", 4))), ("ep", (("ep.in", 2), ("ep.out", 2))))
    layout = Layout(16, tp=2, ep=4, parts=parts)
    assert layout.groups("in_node")[0] == (0, 2)
    assert layout.groups("nodes")[0] == (0, 4, 8, 12)
    assert layout.groups("ep.out-tp")[0] == (0, 1, 4, 5)
    assert set(layout.coordinate(0)) == {"tp", "cp", "dp", "pp", "in_node", "nodes"}
    assert set(layout.expert_coordinate(0)) == {"etp", "ep", "edp", "pp", "ep.in", "ep.out"}


def test_canonical_follows_the_order_string() -> None:
    assert Layout(8).canonical("pp-dp-tp-cp") == "tp-cp-dp-pp"
    assert Layout(8, order="dp-tp").canonical("tp-edp-ep") == "edp-etp-ep"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        ({"world": 16, "tp": 3, "pp": 2}, "is not divisible by tp*cp*pp=3*1*2=6: choose world=12 or 18"),
        ({"world": 2, "tp": 4}, "world=2 is not divisible by tp*cp*pp=4*1*1=4: choose world=4, or"),
        ({"world": 16, "cp": 2, "ep": 3}, "ep=3 does not divide dp*cp=8*2=16: choose ep=1, 2, 4, 8 or 16"),
        ({"world": 0}, "world=0 is not a size"),
        ({"world": 4, "tp": -2}, "tp=-2 is not a size: choose tp=1 or more"),
        ({"world": 4, "node_size": 0}, "node_size=0 is not a size"),
        ({"world": 4, "order": "tp-ddp"}, "unknown axis 'ddp' (did you mean 'dp'?)"),
        ({"world": 4, "order": ""}, "unknown axis ''"),
        ({"world": 4, "order": "dp-tp-dp"}, "names dp 2 times: name it once"),
        ({"world": 4, "tp": 2, "order": "dp-pp"}, "leaves out tp, but tp=2: add it, as in 'dp-pp-tp'"),
        ({"world": 2, "cp": 2, "order": "tp-cp"}, "leaves out dp, but edp=2"),
        ({"world": 4, "tp": 4, "parts": (("tp", (("a", 2), ("b", 3))),)}, "parts a*b=2*3=6 do not make tp=4"),
        ({"world": 4, "tp": 1, "parts": (("tp", ()),)}, "do not make tp=1"),
        ({"world": 4, "parts": (("xp", (("a", 2),)),)}, "unknown axis 'xp'"),
        ({"world": 4, "parts": (("dp", (("a", 4),)), ("dp", (("b", 4),)))}, "parts name dp twice"),
        ({"world": 4, "parts": (("dp", (("pp", 4),)),)}, "'pp' can't name a part of dp"),
        ({"world": 4, "parts": (("dp", (("a-b", 4),)),)}, "'a-b' can't name a part of dp"),
        ({"world": 4, "parts": (("dp", (("a", -2), ("b", -2))),)}, "part a=-2 of dp is not a size"),
    ],
)
def test_a_wrong_layout_is_refused_with_the_fix(make: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        Layout(**make)  # type: ignore[arg-type]
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("embeding", "unknown group 'embeding' (did you mean 'embedding'?)"),
        ("position-embedding", "(did you mean 'position_embedding'?)"),
        ("tp-ppp", "unknown group 'ppp' in 'tp-ppp' (did you mean 'pp'?)"),
        ("tp.k", "(did you mean 'tp.kv'?)"),
        ("", "unknown group ''"),
        ("dp-dp", "names dp twice"),
        ("tp-tp", "names tp twice"),
        ("tp-tp.kv", "names tp twice"),
        ("pp-tp.q-tp.q", "names tp twice"),
        ("dp-ep", "mixes dp of the dense view with ep of the expert view"),
        ("tp-world", "unknown group 'world' in 'tp-world'"),
    ],
)
def test_a_wrong_group_name_is_refused_with_the_fix(name: str, sentence: str) -> None:
    for ask in (PARTED.groups, PARTED.size, PARTED.canonical, lambda name: PARTED.group(name, 0)):
        with pytest.raises(UserError) as caught:
            ask(name)
        assert sentence in str(caught.value)


def test_places_outside_the_layout_are_refused() -> None:
    with pytest.raises(UserError, match="rank 16 is not in a world of 16: choose 0 to 15"):
        PARTED.group("tp", 16)
    with pytest.raises(UserError, match="rank -1"):
        PARTED.coordinate(-1)
    with pytest.raises(UserError, match="tp=4 is outside this layout: choose 0 to 3"):
        PARTED.rank_at(tp=4)
    with pytest.raises(UserError, match="mixes dp"):
        PARTED.rank_at(dp=0, ep=0)


def test_nodes() -> None:
    layout = Layout(16, tp=4, pp=2, node_size=8)
    assert not any(map(layout.crosses_node, layout.groups("tp-dp")))
    assert all(map(layout.crosses_node, layout.groups("pp")))
    assert not layout.crosses_node(())
    assert not Layout(16, tp=4, pp=2).crosses_node((0, 15))


def test_what_one_rank_asks_does_not_cost_the_world() -> None:
    """Every rank of a huge world asks for its own groups. Scanning the whole world for each of these would take
    hours.
    """
    layout = Layout(1 << 20, tp=8, pp=16, cp=2, ep=8)
    start = time.process_time()  # the time of this process alone, however busy the machine is
    for rank in range(0, layout.world, 97):
        assert rank in layout.group("tp", rank)
        assert rank in layout.group("tp-ep", rank)
        assert layout.rank_at(**layout.coordinate(rank)) == rank
    assert time.process_time() - start < 20
