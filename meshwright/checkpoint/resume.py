"""Where a run begins: at step 0, at its newest good checkpoint, or from another run's weights."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from meshwright.checkpoint.base import check_digest
from meshwright.checkpoint.contract import Checkpointed
from meshwright.checkpoint.load import Reader, complete_load, read_into
from meshwright.checkpoint.memory_copy import Keepers, MemoryReader, newest_whole
from meshwright.comm.group import CommError
from meshwright.config.load import flat, to_mapping
from meshwright.config.sections import TRAINING_KEYS
from meshwright.disk import refused
from meshwright.errors import UserError, notice
from meshwright.outside import read_json
from meshwright.record import checkpoint_format as fmt
from meshwright.record.checkpoint_format import find_checkpoint
from meshwright.record.companions import check_tokenizer

WENT_BACK = "went-back.json"  # notes, beside the checkpoints, that a job was told to restart from an older one
# The keys that decide which tokens the sample of a given number holds.
# Keys of a model with which its parameters change their shapes.
SHAPING = ("kind", "layers", "hidden", "ffn", "experts.count", "experts.ffn")
SAMPLES = (
    "data.prefixes", "data.weights", "data.split", "data.draw_split", "data.objective", "data.masked.share",
    "data.masked.ngrams", "data.masked.whole_words", "data.masked.specials", "data.spans.share", "data.spans.mean",
    "data.spans.sentinel", "data.blanks.short", "data.blanks.share", "data.blanks.mean", "data.blanks.least",
    "data.blanks.specials", "data.blanks.instructions", "data.blanks.instruction_share", "model.seq", "train.seed",
)  # fmt: skip


def resume(trainer: Checkpointed, source: str | None) -> str:
    """Loads what this run continues from, and returns where that was: `disk` or `memory`. Every rank calls it, and all
    load the same checkpoint or none.

    A damaged checkpoint is passed over, with a warning, for the one before it. A run that was begun from another
    one's weights continues from its own checkpoints when it is started again; so do ranks after one of them died.
    """
    folder = fmt.checkpoint_folder(trainer.ctx.config)
    if trainer.writes:
        fmt.remove_unfinished(folder)
        if not fmt.was_restarted():
            with suppress(OSError):
                (folder / WENT_BACK).unlink()
    begun, own, kept, steps = _chosen(trainer, folder, source)
    from_memory = kept > 0 and _from_memory(trainer, kept, bool(steps))
    if begun and not from_memory:
        _newest(trainer, folder, steps)
    elif source is not None and not begun:
        damage = _attempt(trainer, lambda: Reader(_named(source, steps)), model_only=not own)
        if damage is not None:
            raise damage
    if trainer.writes:
        _say_where(trainer, source, begun or own, from_memory)
        try:
            fmt.set_aside(folder, trainer.step_number)
            if own:
                fmt.write_json(folder / WENT_BACK, {"job": fmt.job_name(), "source": source})
        except OSError as error:
            raise refused(f"{folder} can't be written", error, folder, "another checkpoint.dir") from None
    return "memory" if from_memory else "disk"


def has_checkpoint(trainer: Checkpointed) -> bool:
    """Whether the run has a checkpoint, as the rank that writes sees it, on every rank."""
    ctx = trainer.ctx
    here = trainer.writes and bool(fmt.list_checkpoints(fmt.checkpoint_folder(ctx.config)))
    return bool(ctx.mesh.world.agreed(float(here), ctx.device.torch))


def _say_where(trainer: Checkpointed, source: str | None, continues: bool, from_memory: bool) -> None:
    """All that was read was checked against its checksums."""
    config, step = trainer.ctx.config, trainer.step_number
    if continues and step:
        what = "copy in memory" if from_memory else "checkpoint"
        on = f" on {world} ranks" if (world := trainer.ctx.layout.world) > 1 else ""
        notice(f"continues {config.run.dir} from step {step} of {config.train.steps}{on}, {what} verified")
    elif source is not None and not continues:
        notice(f"begins {config.run.dir} with the weights of {source}, checkpoint verified")


def _from_memory(trainer: Checkpointed, step: int, or_disk: bool) -> bool:
    """Loads the copy of a step that keepers hold; False, with a warning, if it can't be used. Where there is none on
    disk either, the ranks must start anew: this one's state may be half of the copy's."""
    keepers = Keepers.known()

    def located() -> Reader:
        if keepers is None:
            raise fmt.DamagedCheckpoint("this rank knows of no keepers")
        return MemoryReader(keepers, step)

    damage = _attempt(trainer, located, model_only=False)
    if damage is not None and not or_disk:
        raise CommError(f"the copy of step {step} in memory was lost while it was loaded, and none is on disk")
    if damage is not None and trainer.writes:
        notice(f"meshwright: warning: the copy of step {step} in memory can't be used: the run goes back to the disk")
    return damage is None


def _chosen(trainer: Checkpointed, folder: Path, source: str | None) -> tuple[bool, bool, int, list[int]]:
    """Returns whether the run continues from its own newest checkpoint, whether `source` is its own, the step of a
    newer copy in memory (0: there is none), and the steps on disk to try. The rank that writes looks and tells the
    others, since a network disk, or a run that is still being written, may look different to each rank."""
    error: UserError | None = None
    found: list[int] = []
    if trainer.writes:
        try:
            found = _candidates(folder, source)
            keepers = Keepers.known() if found[0] and fmt.was_restarted() else None
            kept = newest_whole(keepers) if keepers else 0
            found.insert(2, kept if kept > max(found[2:], default=0) else 0)
        except UserError as caught:
            error, found = caught, [-1, 0, 0]
        except OSError as caught:
            error, found = refused(f"{source or folder} can't be read", caught), [-1, 0, 0]
    device, world = trainer.ctx.device.torch, trainer.ctx.mesh.world
    size = torch.tensor([len(found)]).to(device)
    world.all_reduce(size)
    told = torch.tensor(found or [0] * int(size.item())).to(device)
    world.all_reduce(told)
    begun, own, kept, *steps = told.tolist()
    if begun < 0:
        raise error if error is not None else SystemExit(2)
    return bool(begun), bool(own), kept, steps


def _candidates(folder: Path, source: str | None) -> list[int]:
    """Returns [whether the run continues, whether the source is its own, and the steps to try in order]. A source that
    is another run's is only needed to begin this one, so it may be gone once there are checkpoints."""
    there = [step for step, _ in reversed(fmt.list_checkpoints(folder))]
    if source is None:
        return [1, 0, *there]
    where, wanted = fmt.path_and_step(source)
    at, ours = where.resolve(), folder.resolve()
    inside = ours in (at, at / "checkpoints") or (ours == at.parent and "step-" in at.name)
    if there and (not inside or _went_back(folder, source)):
        if not inside:
            missing = "" if where.exists() else " (which is not there)"
            text = f"{folder} holds checkpoints: the run goes on from step {there[0]}, not from {source}{missing}"
            print(f"meshwright: {'warning: ' if missing else ''}{text}", file=sys.stderr, flush=True)
        return [1, 0, *there]
    path = find_checkpoint(source)
    own = inside and fmt.step_of(path) >= 0
    if there and not own:
        raise UserError(
            f"{path} was set aside when this run went back: begin another run from it (with another run.dir), or "
            "give it its old name step-N again, in place of the steps from N on"
        )
    says_which = wanted or (where / fmt.INDEX).is_file()
    return [0, int(own)] if says_which else [0, int(own), fmt.step_of(path)]


def _went_back(folder: Path, source: str) -> bool:
    """Whether ranks of this very job have gone back to `source` before, and then went on and died."""
    try:
        return fmt.was_restarted() and read_json(folder / WENT_BACK) == {
            "job": fmt.job_name(), "source": source,
        }  # fmt: skip
    except (OSError, ValueError):
        return False


def _named(source: str, steps: list[int]) -> Path:
    """Returns the checkpoint that `source` names. Where that means the newest of a run, it is the one that was newest
    for the rank that looked."""
    path = find_checkpoint(source)
    return path.parent / fmt.folder_name(steps[0]) if steps else path


def _newest(trainer: Checkpointed, folder: Path, steps: list[int]) -> None:
    for number, step in enumerate(steps):
        damage = _attempt(trainer, partial(Reader, folder / fmt.folder_name(step)), model_only=False)
        if damage is None:
            return
        if number == len(steps) - 1:
            if isinstance(damage, SystemExit):
                raise damage
            raise UserError(f"{folder} holds no checkpoint that can be used: {damage}") from None
        if isinstance(damage, fmt.DamagedCheckpoint):
            warning = f"meshwright: warning: {damage}; going back to {fmt.folder_name(steps[number + 1])}"
            print(warning, file=sys.stderr, flush=True)


def _attempt(
    trainer: Checkpointed, opened: Callable[[], Reader], model_only: bool
) -> fmt.DamagedCheckpoint | SystemExit | None:
    """Loads on all ranks or fails on all: a file that one rank finds damaged is damaged for all. Returns None, or the
    damage on the first rank that found some, or SystemExit on the other ranks, which have nothing to report."""
    error: UserError | None = None
    try:
        reader = opened()
        model_only |= not reader.index.state  # imported: it holds no more
        _compare(trainer, reader, model_only)
        read_into(trainer, reader, model_only)
    except UserError as caught:
        error = caught
    damaged = isinstance(error, fmt.DamagedCheckpoint)
    place = trainer.ctx.layout.world - trainer.ctx.rank  # the largest is the first rank's
    firsts = torch.tensor([place * (error is not None and not damaged), place * damaged])
    firsts = firsts.to(trainer.ctx.device.torch)
    trainer.ctx.mesh.world.all_reduce(firsts, op="max")
    mistaken, found = firsts.tolist()
    if mistaken:
        raise error if error is not None and mistaken == place else SystemExit(2)
    if not found:
        _check_all_used(trainer, reader)
        complete_load(trainer, reader, model_only)
        reader.close()
        return None
    return error if isinstance(error, fmt.DamagedCheckpoint) and found == place else SystemExit(2)


def _compare(trainer: Checkpointed, reader: Reader, model_only: bool) -> None:
    """Compares what no tensor shape shows: whether the model computes something else with the same weights, and whether
    the same sample numbers mean other samples. A run that continues must keep its model; one that starts from another
    run's weights may change it on purpose."""
    ours, theirs = (flat(config) for config in (to_mapping(trainer.ctx.config), reader.index.config))
    idle = {*TRAINING_KEYS, "seq", "vocab"}
    idle |= set() if ours["model.position"] == "rope" else {"rope_theta"}
    idle |= {"qkv_bias"} if ours["model.bias"] else set()
    computed = [key for key in ours if key.startswith("model.") and key.removeprefix("model.") not in idle]
    computed += [key for key in ours if key.startswith("tune.") and key not in ("tune.base", "tune.dropout")]
    check_digest(reader.folder, trainer.ctx.config.tune.base)
    if trainer.writes:
        check_tokenizer(reader.folder, trainer.ctx.config.data)
    theirs.setdefault("data.draw_split", False)  # of an older release
    for each in (ours, theirs):
        prefixes = each.get("data.prefixes")
        each["data.prefixes"] = [os.path.normpath(str(p)) for p in prefixes] if isinstance(prefixes, list) else []

    def changed(keys: Sequence[str]) -> str:
        others = [key for key in keys if key in theirs and theirs[key] != ours[key]]  # it may be of an older release
        return ", ".join(f"{key} (there {theirs[key]}, here {ours[key]})" for key in others)

    model, data = changed(computed), changed(SAMPLES) if not model_only else ""
    if model and not model_only:
        fits = not changed([f"model.{key}" for key in SHAPING])
        again = f"from these weights with another run.dir and --from {reader.folder}" if fits else "in another run.dir"
        raise UserError(
            f"{reader.folder} is of a model that computes something else: {model}; set it back, or begin a new run "
            f"{again}"
        )
    told = [(model, "these weights were trained with other settings"),
            (data, "the run goes on with other samples than it began with, and may see some again")]  # fmt: skip
    for keys, text in told if trainer.writes else []:
        if keys:
            print(f"meshwright: warning: {text}: {keys}", file=sys.stderr, flush=True)


def _check_all_used(trainer: Checkpointed, reader: Reader) -> None:
    """Raises if no rank has a place for some weight: it belongs to another model, and the next checkpoint would lose
    it."""
    names = sorted(name for name in reader.index.tensors if name.startswith("param/"))
    ours = {f"param/{slot.record.name}" for buffer in trainer.data_parallel.buffers for slot in buffer.slots}
    taken = torch.tensor([name in ours for name in names], dtype=torch.int64).to(trainer.ctx.device.torch)
    trainer.ctx.mesh.world.all_reduce(taken, op="max")
    left = [name.removeprefix("param/") for name, there in zip(names, taken.tolist(), strict=True) if not there]
    if left:
        if not trainer.writes:
            raise SystemExit(2)
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise UserError(
            f"{reader.folder} holds {', '.join(left[:3])}{more}, for which this config's model has no place: "
            "check the model section"
        )


def load_checkpoint(trainer: Checkpointed, folder: Path, model_only: bool = False) -> None:
    """Loads this checkpoint, all of its state or its weights alone, and changes no folder. Every rank calls it."""
    damage = _attempt(trainer, partial(Reader, folder), model_only)
    if damage is not None:
        raise damage
