"""Schedules whose stages lie along a V: chunk 0 goes down the ranks and chunk 1 comes back up.

The first and the last stage are on rank 0, and nothing is sent at the turn, where both chunks are on the last rank.
Backwards are split into input gradients (I) and weight gradients (W).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from meshwright.spec.schedule.table import Action, Op, Placement

# A step of an order is an operation and a chunk, such as "F0". "W" is the oldest weight gradient that is due.
OPS = {"F": Op.FORWARD, "B": Op.BACKWARD, "I": Op.INPUT_GRAD}


def v_placement(pp: int, chunks: int) -> Placement:
    """Return the placement that goes down the ranks with chunk 0 and back up with chunk 1."""
    return (*((rank, 0) for rank in range(pp)), *((rank, 1) for rank in reversed(range(pp))))


def zero_bubble_v(pp: int, micro_batches: int, chunks: int, rank: int) -> list[Action]:
    """Return the order of ZB-V of "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362).

    No rank is idle between its first and its last compute if F = I = W. A rank has at most 2 pp half-size chunks in
    flight, as many activations as the first rank of 1F1B.
    """
    full = max(micro_batches, 2 * pp - 1)
    below = pp - rank - 1
    fill = "F0 " * (2 * below + 1) + "F1 F0 " * rank + "F1 I1 W " * (below + 1)
    steady = "F0 I0 W F1 I1 W " * (full - 2 * pp + rank + 1)
    drain = "I0 W F1 I1 W " * below + "I0 I1 " * rank + "I0 W " * (below + 1) + "W " * (2 * rank)
    return _numbered((fill + steady + drain).split(), full - micro_batches)


def dual_pipe_v(pp: int, micro_batches: int, chunks: int, rank: int) -> list[Action]:
    """Return the order of DualPipeV (github.com/deepseek-ai/DualPipe), half of the ranks of DualPipe.

    In the steady state each forward is next to a backward of another micro-batch, whose communication can hide behind
    it. Only the backwards at both ends are split. A rank has at most 2 pp + 1 half-size chunks in flight.
    """
    full = max(micro_batches, 2 * pp)
    below = pp - rank - 1
    fill = "F0 " * (2 * below) + "F0 F1 " * (rank + 1) + "I1 W F1 " * below
    steady = "F0 B1 F1 B0 " * (full - 2 * pp + rank + 1) + "B1 F1 B0 " * below
    turns = [f"{'B' if i <= rank else 'I'}{1 - i % 2}" for i in range(2 * rank + 2)]
    drain = "W I0 " * below + "W " * (rank + 1)
    return _numbered([*(fill + steady).split(), *turns, *drain.split()], full - micro_batches)


def _numbered(steps: Sequence[str], missing: int) -> list[Action]:
    """Return the actions of `steps`, with micro-batches numbered in order for each operation and chunk.

    The first `missing` micro-batches don't exist: they fill up an order that is planned for more, and are removed.
    Dependencies never cross micro-batches, so the remaining order is as sound as the full one.
    """
    counts: Counter[tuple[str, str]] = Counter()
    due: deque[Action] = deque()
    order = []
    for step in steps:
        if step == "W":
            order.append(due.popleft())
            continue
        op, chunk = step[0], step[1]
        number = "F" if op == "F" else "B", chunk
        action = Action(OPS[op], counts[number] - missing, int(chunk))
        counts[number] += 1
        order.append(action)
        if op == "I":
            due.append(Action(Op.WEIGHT_GRAD, action.micro_batch, action.chunk))
    return [action for action in order if action.micro_batch >= 0]


def v_half(pp: int, micro_batches: int, chunks: int, rank: int) -> list[Action]:
    """Return the order of a V-Half schedule of "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362).

    A rank has at most pp + 2 half-size chunks in flight: about half the activations of 1F1B, with half its bubble. All
    micro-batches repeat one pattern, six slots apart: F = I = W = one slot. It takes two slots per rank on the way down
    (F0 and I1) and one on the way up (F1 and I0). These are the shortest ways on which no rank gets two computes for
    one slot; the shift at the turn depends on the parity of pp for the same reason.
    """
    turn = 3 * (pp - 1) + (1 if pp % 2 else 4)  # the slot of F1 on rank 0, plus the rank
    odd = rank % 2
    slots = (
        (2 * rank + odd, Op.FORWARD, 0), (turn - rank, Op.FORWARD, 1),
        (turn + 2 * rank + 2, Op.INPUT_GRAD, 1), (turn + 2 * rank + 3 + 2 * odd, Op.WEIGHT_GRAD, 1),
        (6 * pp + 2 - rank, Op.INPUT_GRAD, 0), (6 * pp + 5 - rank, Op.WEIGHT_GRAD, 0),
    )  # fmt: skip
    timed = [(slot + 6 * m, Action(op, m, chunk)) for m in range(micro_batches) for slot, op, chunk in slots]
    return [action for _, action in sorted(timed, key=lambda item: item[0])]
