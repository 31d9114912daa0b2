"""A run that is killed and resumed on the same layout is bit-identical to an undisturbed run."""

from __future__ import annotations

import errno
import itertools
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import meshwright.checkpoint.resume as resume
import meshwright.checkpoint.save as save
from meshwright.errors import UserError
from meshwright.record import checkpoint_format as fmt
from tests.checkpoint.runs import (
    Attempt,
    Crash,
    assert_same,
    complete,
    lines,
    newest,
    saved,
    steps,
    tensors,
    tiny,
    train,
)
from tests.support.ranks import run_ranks

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2-sp": (2, {"tp": 2, "sequence_parallel": True}),
    "dp2-tp2-sp": (4, {"tp": 2, "sequence_parallel": True}),
    "dp2-pp2": (4, {"pp": 2}),
    "dp2-tp2-pp2": (8, {"tp": 2, "pp": 2}),
}


def kill_and_resume(tmp_path: Path, world: int, layout: dict[str, Any], precision: str, count: int) -> None:
    """Kill a rank after the checkpoint in the middle of `count` steps, resume, and compare with an undisturbed run."""
    half = count // 2
    changes: dict[str, dict[str, Any]] = {
        "train": {"precision": precision, "steps": count},
        "layout": layout,
        "checkpoint": {"every": half, "keep": 0},
        "run": {"eval_every": half // 2},
    }
    reference = complete(world, tiny(tmp_path / "straight", **changes))
    sections = tiny(tmp_path / "killed", **changes)
    attempt = Attempt(world, sections)
    victim = random.Random(f"{layout} {precision}").randrange(world)
    assert attempt.until(lambda: saved(attempt.run) == [half] and len(steps(attempt.run)) > half)
    attempt.kill(victim)
    assert attempt.finish() is None, "a rank was killed before the end"
    done = steps(attempt.run)
    run = complete(world, sections)
    assert_same(run, reference)
    assert [line["step"] for line in lines(run / "metrics.jsonl")] == list(range(1, count + 1))
    lost = [line["step"] for line in lines(run / "lost.jsonl") if "phases" in line]
    assert lost == done[half:] and len(lost) >= 1


@pytest.mark.parametrize(("layout", "precision"), [("tp2-sp", "fp32"), ("dp2", "bf16")])
def test_resume_is_bit_identical(layout: str, precision: str, tmp_path: Path) -> None:
    kill_and_resume(tmp_path, *LAYOUTS[layout], precision, 8)


@pytest.mark.wide
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_resume_is_bit_identical_over_forty_steps(layout: str, precision: str, tmp_path: Path) -> None:
    kill_and_resume(tmp_path, *LAYOUTS[layout], precision, 40)


def train_with_clocks_that_differ(rank: int, world: int, sections: Any) -> tuple[int, int]:
    """Train with a save due at every third step on rank 0, and at every step on rank 1. Only rank 0 may decide."""
    from meshwright.run.loop import SaveHook

    calls = itertools.count(1)
    SaveHook.wants_save = lambda self: rank == 1 or next(calls) % 3 == 0  # type: ignore[method-assign]
    return train(rank, world, sections, None, None)


def test_a_run_that_saves_by_the_clock_resumes_to_the_bit(tmp_path: Path) -> None:
    reference = complete(2, tiny(tmp_path / "straight", checkpoint={"every": 0}))
    sections = tiny(tmp_path / "clock", checkpoint={"every": "auto", "keep": 0})
    run_ranks(2, train_with_clocks_that_differ, sections)
    assert saved(tmp_path / "clock") == [3, 6, 8]
    shutil.rmtree(tmp_path / "clock" / "checkpoints" / "step-00000008")
    assert_same(complete(2, sections), reference)


@pytest.mark.wide
def test_a_run_that_ends_in_its_last_validation_is_saved_and_goes_on_there(tmp_path: Path) -> None:
    checkpoint = {"checkpoint": {"every": 0}}
    reference = complete(2, tiny(tmp_path / "straight", **checkpoint))
    sections = tiny(tmp_path / "ended", **checkpoint)
    attempt = Attempt(2, sections, crash=Crash(0, 0, "last validation"))
    assert attempt.finish() is None
    assert saved(attempt.run) == [8] and [line["step"] for line in lines(attempt.run / "validation.jsonl")] == [4]
    assert_same(complete(2, sections), reference)
    with pytest.raises(AssertionError, match="refuse_finished"):
        complete(2, sections)


def train_with_a_bad_disk(rank: int, world: int, sections: Any, where: int, fails: list[int]) -> tuple[int, int]:
    """Train with a rank `where` that fails to write its shard of some saves. `fails` counts saves from 1."""
    if rank == where:
        count, real = itertools.count(1), save.write_part

        def write(folder: Path, *part: Any) -> None:
            if next(count) in fails:
                folder.mkdir(parents=True, exist_ok=True)
                save.part_file(folder, rank).write_bytes(b"half")
                raise OSError(errno.EIO, "Input/output error", str(folder))
            real(folder, *part)

        save.write_part = write
    return train(rank, world, sections, None, None)


@pytest.mark.parametrize("where", [0, 1])
def test_saves_that_fail_on_one_rank_are_made_up_for(where: int, tmp_path: Path) -> None:
    """The second of four saves fails, and so does the last. Both are made up for, and the run is undisturbed."""
    sections = tiny(tmp_path / "run", checkpoint={"every": 2, "keep": 0})
    reference = complete(2, tiny(tmp_path / "straight", checkpoint={"every": 2, "keep": 0}))
    assert run_ranks(2, train_with_a_bad_disk, sections, where, [2, 4]) == [(8, 64)] * 2
    run = tmp_path / "run"
    assert saved(run) == [2, 6, 8]
    assert not list((run / "checkpoints").glob(".saving*")), "nothing is left of those that failed"
    assert_same(run, reference)


def test_the_last_save_that_fails_twice_ends_all_ranks(tmp_path: Path) -> None:
    sections = tiny(tmp_path / "run", checkpoint={"every": 0})
    with pytest.raises(AssertionError, match="Input/output error|could not write its part|SystemExit"):
        run_ranks(2, train_with_a_bad_disk, sections, 1, [1, 2])
    assert saved(tmp_path / "run") == []


def train_with_an_old_view(rank: int, world: int, sections: Any, source: str | None) -> tuple[int, int]:
    """Train with a rank 1 that does not see the newest checkpoint in a listing, as can happen on a network disk."""
    if rank == 1:
        real = fmt.list_checkpoints
        fmt.list_checkpoints = lambda folder: real(folder)[:-1]  # type: ignore[assignment]
    return train(rank, world, sections, None, source)


def test_all_ranks_go_on_from_the_same_checkpoint(tmp_path: Path) -> None:
    sections = tiny(tmp_path / "run", checkpoint={"every": 2, "keep": 0})
    run = complete(2, sections)
    longer = sections | {"train": sections["train"] | {"steps": 9}}
    assert run_ranks(2, train_with_an_old_view, longer, None) == [(9, 72)] * 2
    other = tiny(tmp_path / "other", train={"steps": 2})
    assert run_ranks(2, train_with_an_old_view, other, str(run)) == [(2, 16)] * 2


def test_what_a_start_goes_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run continues from its own checkpoints, goes back to one of them, or begins from another run's weights.

    `_candidates` returns [1 if the run continues, 1 if the source is its own checkpoint, the steps to try]. There are
    no steps to try if `source` names the step.
    """
    # The name of this folder looks like step 40 of `run`.
    run, twin = tmp_path / "run", tmp_path / "run@40"
    for folder, found in ((run, (20, 40)), (twin, (7,))):
        for step in found:
            (folder / "checkpoints" / fmt.folder_name(step)).mkdir(parents=True)
    # An imported checkpoint.
    base = run / "checkpoints" / "base"
    base.mkdir()
    (base / fmt.INDEX).write_text("{}")
    ours, fresh = run / "checkpoints", tmp_path / "new" / "checkpoints"
    assert resume._candidates(ours, None) == [1, 0, 40, 20] and resume._candidates(fresh, None) == [1, 0]
    assert resume._candidates(ours, f"{run}@20") == [0, 1] and resume._candidates(ours, str(run)) == [0, 1, 40]
    assert resume._candidates(ours, str(twin)) == [1, 0, 40, 20], "it continues from its own"
    assert resume._candidates(ours, str(base)) == [1, 0, 40, 20] and resume._candidates(fresh, str(base)) == [0, 0]
    assert resume._candidates(fresh, str(run)) == [0, 0, 40] and resume._candidates(fresh, str(twin)) == [0, 0, 7]
    assert resume._resolve_source(str(run), [40]) == ours / fmt.folder_name(40), "not a step of the folder run@40"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    assert resume._candidates(ours, f"{run}@20") == [0, 1], "the first ranks died before they could go back"
    for job, expected in (("b", False), ("a", True)):
        fmt.write_json(ours / resume.ROLLBACK_FILE, {"job": job, "source": f"{run}@10"})
        assert resume._went_back(ours, f"{run}@10") == expected and not resume._went_back(ours, f"{run}@20")
    assert resume._candidates(ours, f"{run}@10") == [1, 0, 40, 20], "@10 was there when the job began"


def test_a_resumed_run_may_be_made_longer_and_go_on_from_an_older_step(tmp_path: Path) -> None:
    """A new run that begins from another run takes only its weights."""
    sections = tiny(tmp_path / "run", lr={"schedule": "constant"}, checkpoint={"every": 2, "keep": 0})
    run = complete(1, sections)
    longer = sections | {"train": sections["train"] | {"steps": 10}}
    complete(1, longer)
    assert steps(run) == list(range(1, 11)) and saved(run) == [2, 4, 6, 8, 10]
    first = tensors(newest(run))
    complete(1, longer, source=f"{run}@4")
    assert steps(run) == list(range(1, 11)) and saved(run) == [2, 4, 6, 8, 10]
    lost = sorted(path.name for path in (run / "checkpoints").glob("lost-*"))
    assert lost == ["lost-step-00000006", "lost-step-00000008", "lost-step-00000010"]
    again = tensors(newest(run))
    assert all(values.tobytes() == again[name].tobytes() for name, values in first.items())

    idle = {"train": {"steps": 1}, "optimizer": {"lr": 1e-30, "weight_decay": 0.0}, "lr": {"warmup": 0}}
    other = tiny(tmp_path / "other", **idle)
    complete(1, other, source=str(run))
    tuned = tensors(newest(tmp_path / "other"))
    for name, values in again.items():
        if name.startswith("param/"):
            assert values.tobytes() == tuned[name].tobytes(), "an idle update keeps the weights"
    assert any((tuned[name] != again[name]).any() for name in again if name.startswith("exp_avg/")), "new moments"
    assert steps(tmp_path / "other") == [1]


def test_a_finished_run_is_refused_but_not_to_ranks_that_are_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may die after the last checkpoint. Restarted ranks then have nothing left to do and end with success."""
    sections = tiny(tmp_path / "run", train={"steps": 2})
    assert train(0, 1, sections, None, None) == (2, 16)
    with pytest.raises(UserError, match="complete at step 2"):
        train(0, 1, sections, None, None)
    fewer = tiny(tmp_path / "run", train={"steps": 1}, lr={"warmup": 0})
    # As if the validation of the last step had not been due.
    (tmp_path / "run" / "validation.jsonl").write_text("")
    with pytest.raises(UserError, match="complete at step 2"):
        train(0, 1, fewer, None, None)
    assert train(0, 1, sections, None, None) == (2, 16), "the last validation is made up for"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train(0, 1, sections, None, None) == (2, 16)
    assert steps(tmp_path / "run") == [1, 2] and saved(tmp_path / "run") == [1, 2]
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    (newest(tmp_path / "run") / "index.json").write_text("{")
    assert train(0, 1, sections, None, None) == (2, 16), "a damaged last one does not count"
    assert steps(tmp_path / "run") == [1, 2] and saved(tmp_path / "run") == [1, 2]


def test_weights_are_not_read_as_another_model_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run can't continue with other heads, positions or activations, whose weights have the same shapes.

    A new run may use such weights on purpose.
    """
    rope = {"model": {"position": "rope", "heads": 2}}
    run = tmp_path / "a"
    train(0, 1, tiny(run, train={"steps": 2}, **rope), None, None)
    capsys.readouterr()
    other = {"position": "rope", "heads": 4, "rope_theta": 5e5, "mlp": "relu"}
    with pytest.raises(UserError, match=r"model\.heads \(there 2, here 4\).*mlp.*rope_theta.*--from"):
        train(0, 1, tiny(run, train={"steps": 4}, model=other), None, None)
    with pytest.raises(UserError, match=r"model\.ffn .*begin a new run in another run.dir$"):
        train(0, 1, tiny(run, train={"steps": 4}, model=rope["model"] | {"ffn": 8}), None, None)
    assert saved(run) == [1, 2]
    train(0, 1, tiny(tmp_path / "b", train={"steps": 2}, model=other), None, str(run))
    assert "trained with other settings: model.heads" in capsys.readouterr().err
    idle = {"dropout": 0.0, "init_std": 1.0, "qkv_bias": True}
    train(0, 1, tiny(run, train={"steps": 3}, model=rope["model"] | idle), None, None)
    assert "warning" not in capsys.readouterr().err


def test_a_mixture_may_be_balanced_in_another_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A resumed run may change the losses that balance its experts, but not the way tokens choose experts."""
    experts = {"count": 4, "router": "sigmoid", "aux_loss": 0.01}
    run = tmp_path / "run"
    train(0, 1, tiny(run, train={"steps": 2}, model={"experts": experts}), None, None)
    with pytest.raises(UserError, match=r"computes something else: model\.experts\.top_k \(there 2, here 1\); set"):
        train(0, 1, tiny(run, train={"steps": 3}, model={"experts": experts | {"top_k": 1}}), None, None)
    capsys.readouterr()
    other = experts | {"aux_loss": 0.1, "z_loss": 0.1, "bias_balance": 0.01}
    train(0, 1, tiny(run, train={"steps": 3}, model={"experts": other}), None, None)
    assert "warning" not in capsys.readouterr().err and saved(run) == [2, 3]


def test_other_samples_under_the_same_numbers_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, model = tmp_path / "a", {"position": "rope"}
    train(0, 1, tiny(run, train={"steps": 2}, model=model), None, None)
    capsys.readouterr()
    train(0, 1, tiny(run, train={"steps": 3, "seed": 7}, model=model | {"seq": 12}), None, None)
    stderr = capsys.readouterr().err
    assert "may see some again: model.seq (there 8, here 12), train.seed (there " in stderr


@pytest.mark.parametrize("every", [0, 2])
def test_what_was_trained_is_saved_before_a_validation_that_fails(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint is committed if it is still being written when the validation of its step fails.

    Without periodic checkpoints, the last state is saved before the validation.
    """
    real = save.write_part

    def slow(*part: Any) -> None:
        time.sleep(1.0)
        real(*part)

    def fail(trainer: Any) -> None:
        raise UserError("the validation data are bad")

    monkeypatch.setattr(save, "write_part", slow)
    monkeypatch.setattr("meshwright.engine.step.Trainer.validate", fail)
    changes = {"checkpoint": {"every": every}, "run": {"eval_every": every}, "train": {"steps": 3}}
    with pytest.raises(UserError, match="validation data are bad"):
        train(0, 1, tiny(tmp_path / "run", **changes), None, None)
    assert saved(tmp_path / "run") == [every or 3]


def test_a_run_goes_on_when_what_it_was_begun_from_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, tuned = tmp_path / "first", tmp_path / "tuned"
    train(0, 1, tiny(first, train={"steps": 2}), None, None)
    train(0, 1, tiny(tuned, train={"steps": 2}), None, f"{first}@1")
    shutil.rmtree(first)
    capsys.readouterr()
    assert train(0, 1, tiny(tuned, train={"steps": 3}), None, f"{first}@1") == (3, 24)
    assert f"warning: {tuned}/checkpoints holds checkpoints: the run continues from step 2" in capsys.readouterr().err
    with pytest.raises(UserError, match="there is no folder"):
        train(0, 1, tiny(tmp_path / "other", train={"steps": 3}), None, f"{first}@1")


def test_a_job_that_goes_back_does_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarted ranks go back as `--from` asks, unless ranks of the same job have done so before them."""
    changes = {"checkpoint": {"every": 1, "keep": 0}, "lr": {"warmup": 0}}
    run = tmp_path / "run"
    train(0, 1, tiny(run, train={"steps": 4}, **changes), None, None)
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    train(0, 1, tiny(run, train={"steps": 3}, **changes), None, f"{run}@2")
    assert (run / "checkpoints" / "lost-step-00000004").is_dir() and saved(run) == [1, 2, 3]
    train(0, 1, tiny(run, train={"steps": 5}, **changes), None, f"{run}@2")
    assert saved(run) == [1, 2, 3, 4, 5] and not (run / "checkpoints" / "lost-step-00000003-2").exists()
    # Given by hand, the same command goes back once more.
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    train(0, 1, tiny(run, train={"steps": 3}, **changes), None, f"{run}@2")
    assert saved(run) == [1, 2, 3] and (run / "checkpoints" / "lost-step-00000005").is_dir()
    with pytest.raises(UserError, match="was set aside"):
        train(0, 1, tiny(run, train={"steps": 9}, **changes), None, str(run / "checkpoints" / "lost-step-00000004"))
    with pytest.raises(UserError, match="leave @7 out"):
        train(0, 1, tiny(run, train={"steps": 9}, **changes), None, str(run / "checkpoints" / "step-00000003@7"))


def test_another_optimizer_s_moments_begin_anew(tmp_path: Path) -> None:
    from meshwright.checkpoint.load import Reader
    from tests.support.oracle import load_into, make_trainer, small_config

    run = tmp_path / "run"
    train(0, 1, tiny(run, train={"steps": 3}, optimizer={"name": "sgd"}), None, None)
    trainer = make_trainer(small_config(**tiny(tmp_path / "other")))
    load_into(trainer, Reader(newest(run)))
    assert trainer.step_number == 3 and trainer.optimizer.updates == 0
