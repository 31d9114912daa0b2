"""Tests of saving and loading, mostly in one process.

A checkpoint holds the state at the time of the call, in any precision. Only one save runs at a time.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import meshwright.checkpoint.save as save
from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.resume import resume
from meshwright.checkpoint.save import Saver
from meshwright.engine.sharding.remainders import as_tensor, tensors_of
from meshwright.engine.step import Trainer
from meshwright.errors import UserError
from meshwright.record import checkpoint_format as fmt
from meshwright.record import ending
from tests.checkpoint.runs import tensors
from tests.support.oracle import load_into, make_trainer, small_config
from tests.support.ranks import run_ranks

TINY = {"layers": 1, "hidden": 16, "heads": 2, "vocab": 31, "seq": 8}


def trainer_of(precision: str = "fp32", **more: Any) -> Trainer:
    config = small_config(model=TINY, train={"precision": precision, "global_batch": 4, "steps": 50}, **more)
    return make_trainer(config)


def saver_of(trainer: Trainer, folder: Path, asynchronous: bool = True, busy: str = "wait", keep: int = 0) -> Saver:
    return Saver(trainer, folder, asynchronous, busy, keep)


def state_of(trainer: Trainer) -> dict[str, np.ndarray]:
    """Return a copy of all tensors that a checkpoint must hold."""
    out = {}
    for state in trainer.states():
        for slot in state.buffer.slots:
            local = as_tensor(state.values(slot, 0, slot.record.numel)).view(slot.record.local_shape)
            out[f"{state.name}/{slot.record.name}"] = local.detach().clone().numpy()
    return out


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and a[n].tobytes() == b[n].tobytes() for n in a)


class Gate:
    """A gate that stops every writer before its first file until it is opened.

    `reached` is set once a writer is there. `most` is the highest number of writers at the same time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        self.inside = self.most = 0
        real = save.write_part

        def held(folder: Path, rank: int, snapshot: Any) -> None:
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.reached.set()
            assert self.open.wait(60)
            real(folder, rank, snapshot)
            self.inside -= 1

        monkeypatch.setattr(save, "write_part", held)


def test_the_contents_are_those_of_the_call_while_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    trainer = trainer_of()
    trainer.step()
    expected, consumed = state_of(trainer), trainer.consumed
    saver = saver_of(trainer, tmp_path)
    assert saver.save()
    for _ in range(3):
        trainer.step()
    assert fmt.list_checkpoints(tmp_path) == [], "no checkpoint exists before all is written"
    gate.open.set()
    saver.wait_for_commit()
    ((step, path),) = fmt.list_checkpoints(tmp_path)
    index = fmt.read_index(path)
    assert (step, index.step, index.consumed, index.state["updates"]) == (1, 1, consumed, 1)
    assert same(tensors(path), expected) and not same(tensors(path), state_of(trainer))


def test_only_the_next_update_waits_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the copy is blocked, `save` returns and the next step computes its gradients, but changes no state."""
    copying, computed, go = threading.Event(), threading.Event(), threading.Event()
    real_copy = save.Snapshot.copy_to_host

    def held(snapshot: Any, staging: dict[int, torch.Tensor], everything: bool) -> None:
        copying.set()
        assert go.wait(60)
        real_copy(snapshot, staging, everything)

    monkeypatch.setattr(save.Snapshot, "copy_to_host", held)
    trainer = trainer_of()
    trainer.step()
    expected, real_gradients = state_of(trainer), trainer.gradients

    def gradients() -> Any:
        found = real_gradients()
        computed.set()
        return found

    monkeypatch.setattr(trainer, "gradients", gradients)
    saver = saver_of(trainer, tmp_path)
    assert saver.save() and copying.wait(60)
    step = threading.Thread(target=trainer.step, daemon=True)
    step.start()
    assert computed.wait(60), "gradients are computed while the copy is in progress"
    step.join(0.3)
    assert step.is_alive() and same(state_of(trainer), expected), "the update waits"
    go.set()
    step.join(60)
    saver.wait_for_commit()
    ((_, path),) = fmt.list_checkpoints(tmp_path)
    assert same(tensors(path), expected) and not same(state_of(trainer), expected)


def test_loading_needs_no_more_than_a_few_blocks_beside_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading a tensor of 67 MB in blocks of 4 MB never takes 20 MB or more in addition to the state."""
    monkeypatch.setattr(fmt, "BLOCK_BYTES", 4 * 2**20)
    config = small_config(
        model={"layers": 1, "hidden": 256, "heads": 4, "vocab": 65536, "seq": 8},
        train={"precision": "fp32", "global_batch": 4},
    )
    trainer = make_trainer(config)
    saver = saver_of(trainer, tmp_path, asynchronous=False)
    saver.save()
    saver.wait_for_commit()
    ((_, path),) = fmt.list_checkpoints(tmp_path)
    for tensor in (half for state in trainer.states() for share in state.tensors for half in tensors_of(share)):
        # Touch all of its memory, so that the operating system does not allocate it during the load.
        tensor.fill_(0.5)
    seen, real = [], Reader.block

    def noted(reader: Reader, block: fmt.SavedBlock) -> torch.Tensor:
        seen.append(private_bytes())
        return real(reader, block)

    monkeypatch.setattr(Reader, "block", noted)
    before = private_bytes()
    load_into(trainer, Reader(path))
    seen.append(private_bytes())
    assert len(seen) > 40 and max(seen) - before < 20e6
    assert float(trainer.modules[0].embedding.tokens.weight.detach().std()) > 1e-3, "it was loaded"


def private_bytes() -> int:
    """Return the resident memory of this process without mapped files, in bytes."""
    (kilobytes,) = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(kilobytes)


def test_a_save_waits_for_the_one_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    trainer = trainer_of()
    saver = saver_of(trainer, tmp_path, busy="wait")
    states = []
    trainer.step()
    states.append(state_of(trainer))
    saver.save()
    assert gate.reached.wait(60)
    trainer.step()
    states.append(state_of(trainer))
    threading.Timer(0.2, gate.open.set).start()
    saver.save()
    assert [step for step, _ in fmt.list_checkpoints(tmp_path)] == [1], "the first save ends before the second begins"
    saver.wait_for_commit()
    assert gate.most == 1
    checkpoints = fmt.list_checkpoints(tmp_path)
    assert all(same(tensors(path), state) for (_, path), state in zip(checkpoints, states, strict=True))


def test_a_save_is_skipped_while_one_is_under_way_but_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    trainer = trainer_of()
    saver = saver_of(trainer, tmp_path, busy="skip")
    trainer.step()
    assert saver.save() and gate.reached.wait(60)
    trainer.step()
    assert not saver.save()
    trainer.step()
    threading.Timer(0.2, gate.open.set).start()
    assert saver.save(last=True)
    saver.wait_for_commit()
    assert [step for step, _ in fmt.list_checkpoints(tmp_path)] == [1, 3], "2 was skipped, the last state is saved"
    assert gate.most == 1
    trainer.step()
    assert saver.save(), "no save is in progress any longer"
    saver.wait_for_commit()


@pytest.mark.parametrize(("keep", "left"), [(0, [1, 2, 3, 4]), (1, [4]), (3, [2, 3, 4])])
def test_keep(keep: int, left: list[int], tmp_path: Path) -> None:
    trainer = trainer_of()
    saver = saver_of(trainer, tmp_path, keep=keep)
    for _ in range(4):
        trainer.step()
        saver.save()
    saver.wait_for_commit()
    assert [step for step, _ in fmt.list_checkpoints(tmp_path)] == left
    assert sorted(path.name for path in tmp_path.iterdir()) == [fmt.folder_name(step) for step in left]


class Disk:
    """A disk on which the next `fails` writes fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails, real = 0, save.write_part

        def write(folder: Path, rank: int, snapshot: Any) -> None:
            real(folder, rank, snapshot)
            if self.fails:
                self.fails -= 1
                raise OSError(errno.EIO, "Input/output error", str(folder / "rank-00000.safetensors"))

        monkeypatch.setattr(save, "write_part", write)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_save_that_fails_once_is_told_and_made_up_for(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk, trainer = Disk(monkeypatch), trainer_of()
    saver = saver_of(trainer, tmp_path, asynchronous)
    for step in range(1, 4):
        trainer.step()
        disk.fails = step == 1
        saver.save()
        saver.wait()
    stderr = capsys.readouterr().err
    assert stderr.startswith("meshwright: warning: the checkpoint can't be written to ") and stderr.count("\n") == 1
    assert stderr.endswith("; it is tried once more with the next one\n")
    assert [step for step, _ in fmt.list_checkpoints(tmp_path)] == [2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == [fmt.folder_name(step) for step in (2, 3)], "no more"


def test_a_save_under_way_may_end_before_the_watchdog_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "_last_acts", [])
    written: list[str] = []
    never = threading.Event()
    saver = Saver(SimpleNamespace(), tmp_path, True, "wait", 0)  # type: ignore[arg-type]
    with saver:
        # No save is in progress yet.
        ending.act_before_end()
        saver._thread = threading.Timer(0.3, lambda: written.append("part"))
        saver._thread.start()
        ending.act_before_end()
        assert written == ["part"]
        monkeypatch.setattr(save, "SUDDEN_END_S", 0.05)
        saver._thread = threading.Thread(target=never.wait, daemon=True)
        saver._thread.start()
        ending.act_before_end()
        assert saver.is_writing, "a disk that does not answer is not waited for"
    never.set()
    assert ending._last_acts == []


def test_two_failures_in_a_row_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, trainer = Disk(monkeypatch), trainer_of()
    saver = saver_of(trainer, tmp_path)
    disk.fails = 2
    saver.save()
    saver.save()
    with pytest.raises(UserError, match="can't be written to .*Input/output error"):
        saver.wait()


def test_the_last_save_is_made_again_if_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk, trainer = Disk(monkeypatch), trainer_of()
    saver = saver_of(trainer, tmp_path)
    disk.fails = 1
    saver.save(last=True)
    saver.wait_for_commit()
    stderr = capsys.readouterr().err
    assert "choose another checkpoint.dir; it is tried once more now\n" in stderr and "next" not in stderr
    assert same(tensors(fmt.list_checkpoints(tmp_path)[-1][1]), state_of(trainer))


def test_a_part_that_cannot_be_written_is_not_waited_for(tmp_path: Path) -> None:
    save.part_file(tmp_path, 1).with_suffix(save.FAILED).touch()
    with pytest.raises(UserError, match="rank-00001 could not write its part"):
        save.wait_for([tmp_path / "rank-00001.json"], 60.0)


class Clock:
    """A clock that only `sleep` advances. Each file appears in the folder at its given time."""

    def __init__(self, folder: Path, **appear: float) -> None:
        self.now, self.pauses, self.folder = 0.0, list[float](), folder
        self.appear = {f"{name.replace('_', '-')}.json": at for name, at in appear.items()}

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds
        for name, at in self.appear.items():
            if at <= self.now:
                (self.folder / name).touch()

    def wait(self, patience: float) -> None:
        save.wait_for([self.folder / name for name in self.appear], patience, lambda: self.now, self.sleep)


def test_patience_counts_from_the_last_part_that_appeared(tmp_path: Path) -> None:
    """Waiting for all files takes three times the patience, and the first file of the list appears last."""
    clock = Clock(tmp_path, rank_0=290.0, rank_1=95.0, rank_2=190.0)
    clock.wait(100.0)
    assert 290.0 <= clock.now < 292.0
    assert max(clock.pauses) == save.LONGEST_POLL_S and len(clock.pauses) < 330, "it looks about once a second"


def test_parts_that_do_not_come_are_named(tmp_path: Path) -> None:
    clock = Clock(tmp_path, rank_0=50.0, rank_1=1e9, rank_2=1e9)
    with pytest.raises(UserError, match="appeared within 100 s: .* lacks rank-1.json, rank-2.json; see whether"):
        clock.wait(100.0)
    assert 150.0 <= clock.now < 153.0


def slow_commit(rank: int, world: int, folder: str) -> tuple[list[str], bool]:
    """Save on two ranks. Rank 0 commits only after rank 1 has finished three agreements on whether to keep waiting.

    Return the files that this rank looked for on the disk, and whether the checkpoint is complete.
    """
    looked, go = list[str](), Path(folder) / "go"
    commit, wait_for, any_rank = save.commit, save.wait_for, Saver._any
    calls = [0]

    def late(*given: Any, **named: Any) -> None:
        while not go.exists():
            time.sleep(0.01)
        commit(*given, **named)

    def looks(paths: list[Path], *given: Any) -> None:
        looked.extend(path.name for path in paths)
        wait_for(paths, *given)

    def agrees(saver: Saver, here: bool) -> bool:
        found = any_rank(saver, here)
        calls[0] += 1
        if rank == 1 and calls[0] == 3:
            go.touch()
        return found

    save.commit, save.wait_for = late, looks
    Saver._any = agrees  # type: ignore[method-assign]
    trainer = make_trainer(small_config(model=TINY, train={"global_batch": 4}), rank, world)
    saver = Saver(trainer, Path(folder), True, "wait", 2)
    trainer.step()
    saver.save(last=True)
    saver.wait_for_commit()
    return looked, len(fmt.list_checkpoints(Path(folder))) == 1


def test_at_the_end_of_a_run_only_the_rank_that_commits_looks_at_the_disk(tmp_path: Path) -> None:
    """The other rank waits as long as it takes, in several short collective calls: one long call would look hung."""
    first, other = run_ranks(2, slow_commit, str(tmp_path))
    assert first == (["rank-00000.json", "rank-00001.json"], True) and other == ([], True)


def test_a_folder_that_cannot_be_flushed_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", fsync)
    saved(trainer_of(), tmp_path)


def test_what_a_killed_save_left_is_removed(tmp_path: Path) -> None:
    for name in (".saving-step-00000003", ".old-step-00000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.safetensors").write_bytes(b"half")
    fmt.remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == []


def saved(trainer: Trainer, folder: Path) -> Path:
    saver = saver_of(trainer, folder, asynchronous=False)
    saver.save()
    return fmt.list_checkpoints(folder)[-1][1]


@pytest.mark.parametrize("to", ["fp32", "bf16", "fp16", "fp64"])
@pytest.mark.parametrize("of", ["fp32", "bf16", "fp16", "fp64"])
def test_any_precision_loads_into_any(of: str, to: str, tmp_path: Path) -> None:
    """Master weights and moments have at least float32, so only a load from fp64 into a smaller precision rounds."""
    source, target = trainer_of(of), trainer_of(to)
    source.step()
    path = saved(source, tmp_path)
    expected = state_of(source)
    load_into(target, Reader(path))
    found = state_of(target)
    for name, values in expected.items():
        assert (found[name] == values.astype(found[name].dtype)).all(), name
    for buffer in target.data_parallel.buffers:
        for slot in buffer.slots:
            master = torch.from_numpy(found[f"param/{slot.record.name}"])
            assert torch.equal(slot.parameter.detach(), master.to(slot.parameter.dtype)), "the weights are loaded too"
    assert (target.step_number, target.consumed, target.optimizer.updates) == (1, 4, source.optimizer.updates)
    assert target.step().loss == pytest.approx(source.step().loss, rel=0.02)


def test_the_loss_scale_is_part_of_it(tmp_path: Path) -> None:
    scaling = {"initial": 2.0**26, "window": 2}
    source = trainer_of("fp16", loss_scale=scaling)
    skipped = [source.step().skipped for _ in range(10)]
    assert any(skipped) and not all(skipped)
    path = saved(source, tmp_path)
    target = trainer_of("fp16", loss_scale=scaling)
    load_into(target, Reader(path))
    assert target.counters() == source.counters() and target.counters()["updates"] < 10
    assert [target.step().line()["loss_scale"] for _ in range(4)] == [source.step().loss_scale for _ in range(4)]
    plain = trainer_of("fp32")
    load_into(plain, Reader(path))
    assert plain.loss_scale.value == 1.0
    again = saved(plain, tmp_path / "plain")
    fresh = trainer_of("fp16", loss_scale=scaling)
    load_into(fresh, Reader(again))
    assert fresh.loss_scale.value == 2.0**26, "a run in another precision saves no loss scale"


def test_weights_alone(tmp_path: Path) -> None:
    source, target = trainer_of(), trainer_of()
    for _ in range(2):
        source.step()
    target.step()
    load_into(target, Reader(saved(source, tmp_path)), model_only=True)
    found, expected = state_of(target), state_of(source)
    assert all((found[n] == expected[n]).all() for n in found if n.startswith("param/"))
    assert all((found[n] == 0).all() for n in found if not n.startswith("param/"))


def test_imported_weights_in_the_run_s_own_folder_begin_a_run(tmp_path: Path) -> None:
    source = trainer_of()
    source.step()
    path = saved(source, tmp_path / "checkpoints")
    index = fmt.read_index(path)
    # `meshwright import` writes an empty state.
    index.state = {}
    fmt.write_index(path, index)
    target = trainer_of(run={"dir": str(tmp_path)})
    resume(target, str(path.rename(path.with_name("base"))))
    found, expected = state_of(target), state_of(source)
    assert all((found[n] == expected[n]).all() for n in found if n.startswith("param/"))
    assert (target.step_number, target.optimizer.updates) == (0, 0)


def test_optimizers_without_moments(tmp_path: Path) -> None:
    plain = trainer_of(optimizer={"name": "sgd"})
    plain.step()
    path = saved(plain, tmp_path)
    assert {name.split("/")[0] for name in Reader(path).index.tensors} == {"param"}
    adam = trainer_of()
    adam.step()
    load_into(adam, Reader(path))
    assert all((v == 0).all() for n, v in state_of(adam).items() if not n.startswith("param/"))


def test_another_model_is_refused(tmp_path: Path) -> None:
    path = saved(trainer_of(), tmp_path)
    wider = make_trainer(small_config(model=TINY | {"hidden": 32}))
    with pytest.raises(UserError, match="check the model section"):
        load_into(wider, Reader(path))
    deeper = make_trainer(small_config(model=TINY | {"layers": 2}))
    with pytest.raises(UserError, match="of another model"):
        load_into(deeper, Reader(path))
    untied = make_trainer(small_config(model=TINY | {"tied_embeddings": False}))
    larger = saved(untied, tmp_path / "untied")
    with pytest.raises(UserError, match=r"holds head\.weight, for which this config's model has no place"):
        resume(trainer_of(run={"dir": str(tmp_path / "run")}), str(larger))


def test_large_tensors_are_cut_into_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fmt, "BLOCK_BYTES", 256)
    trainer = trainer_of()
    path = saved(trainer, tmp_path)
    index = fmt.read_index(path)
    assert len(index.blocks) > 3 * len(index.tensors)
    assert all(4 * np.prod(block.shape) <= 256 or block.shape[0] == 1 for block in index.blocks if block.shape)
    assert same(tensors(path), state_of(trainer))
