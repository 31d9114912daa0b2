"""A custom schedule that is registered from outside trains as one process does.

Its stages are laid out as a V, so that the first rank has both ends of the model. In one variant the weight gradients
come later than the input gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from meshwright.errors import UserError
from meshwright.plan.communication import predict_step
from meshwright.show.schedule_drawing import timeline_svg, timeline_text
from meshwright.spec.model.description import layout_of
from meshwright.spec.schedule.kinds import KINDS, Kind, Order, build, register
from meshwright.spec.schedule.simulate import simulate
from meshwright.spec.schedule.table import Action, Op, Placement, action_counts, most_held
from meshwright.spec.schedule.trace import spans_of
from meshwright.spec.schedule.verify import verified, verify
from tests.support.oracle import (
    EXACT,
    Made,
    Outcome,
    Reference,
    compare_steps,
    complaints,
    gather_global,
    make_trainer,
    small_config,
    solo,
    true_gradients,
    worst,
)
from tests.support.ranks import run_ranks

MODEL = {"layers": 4, "hidden": 32, "heads": 4, "vocab": 53, "seq": 16}


def v_placement(pp: int, chunks: int) -> Placement:
    """Place the first chunks down the ranks, and the second chunks up again."""
    return (*((rank, 0) for rank in range(pp)), *((rank, 1) for rank in reversed(range(pp))))


def v_order(split: bool) -> Order:
    """Return the order of a V: each rank takes its part of one global order, in which a micro-batch starts every two
    slots.
    """

    def order(pp: int, micro_batches: int, chunks: int, rank: int) -> list[Action]:
        stages = 2 * pp
        found: list[tuple[int, int, Action]] = []
        for m in range(micro_batches):
            for stage, (owner, chunk) in enumerate(v_placement(pp, chunks)):
                if owner != rank:
                    continue
                back = 2 * stages - 1 - stage
                steps = [(stage, Op.FORWARD), (back, Op.INPUT_GRAD if split else Op.BACKWARD)]
                steps += [(back + 3, Op.WEIGHT_GRAD)] if split else []
                found += [(2 * m + at, m, Action(op, m, chunk)) for at, op in steps]
        return [action for _, _, action in sorted(found, key=lambda item: item[:2])]

    return order


V = {
    "v": Kind(v_order(split=False), v_placement, chunks=(2,)),
    "v-split": Kind(v_order(split=True), v_placement, chunks=(2,)),
}


@pytest.mark.parametrize("kind", list(V))
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_everybody_who_reads_a_table_takes_it(kind: str, pp: int) -> None:
    with mock.patch.dict(KINDS, V):
        for micro_batches in (1, 2, 5):
            for stage in (0, 2, 3):
                verify(build(kind, pp, micro_batches, 2, stage))
                verify(build(kind, pp, micro_batches, 2, stage, validation=True))
        table = build(kind, pp, 5, 2)
    simulation = simulate(table)
    assert sum(simulation.busy) == pytest.approx(3.0 * 5 * pp)
    # Activations are held from the forward until the weight gradient. A backward in one piece releases them earlier.
    releases = Op.WEIGHT_GRAD if kind == "v-split" else Op.BACKWARD
    for rank, actions in enumerate(table.ranks):
        alive = [sum((a.op is Op.FORWARD) - (a.op is releases) for a in actions[:n]) for n in range(len(actions) + 1)]
        assert max(alive) == most_held(actions) == 2 * simulation.peak_activations[rank]
    names = {span.name[0] for span in spans_of(simulation) if span.track == "compute"}
    assert names == ({"F", "I", "W"} if kind == "v-split" else {"F", "B"})
    drawn, svg = timeline_text(simulation, 200), timeline_svg(simulation)
    for op in table.computes:
        assert op.value in drawn and f"{op.value} of micro-batch 4, stage {2 * pp - 1} (rank 0, chunk 1)" in svg


def test_a_split_backward_that_is_not_whole_is_found() -> None:
    """The weight gradient is missing, comes first, or comes in addition to a backward in one piece."""
    with mock.patch.dict(KINDS, V):
        table = build("v-split", 2, 3, 2)
    weight, grad = Action(Op.WEIGHT_GRAD, 1, 1), Action(Op.INPUT_GRAD, 1, 1)
    for edit, says in (
        (lambda a: a.remove(weight), "the weight gradient of micro-batch 1 chunk 1 is missing"),
        (lambda a: (a.remove(weight), a.insert(a.index(grad), weight)), "without the input gradient before it"),
        (lambda a: a.insert(a.index(weight), Action(Op.BACKWARD, 1, 1)), "occurs twice, or after an action with"),
    ):
        actions = list(table.ranks[0])
        edit(actions)
        with pytest.raises(AssertionError, match=says):
            verify(replace(table, ranks=(tuple(actions), *table.ranks[1:])))


def test_what_a_kind_knows_of_itself_is_true() -> None:
    for name, kind in KINDS.items():
        for pp, m, chunks in ((1, 3, 1), (4, 2, 1), (4, 9, 1), (4, 8, 2), (3, 7, 3)):
            if kind.in_flight is not None and kind.takes(chunks) and m % pp == 0:
                found = [action_counts(row)["in_flight"] for row in build(name, pp, m, chunks).ranks]
                assert found == [kind.in_flight(pp, m, chunks, rank) for rank in range(pp)]


def test_a_table_too_large_to_prove_is_proven_by_a_smaller_one() -> None:
    with mock.patch("meshwright.spec.schedule.verify.LARGEST_PROVEN", 64), mock.patch.dict(KINDS, V):
        proven: list[int] = []
        with mock.patch("meshwright.spec.schedule.verify.verify", lambda table: proven.append(table.micro_batches)):
            verified.cache_clear()
            assert verified("interleaved", 4, 131, 2).micro_batches == 131
            assert verified("interleaved", 4, 15, 2).micro_batches == 15
        verified.cache_clear()
    assert proven == [19, 15] and proven[0] % 4 == 131 % 4


def test_a_name_is_taken_once_and_chunks_are_checked() -> None:
    with mock.patch.dict(KINDS, V):
        with pytest.raises(UserError, match="choose another name"):
            register("v", V["v"])
        with pytest.raises(UserError, match="'v' holds 2 chunks per rank, not 3: use interleaved, or chunks=2"):
            build("v", 2, 4, 3)
        config = small_config(layout={"pp": 2, "chunks": 2}, pipeline={"schedule": "v"})
        layout = layout_of(config, 4)
    assert layout.first_and_last == (0, 0)
    assert layout.groups("embedding") == ((0,), (1,)) and layout.size("embedding") == 1


def sections(schedule: str, tp: int = 1, stage: int = 0, **more: dict[str, Any]) -> dict[str, dict[str, Any]]:
    layout = {"pp": 2, "chunks": 2, "tp": tp, "sequence_parallel": tp > 1} if schedule else {}
    return {
        "model": {**MODEL, "tied_embeddings": True}, "layout": layout, "pipeline": {"schedule": schedule or "1f1b"},
        "train": {"precision": "fp64", "global_batch": 8, "clip": 0.7, "compile": False},
        "comm": {"bucket_mib": 0.02}, "zero": {"stage": stage}, "run": {"eval_samples": 8}, **more,
    }  # fmt: skip


def reference() -> Reference:
    alone = small_config(**sections(""))
    return solo(alone, alone, Made(53, 16))


Run = dict[str, dict[str, Any]]


def measure(rank: int, world: int, runs: list[Run], one: Reference) -> list[tuple[Outcome, float]]:
    for name, kind in V.items():
        register(name, kind)
    found = []
    for run in runs:
        trainer = make_trainer(small_config(**run), rank, world, Made(53, 16))
        assert trainer.writes == (rank == 0)
        outcome = compare_steps(trainer, one)
        line = trainer.validate()
        assert line is not None
        found.append((outcome, abs(float(line["loss"]) - one.validation) / one.validation))
        predicted = {axis: traffic._asdict() for axis, traffic in predict_step(trainer.ctx.config, world).items()}
        assert trainer.step().comm == predicted, "the planner asks the same placement"
    return found


def check_runs(world: int, runs: list[Run]) -> None:
    by_rank = run_ranks(world, measure, runs, reference())
    for number, run in enumerate(runs):
        outcomes = [rank[number] for rank in by_rank]
        assert complaints([outcome for outcome, _ in outcomes]) == [], run
        assert max(error for _, error in outcomes) < EXACT, run


def test_v_shaped_trains_as_one_process_does() -> None:
    """The embedding is tied, so that its two ends are one parameter on the first rank."""
    check_runs(2, [sections("v"), sections("v-split")])


def late_weights(pp: int, micro_batches: int, chunks: int, rank: int) -> list[Action]:
    """Order a rank so that the weight gradients of all micro-batches come after everything else."""
    steps = (Op.FORWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD)
    return [Action(op, m, 0) for op in steps for m in range(micro_batches)]


@pytest.mark.wide
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_late_weight_gradients_of_compiled_blocks(norm: str) -> None:
    """A compiled backward overwrites its inputs, so whatever is needed later must be a copy of them."""
    model = {"norm": norm, "mlp": "swiglu", "position": "rope", "bias": False, "layers": 2}
    with mock.patch.dict(KINDS, {"late": Kind(late_weights, chunks=(1,))}):
        eager = make_trainer(small_config(model=model, run={"device": "cpu"}))
        late = small_config(
            model=model, run={"device": "cpu"}, pipeline={"schedule": "late"},
            train={"precision": "fp64", "global_batch": 8, "compile": True},
        )  # fmt: skip
        compiled = make_trainer(late)
        assert compiled.executor.compiled
        for trainer in (eager, compiled):
            trainer.step()
        error, name = worst(true_gradients(compiled), gather_global(true_gradients(eager)))
    assert error <= EXACT, name


@pytest.mark.wide
def test_v_shaped_with_everything_else() -> None:
    runs = [sections(kind, stage=stage) for kind in V for stage in (0, 1, 2, 3)]
    runs += [sections("v-split", stage=3, recompute={"mode": "full"})]
    check_runs(4, runs)
    check_runs(4, [sections(kind, tp=2) for kind in V])
