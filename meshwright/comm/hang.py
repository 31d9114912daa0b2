"""Explain a hang in one sentence that names the missing ranks, from the states that the ranks published.

These are pure functions. A *state* is the plain JSON that `Watchdog` publishes for a rank. `ask(rank)` returns it, or
None if the rank does not answer. Only relevant ranks are asked: first those of the stuck call, then those of the calls
in which the missing ranks wait themselves, and so on along the chain until it ends at a rank that waits for no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from meshwright.comm.flight import describe_call
from meshwright.comm.group import list_ranks

State = dict[str, Any]
AskState = Callable[[int], State | None]
Key = tuple[str, int]

# The greatest number of calls that the explanation follows, including the first.
MAX_FOLLOWED = 8
# The ops in which ranks may send different sizes.
OF_ANY_SIZE = ("all_to_all", "exchange")
# The op at the other end of a transfer, by the op at this end.
OTHER_END = {"send": "receive", "receive": "send"}


def explain(call: dict[str, Any], rank: int, timeout: float, ask: AskState) -> str:
    """Return the message for `call`, on which `rank` has waited longer than `timeout` seconds."""
    stuck = [r for r in call["ranks"] if r == rank or _waits_in(ask(r), call)]
    parts = [f"{describe_call(call)} did not end within {timeout:g} s on {name_ranks(stuck)}"]

    # Follow the chain breadth first: a missing rank may itself wait in another call, whose missing ranks come next.
    queue, waits_for = [call], {_key(call): set[Key]()}
    while queue:
        current = queue.pop(0)
        states = {r: ask(r) for r in current["ranks"]}
        missing = {r: state for r, state in states.items() if not _has_arrived(state, current)}
        prefix = "" if current is call else f"for {describe_call(current)} "
        if not missing:
            parts.append(prefix + _all_arrived_clause(current, states))
        parts += [prefix + clause for clause in _clauses(current, missing)]
        for held in (state["holding"] for state in missing.values() if state and state.get("holding")):
            waits_for[_key(current)].add(_key(held))
            if _key(held) not in waits_for and len(waits_for) < MAX_FOLLOWED:
                waits_for[_key(held)] = set()
                queue.append(held)
    if _has_circle(waits_for, _key(call), ()):
        parts.append("the ranks wait for each other, so they make their calls in different orders")
    return "; ".join(parts)


def _has_circle(waits_for: dict[Key, set[Key]], at: Key, path: tuple[Key, ...]) -> bool:
    """Return True if a call that is reached from `at` waits for itself."""
    return at in path or any(_has_circle(waits_for, to, (*path, at)) for to in waits_for.get(at, ()))


def _clauses(call: dict[str, Any], missing: dict[int, State | None]) -> list[str]:
    """Return clauses about the ranks that did not arrive and where they are instead, one clause per place."""
    by_place: dict[str, list[int]] = {}
    for rank, state in missing.items():
        by_place.setdefault(_place(state), []).append(rank)
    end = None if call["peer"] is None else OTHER_END.get(call["op"])
    what = "did not arrive" + (f" with the matching {end}" if end else "")
    return [
        f"{name_ranks(ranks)} {what}: {'it' if len(ranks) == 1 else 'each'} {place}"
        for place, ranks in by_place.items()
    ]


def _place(state: State | None) -> str:
    if state is None:
        return "does not answer (stopped or dead)"
    if "left" in state:
        return f"has left ({state['left']})"
    held = state.get("holding")
    if held:
        return f"waits in {describe_call(held)}"
    doing = "is compiling" if state.get("compiling") else "is outside any collective"
    return f"{doing}, in {state.get('at') or 'an unknown place'}"


def _all_arrived_clause(call: dict[str, Any], states: dict[int, State | None]) -> str:
    """Return a clause about a call at which all ranks arrived: a mismatch between their calls, or a stuck network."""
    for rank, state in states.items():
        other = _published_record(state, call)
        if other and not _fits(call, other, is_peer=rank == call["peer"]):
            return f"rank {rank} has called {describe_call(other)} there, so the ranks disagree"
    return "every rank of it arrived, so the network or a device is probably stuck"


def _fits(call: dict[str, Any], other: dict[str, Any], is_peer: bool) -> bool:
    """Return True if another rank's call of the same number is the same call, or the other end of the transfer."""
    expected = OTHER_END[call["op"]] if is_peer else call["op"]
    return other["op"] == expected and (other["payload"] == call["payload"] or expected in OF_ANY_SIZE)


def _has_arrived(state: State | None, call: dict[str, Any]) -> bool:
    return state is not None and state.get("numbers", {}).get(call["group"], 0) >= call["number"]


def _published_record(state: State | None, call: dict[str, Any]) -> dict[str, Any] | None:
    """Return the record that a rank has published of a call, or None if it has published none."""
    published = [] if state is None else [*state.get("around", []), *state.get("last", [])]
    return next((record for record in published if _key(record) == _key(call)), None)


def _waits_in(state: State | None, call: dict[str, Any]) -> bool:
    held = (state or {}).get("holding")
    return held is not None and _key(held) == _key(call)


def _key(call: dict[str, Any]) -> Key:
    return call["group"], call["number"]


def name_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list_ranks(ranks)}"
