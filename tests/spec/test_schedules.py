"""Schedule tables: small ones equal the listed words, many sizes are complete and safe, and planted faults are
found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import UserError
from meshwright.spec.schedule.kinds import KINDS, build
from meshwright.spec.schedule.table import MEANING, RECEIVES, SENDS, Action, Op, Table
from meshwright.spec.schedule.verify import _check_pairs, verify

SHORT = {Op.FORWARD: "F", Op.BACKWARD: "B", Op.SEND_FORWARD: "sF", Op.RECV_FORWARD: "rF"}
SHORT |= {Op.SEND_BACKWARD: "sB", Op.RECV_BACKWARD: "rB"}


def words(actions: tuple[Action, ...], transfers: bool = True) -> str:
    """Write actions as words. `F1.0` is the forward of micro-batch 1 in chunk 0, `sF1.0>2` its send to rank 2,
    `rF1.0<0` a receive.
    """
    out = []
    for action in actions:
        word = f"{SHORT[action.op]}{action.micro_batch}.{action.chunk}"
        if action.peer is not None:
            word += (">" if action.op in SENDS else "<") + str(action.peer)
        if transfers or action.peer is None:
            out.append(word)
    return " ".join(out)


GOLDEN = {
    ("gpipe", 2, 2, 1): [
        "F0.0 sF0.0>1 F1.0 sF1.0>1 rB0.0<1 B0.0 rB1.0<1 B1.0",
        "rF0.0<0 rF1.0<0 F0.0 F1.0 B0.0 sB0.0>0 B1.0 sB1.0>0",
    ],
    ("1f1b", 2, 3, 1): [
        "F0.0 sF0.0>1 F1.0 sF1.0>1 rB0.0<1 B0.0 F2.0 sF2.0>1 rB1.0<1 B1.0 rB2.0<1 B2.0",
        "rF0.0<0 rF1.0<0 F0.0 B0.0 sB0.0>0 F1.0 rF2.0<0 B1.0 sB1.0>0 F2.0 B2.0 sB2.0>0",
    ],
    ("forward_only", 2, 2, 1): [
        "F0.0 sF0.0>1 F1.0 sF1.0>1",
        "rF0.0<0 rF1.0<0 F0.0 F1.0",
    ],
    ("interleaved", 1, 1, 2): ["F0.0 F0.1 B0.1 B0.0"],
}


@pytest.mark.parametrize("sizes", GOLDEN, ids=str)
def test_golden(sizes: tuple[str, int, int, int]) -> None:
    table = build(*sizes)
    assert [words(actions) for actions in table.ranks] == GOLDEN[sizes]


def test_interleaved_order() -> None:
    """Two ranks with 4 micro-batches and 2 chunks warm up with 2 (p - rank - 1) + (v - 1) p = 4 and 2 forwards."""
    table = build("interleaved", 2, 4, 2)
    assert [words(actions, transfers=False) for actions in table.ranks] == [
        "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0",
        "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0",
    ]


def test_interleaved_with_a_group_that_is_not_full() -> None:
    table = build("interleaved", 2, 3, 2)
    assert [words(actions, transfers=False) for actions in table.ranks] == [
        "F0.0 F0.1 F1.0 F2.0 B0.1 F1.1 F2.1 B0.0 B1.1 B2.1 B1.0 B2.0",
        "F0.0 F0.1 B0.1 F1.0 F2.0 B0.0 F1.1 B1.1 F2.1 B2.1 B1.0 B2.0",
    ]


@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 1), (1, 5), (4, 2), (4, 8), (5, 7)])
def test_interleaved_with_one_chunk_is_1f1b(pp: int, micro_batches: int) -> None:
    assert build("interleaved", pp, micro_batches).ranks == build("1f1b", pp, micro_batches).ranks


def test_stage_and_place_are_inverse_and_loop() -> None:
    table = build("interleaved", 4, 4, 3)
    assert len(table.placement) == 12
    for rank in range(4):
        for chunk in range(3):
            assert table.stage(rank, chunk) == chunk * 4 + rank
            assert table.placement[table.stage(rank, chunk)] == (rank, chunk)
    assert table.beside(1, 3, 0) == (0, 1) and table.beside(-1, 0, 1) == (3, 0)
    assert table.beside(-1, 0, 0) is None is table.beside(1, 3, 2) and table.beside(0, 1, 1) is None


def test_one_rank_moves_nothing() -> None:
    for kind, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 4), ("forward_only", 4)):
        table = build(kind, 1, 5, chunks)
        assert all(action.peer is None for action in table.ranks[0])
        verify(table)


@st.composite
def sizes(draw: st.DrawFn) -> tuple[str, int, int, int]:
    kind = draw(st.sampled_from(list(KINDS)))
    chunks = draw(st.sampled_from(KINDS[kind].chunks or (1, 2, 3, 4)))
    return kind, draw(st.integers(1, 16)), draw(st.integers(1, 64)), chunks


@settings(max_examples=250)
@given(sizes())
def test_every_table_is_complete_and_safe(size: tuple[str, int, int, int]) -> None:
    table = build(*size)
    verify(table)
    for actions in table.ranks:
        for before, action in zip(actions, actions[1:], strict=False):
            if action.op in SENDS:  # a send directly follows the compute that feeds it
                assert MEANING[before.op].direction == SENDS[action.op]
                assert (before.micro_batch, before.chunk) == (action.micro_batch, action.chunk)


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_small_table(kind: str) -> None:
    for pp in range(1, 6):
        for micro_batches in range(1, 8):
            for chunks in KINDS[kind].chunks or (1, 2, 3):
                verify(build(kind, pp, micro_batches, chunks))


def test_the_largest_of_them() -> None:
    verify(build("interleaved", 16, 64, 4))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("1f1", 4, 8), "did you mean '1f1b'"),
        (("zzz", 4, 8), "the kinds are gpipe, 1f1b, zb-h1, interleaved, forward_only"),
        (("gpipe", 4, 8, 2), "use interleaved, or chunks=1"),
        (("1f1b", 4, 8, 2), "use interleaved, or chunks=1"),
        (("1f1b", 0, 8), "pp=0"),
        (("1f1b", 4, 0), "micro_batches=0"),
        (("interleaved", 4, 8, 0), "chunks=0"),
        (("1f1b", 4, -1), "micro_batches=-1"),
        (("1f1b", 10**6, 10**6), "too large"),
    ],
)
def test_mistakes_say_what_to_do(arguments: tuple[str, int, int], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        build(*arguments)
    assert "\n" not in str(caught.value)


def edited(table: Table, rank: int, edit: Callable[[list[Action]], object]) -> Table:
    actions = list(table.ranks[rank])
    edit(actions)
    ranks = list(table.ranks)
    ranks[rank] = tuple(actions)
    return replace(table, ranks=tuple(ranks))


def swap(actions: list[Action], first: Action, second: Action) -> None:
    i, j = actions.index(first), actions.index(second)
    actions[i], actions[j] = actions[j], actions[i]


TABLE = build("1f1b", 3, 4)
RECV = Action(Op.RECV_FORWARD, 2, 0, 0)
FAULTS: list[tuple[int, Callable[[list[Action]], object], str]] = [
    (1, lambda a: a.remove(RECV), "rank 1: forward of micro-batch 2 chunk 0 comes without recv_forward"),
    (1, lambda a: a.remove(Action(Op.SEND_BACKWARD, 3, 0, 0)), "rank 1: send_backward of .* 3 .* is missing"),
    (2, lambda a: a.remove(Action(Op.BACKWARD, 3, 0)), "rank 2: send_backward of micro-batch 3 .* without"),
    (0, lambda a: a.remove(Action(Op.BACKWARD, 3, 0)), "rank 0: the input gradient of micro-batch 3 .* is missing"),
    (0, lambda a: a.append(Action(Op.BACKWARD, 1, 0)), "rank 0: backward of micro-batch 1 .* occurs twice"),
    (1, lambda a: a.append(RECV), "rank 1: recv_forward of micro-batch 2 .* occurs twice"),
    (0, lambda a: a.append(Action(Op.FORWARD, 4, 0)), "rank 0: forward of micro-batch 4 .* no place"),
    (0, lambda a: a.append(Action(Op.FORWARD, 0, 1)), "rank 0: forward of micro-batch 0 chunk 1 has no place"),
    (0, lambda a: a.append(Action(Op.SEND_FORWARD, 0, 0, 2)), "to rank 2 has no place"),
    (2, lambda a: swap(a, Action(Op.FORWARD, 1, 0), Action(Op.FORWARD, 2, 0)), "rank 2: .* comes without"),
    (
        0,
        lambda a: swap(a, Action(Op.FORWARD, 0, 0), Action(Op.BACKWARD, 0, 0)),
        "rank 0: backward of micro-batch 0 chunk 0 comes without",
    ),
    (
        1,
        lambda a: swap(a, Action(Op.RECV_FORWARD, 0, 0, 0), Action(Op.RECV_FORWARD, 1, 0, 0)),
        "rank 0: send_forward of micro-batch 0 chunk 0 to rank 1 meets rank 1: recv_forward of micro-batch 1",
    ),
]


@pytest.mark.parametrize(("rank", "edit", "says"), FAULTS)
def test_verify_finds_planted_faults(rank: int, edit: Callable[[list[Action]], object], says: str) -> None:
    verify(TABLE)
    with pytest.raises(AssertionError, match=says):
        verify(edited(TABLE, rank, edit))


def test_verify_finds_sends_whose_order_deadlocks() -> None:
    """A rank that waits for a tensor of its second chunk before it sends that of the first one waits for itself."""
    table = build("interleaved", 3, 3, 2)

    def early_receive(actions: list[Action]) -> None:
        receive = next(a for a in actions if a.op is Op.RECV_FORWARD and a.chunk == 1)
        actions.remove(receive)
        actions.insert(0, receive)

    with pytest.raises(AssertionError, match="deadlock with buffered sends: rank 0 at recv_forward"):
        verify(edited(table, 0, early_receive))


def test_verify_finds_a_deadlock_that_buffers_would_hide() -> None:
    """Each receive comes just before its use, so every rank of the ring sends to the next while none receives.

    Each pair agrees on its order and buffers would suffice, so only a run with blocking sends shows the hang.
    """
    table = build("forward_only", 3, 3, 2)
    ranks = []
    for actions in table.ranks:
        late = [action for action in actions if action.op not in RECEIVES]
        for receive in actions:
            if receive.op in RECEIVES:
                late.insert(late.index(Action(Op.FORWARD, receive.micro_batch, receive.chunk)), receive)
        ranks.append(tuple(late))
    with pytest.raises(AssertionError, match="deadlock when sends block .*: rank 0 at send_forward"):
        verify(replace(table, ranks=tuple(ranks)))


def test_only_transfers_of_one_direction_have_one_order() -> None:
    """Activations and gradients go over different groups, so a pair may list the two in different orders."""
    common = [action for action in TABLE.ranks[1] if action.peer == 2]
    both = next((one, other) for one, other in pairwise(common) if one.op is not other.op)
    _check_pairs(edited(TABLE, 1, lambda actions: swap(actions, *both)))
    forward = [action for action in common if action.op is Op.SEND_FORWARD]
    with pytest.raises(AssertionError, match="different orders"):
        _check_pairs(edited(TABLE, 1, lambda actions: swap(actions, *forward[:2])))


def test_verify_checks_the_frame() -> None:
    with pytest.raises(AssertionError, match="2 ranks, not pp=3"):
        verify(replace(TABLE, ranks=TABLE.ranks[:2]))
    with pytest.raises(AssertionError, match="exactly one stage"):
        verify(replace(TABLE, placement=((0, 0), (0, 0), (2, 0))))
