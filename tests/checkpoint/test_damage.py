"""Damaged checkpoints are detected, named, and replaced by the one before; and no file is ever executed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.resume import resume
from meshwright.checkpoint.save import Saver
from meshwright.cli.main import main
from meshwright.engine.step import Trainer
from meshwright.errors import UserError
from meshwright.record import checkpoint_format as fmt
from meshwright.record.verify import verify_checkpoint
from tests.support.oracle import make_trainer, small_config

PART = "rank-00000.safetensors"


def config_of(run: Path) -> Any:
    return small_config(
        model={"layers": 1, "hidden": 16, "heads": 2, "vocab": 31, "seq": 8},
        train={"precision": "fp32", "global_batch": 4, "steps": 50},
        run={"dir": str(run)},
    )


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run with checkpoints of steps 1 and 2, once for all tests."""
    run = tmp_path_factory.mktemp("original")
    trainer = make_trainer(config_of(run))
    saver = Saver(trainer, run / "checkpoints", asynchronous=False, busy="wait", keep=0)
    for _ in range(2):
        trainer.step()
        saver.save()
    return run


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original / "checkpoints", tmp_path / "run" / "checkpoints")
    return tmp_path / "run"


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(bytes(data))


def header_size(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def sealed(folder: Path, **changes: Any) -> None:
    """Change values of the index and give it a correct checksum, as another program might write it."""
    value = json.loads((folder / fmt.INDEX).read_text()) | changes
    value.pop("crc32")
    head = json.dumps(value).encode()[:-1]
    (folder / fmt.INDEX).write_bytes(head + fmt.SEAL + f"{zlib.crc32(head)}}}".encode())


def _number(folder: Path, key: str) -> int:
    """Return the offset of the value of `key` in the index file."""
    return (folder / fmt.INDEX).read_bytes().index(f'"{key}": '.encode()) + len(key) + 4


# By name: the damage to a checkpoint's folder, the file that the message must name, and some of its words.
DAMAGE: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "a part is truncated": (lambda f: os.truncate(f / PART, 1000), PART, "1000 bytes where"),
    "a part is empty": (lambda f: os.truncate(f / PART, 0), PART, "0 bytes where"),
    "a part is missing": (lambda f: (f / PART).unlink(), PART, "missing"),
    "a bit in the middle of a block": (lambda f: flip(f / PART, header_size(f / PART) + 999), PART, "wrong checksum"),
    "the last bit": (lambda f: flip(f / PART, -1, 7), PART, "wrong checksum"),
    "a bit in the header": (lambda f: flip(f / PART, 30), PART, "use another"),
    "a bit in the header's length": (lambda f: flip(f / PART, 1), PART, "use another"),
    "the header is gone": (lambda f: (f / PART).write_bytes(bytes((f / PART).stat().st_size)), PART, "use another"),
    "a digit of the index": (lambda f: flip(f / fmt.INDEX, _number(f, "consumed")), fmt.INDEX, "wrong checksum"),
    "a digit of the step": (lambda f: flip(f / fmt.INDEX, _number(f, "step")), fmt.INDEX, "wrong checksum"),
    "a bracket of the index": (lambda f: flip(f / fmt.INDEX, 0), fmt.INDEX, "can't be read"),
    "the index is truncated": (lambda f: os.truncate(f / fmt.INDEX, 500), fmt.INDEX, "can't be read"),
    "the index is empty": (lambda f: os.truncate(f / fmt.INDEX, 0), fmt.INDEX, "can't be read"),
    "the index is missing": (lambda f: (f / fmt.INDEX).unlink(), fmt.INDEX, "missing"),
    "the index is not text": (lambda f: (f / fmt.INDEX).write_bytes(os.urandom(300)), fmt.INDEX, "index"),
    "another format": (lambda f: (f / fmt.INDEX).write_text('{"format": "other"}'), fmt.INDEX, "not the index"),
    "a list": (lambda f: (f / fmt.INDEX).write_text("[]"), fmt.INDEX, "not the index"),
    "a later version": (lambda f: sealed(f, version=2), fmt.INDEX, "version 2, and this program reads version 1"),
    "an index without blocks": (lambda f: sealed(f, blocks=None), fmt.INDEX, "blocks must be a list"),
    "a tensor without blocks": (lambda f: sealed(f, blocks=[]), "step-00000002", "lacks a part of param/"),
    "a file elsewhere": (lambda f: sealed(f, files={"../x": 1}), fmt.INDEX, "not the checkpoint's"),
}  # fmt: skip


def trained(run: Path) -> Trainer:
    return make_trainer(config_of(run))


@pytest.mark.parametrize("name", DAMAGE)
def test_the_one_before_is_used(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, file, word = DAMAGE[name]
    damage(run / "checkpoints" / "step-00000002")
    trainer = trained(run)
    resume(trainer, None)
    warning, last = capsys.readouterr().err.strip().splitlines()
    assert warning.startswith("meshwright: warning: ") and warning.endswith("step-00000001")
    assert last == f"continues {run} from step 1 of 50, checkpoint verified"
    assert file in warning and "step-00000002" in warning and word in warning
    assert (trainer.step_number, trainer.consumed) == (1, 4)
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["lost-step-00000002", "step-00000001"], "the damaged one is kept, out of the way of the next save"
    trainer.step()
    Saver(trainer, run / "checkpoints", asynchronous=False, busy="wait", keep=0).save()
    again = trained(run)
    resume(again, None)
    assert again.step_number == 2 and "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a bit in the middle of a block", "the index is missing", "a later version"])
def test_a_clear_error_if_none_is_left(name: str, run: Path) -> None:
    damage, file, word = DAMAGE[name]
    for step in (1, 2):
        damage(run / "checkpoints" / fmt.folder_name(step))
    with pytest.raises(UserError, match="holds no checkpoint that can be used") as caught:
        resume(trained(run), None)
    assert file in str(caught.value) and word in str(caught.value) and "\n" not in str(caught.value)


def test_a_checkpoint_that_is_named_is_not_replaced_by_another(run: Path) -> None:
    flip(run / "checkpoints" / "step-00000002" / PART, -1)
    with pytest.raises(UserError, match="wrong checksum"):
        resume(trained(run), f"{run}@2")
    assert len(fmt.list_checkpoints(run / "checkpoints")) == 2


@pytest.mark.parametrize("name", DAMAGE)
def test_inspect_names_the_file(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, file, word = DAMAGE[name]
    path = run / "checkpoints" / "step-00000002"
    damage(path)
    assert main(["inspect", str(run)]) == 2
    captured = capsys.readouterr()
    (error,) = captured.err.strip().splitlines()
    assert error.startswith("meshwright: ") and file in error and captured.out == ""


def test_flipped_bits_are_found_all_over_the_files(original: Path, tmp_path: Path) -> None:
    """Both the verifier and a reader of all blocks detect one flipped bit, in each of some hundreds of bytes."""
    source = original / "checkpoints" / "step-00000002"
    folder = tmp_path / "step-00000002"
    shutil.copytree(source, folder)
    whole = Reader(folder)
    values = {block.key: whole.block(block).clone() for block in whole.index.blocks}
    for name in (fmt.INDEX, PART):
        size, head = (folder / name).stat().st_size, header_size(folder / name) if name == PART else 0
        places = [*range(0, head, 61), *range(head, size, max(1, (size - head) // 60))]
        for at in places:
            flip(folder / name, at, at % 8)
            with pytest.raises(fmt.DamagedCheckpoint):
                verify_checkpoint(folder, fmt.read_index(folder))
            with pytest.raises(fmt.DamagedCheckpoint):
                reader = Reader(folder)
                for block in reader.index.blocks:
                    assert reader.block(block).equal(values[block.key])
            shutil.copy(source / name, folder / name)
    verify_checkpoint(folder, fmt.read_index(folder))


class Malicious:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.marker),))


@pytest.mark.parametrize("place", ["beside", "a part", "a part of the right size", "the index", "the folder of a save"])
def test_a_pickle_is_never_executed(place: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marker = run / "executed"
    data = pickle.dumps(Malicious(marker))
    pickle.loads(data)
    # Without this check, the test would also pass with a pickle that does nothing.
    assert marker.exists(), "unpickling runs its code"
    marker.rmdir()
    folder = run / "checkpoints" / "step-00000002"
    size = (folder / PART).stat().st_size
    if place == "beside":
        for name in ("evil.pt", ".metadata", "index.pkl", "rank-00001.safetensors", "rank-00000.json", "state.bin"):
            (folder / name).write_bytes(data)
            (run / "checkpoints" / name).write_bytes(data)
    elif place == "the index":
        (folder / fmt.INDEX).write_bytes(data)
    elif place == "the folder of a save":
        (run / "checkpoints" / fmt.saving_name(3)).mkdir()
        (run / "checkpoints" / fmt.saving_name(3) / "rank-00000.json").write_bytes(data)
    else:
        (folder / PART).write_bytes(data.ljust(size, b"\0") if "size" in place else data)
    good = place in ("beside", "the folder of a save")
    assert main(["inspect", str(run)]) == (0 if good else 2)
    trainer = trained(run)
    resume(trainer, None)
    assert trainer.step_number == (2 if good else 1)
    trainer.step()
    Saver(trainer, run / "checkpoints", asynchronous=False, busy="wait", keep=0).save()
    assert not marker.exists()
