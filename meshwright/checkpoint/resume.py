"""Decide where a run begins, and load it: step 0, its newest good checkpoint, or another run's weights."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from meshwright.checkpoint.base import check_digest
from meshwright.checkpoint.contract import CheckpointedTrainer
from meshwright.checkpoint.load import Reader, complete_load, read_into
from meshwright.checkpoint.memory_copy import Keepers, MemoryReader, newest_whole
from meshwright.comm.group import CommError
from meshwright.config.load import flat, to_mapping
from meshwright.config.sections import TRAINING_KEYS
from meshwright.disk import refusal
from meshwright.errors import UserError, notice
from meshwright.outside import read_json
from meshwright.record import checkpoint_format as fmt
from meshwright.record.checkpoint_format import find_checkpoint
from meshwright.record.companions import check_tokenizer

# A file next to the checkpoints. It records that a job was asked to continue from an older checkpoint.
ROLLBACK_FILE = "went-back.json"
# The model keys that change the shapes of parameters.
SHAPING = ("kind", "layers", "hidden", "ffn", "experts.count", "experts.ffn")
# The keys that decide which tokens the sample of a given number holds.
SAMPLES = (
    "data.prefixes", "data.weights", "data.split", "data.draw_split", "data.objective", "data.masked.share",
    "data.masked.ngrams", "data.masked.whole_words", "data.masked.specials", "data.spans.share", "data.spans.mean",
    "data.spans.sentinel", "data.blanks.short", "data.blanks.share", "data.blanks.mean", "data.blanks.least",
    "data.blanks.specials", "data.blanks.instructions", "data.blanks.instruction_share", "model.seq", "train.seed",
)  # fmt: skip


def resume(trainer: CheckpointedTrainer, source: str | None) -> str:
    """Load the state that this run continues from. Return `memory` if it came from copies in memory, else `disk`.

    Every rank calls this, and all load the same checkpoint or none. A damaged checkpoint is skipped with a warning, and
    the one before it is tried. A run that began with another run's weights continues from its own checkpoints when it
    is started again. Ranks that are restarted after a failure do the same.
    """
    folder = fmt.checkpoint_folder(trainer.ctx.config)
    if trainer.writes:
        fmt.remove_unfinished(folder)
        if not fmt.was_restarted():
            with suppress(OSError):
                (folder / ROLLBACK_FILE).unlink()
    begun, own, in_memory, steps = _chosen(trainer, folder, source)
    from_memory = in_memory > 0 and _from_memory(trainer, in_memory, bool(steps))
    if begun and not from_memory:
        _newest(trainer, folder, steps)
    elif source is not None and not begun:
        damage = _attempt(trainer, lambda: Reader(_resolve_source(source, steps)), model_only=not own)
        if damage is not None:
            raise damage
    if trainer.writes:
        _say_where(trainer, source, begun or own, from_memory)
        try:
            fmt.set_aside(folder, trainer.step_number)
            if own:
                fmt.write_json(folder / ROLLBACK_FILE, {"job": fmt.job_name(), "source": source})
        except OSError as error:
            raise refusal(f"{folder} can't be written", error, folder, "another checkpoint.dir") from None
    return "memory" if from_memory else "disk"


def has_checkpoint(trainer: CheckpointedTrainer) -> bool:
    """Return on every rank whether the run has a checkpoint, as seen by the rank that writes."""
    ctx = trainer.ctx
    here = trainer.writes and bool(fmt.list_checkpoints(fmt.checkpoint_folder(ctx.config)))
    return bool(ctx.mesh.world.max_over_ranks(float(here), ctx.device.torch))


def _say_where(trainer: CheckpointedTrainer, source: str | None, continues: bool, from_memory: bool) -> None:
    """Print where the run begins. `verified` is true because every block was checked against its checksum."""
    config, step = trainer.ctx.config, trainer.step_number
    if continues and step:
        what = "copy in memory" if from_memory else "checkpoint"
        on = f" on {world} ranks" if (world := trainer.ctx.layout.world) > 1 else ""
        notice(f"continues {config.run.dir} from step {step} of {config.train.steps}{on}, {what} verified")
    elif source is not None and not continues:
        notice(f"begins {config.run.dir} with the weights of {source}, checkpoint verified")


def _from_memory(trainer: CheckpointedTrainer, step: int, or_disk: bool) -> bool:
    """Load the keepers' copy of a step. Return False, with a warning, if it can't be used.

    If there is no checkpoint on disk either (`or_disk` is False), raise so that the ranks restart: this rank's state
    may already be half overwritten by the copy.
    """
    keepers = Keepers.from_environment()

    def open_copy() -> Reader:
        if keepers is None:
            raise fmt.DamagedCheckpoint("this rank knows of no keepers")
        return MemoryReader(keepers, step)

    damage = _attempt(trainer, open_copy, model_only=False)
    if damage is not None and not or_disk:
        raise CommError(f"the copy of step {step} in memory was lost while it was loaded, and none is on disk")
    if damage is not None and trainer.writes:
        notice(f"meshwright: warning: the copy of step {step} in memory can't be used: the run goes back to the disk")
    return damage is None


def _chosen(trainer: CheckpointedTrainer, folder: Path, source: str | None) -> tuple[bool, bool, int, list[int]]:
    """Return (whether the run continues from its newest checkpoint, whether `source` is its own checkpoint, the step of
    a newer copy in memory or 0, the steps on disk to try).

    The rank that writes decides and broadcasts the result, since a network disk, or a run that is still being written,
    may look different to each rank.
    """
    error: UserError | None = None
    choice: list[int] = []
    if trainer.writes:
        try:
            choice = _candidates(folder, source)
            keepers = Keepers.from_environment() if choice[0] and fmt.was_restarted() else None
            in_memory = newest_whole(keepers) if keepers else 0
            choice.insert(2, in_memory if in_memory > max(choice[2:], default=0) else 0)
        # -1 makes all ranks raise, below.
        except UserError as caught:
            error, choice = caught, [-1, 0, 0]
        except OSError as caught:
            error = refusal(f"{source or folder} can't be read", caught)
            choice = [-1, 0, 0]

    # Broadcast the list by sums: all other ranks add zeros.
    device, world = trainer.ctx.device.torch, trainer.ctx.mesh.world
    size = torch.tensor([len(choice)]).to(device)
    world.all_reduce(size)
    agreed = torch.tensor(choice or [0] * int(size.item())).to(device)
    world.all_reduce(agreed)
    begun, own, in_memory, *steps = agreed.tolist()
    if begun < 0:
        raise error if error is not None else SystemExit(2)
    return bool(begun), bool(own), in_memory, steps


def _candidates(folder: Path, source: str | None) -> list[int]:
    """Return [1 if the run continues, 1 if `source` is its own checkpoint, the steps to try in order].

    A `source` of another run is only needed to begin this one, so it may be missing once there are checkpoints.
    """
    steps = [step for step, _ in reversed(fmt.list_checkpoints(folder))]
    if source is None:
        return [1, 0, *steps]
    where, wanted = fmt.path_and_step(source)
    at, ours = where.resolve(), folder.resolve()
    inside = ours in (at, at / "checkpoints") or (ours == at.parent and "step-" in at.name)
    if steps and (not inside or _went_back(folder, source)):
        if not inside:
            missing = "" if where.exists() else " (which is not there)"
            text = f"{folder} holds checkpoints: the run continues from step {steps[0]}, not from {source}{missing}"
            print(f"meshwright: {'warning: ' if missing else ''}{text}", file=sys.stderr, flush=True)
        return [1, 0, *steps]
    path = find_checkpoint(source)
    own = inside and fmt.step_of(path) >= 0
    if steps and not own:
        raise UserError(
            f"{path} was set aside when this run went back: begin another run from it (with another run.dir), or "
            "give it its old name step-N again, in place of the steps from N on"
        )
    # Without a step in `source`, the newest one of this rank is passed on, so that all ranks load the same.
    names_step = wanted or (where / fmt.INDEX).is_file()
    return [0, int(own)] if names_step else [0, int(own), fmt.step_of(path)]


def _went_back(folder: Path, source: str) -> bool:
    """Return True if this job has gone back to `source` before and was restarted since then."""
    try:
        return fmt.was_restarted() and read_json(folder / ROLLBACK_FILE) == {
            "job": fmt.job_name(), "source": source,
        }  # fmt: skip
    except (OSError, ValueError):
        return False


def _resolve_source(source: str, steps: list[int]) -> Path:
    """Return the checkpoint that `source` names. If it names a run without a step, that is the checkpoint that was
    newest for the rank that chose."""
    path = find_checkpoint(source)
    return path.parent / fmt.folder_name(steps[0]) if steps else path


def _newest(trainer: CheckpointedTrainer, folder: Path, steps: list[int]) -> None:
    """Load the first of these steps that is not damaged."""
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
    trainer: CheckpointedTrainer, opened: Callable[[], Reader], model_only: bool
) -> fmt.DamagedCheckpoint | SystemExit | None:
    """Load a checkpoint on all ranks or on none: if one rank finds it damaged, all treat it as damaged.

    Return None on success. Otherwise return the damage on the first rank that found some, and SystemExit on the other
    ranks, which have nothing to report. Any other mistake raises on all ranks.
    """
    error: UserError | None = None
    try:
        reader = opened()
        model_only |= not reader.index.state  # An imported checkpoint holds only weights.
        _compare(trainer, reader, model_only)
        read_into(trainer, reader, model_only)
    except UserError as caught:
        error = caught

    # One all-reduce finds the first rank with a mistake and the first with damage: rank 0 has the largest number, and
    # 0 stands for no rank.
    damaged = isinstance(error, fmt.DamagedCheckpoint)
    place = trainer.ctx.layout.world - trainer.ctx.rank
    firsts = torch.tensor([place * (error is not None and not damaged), place * damaged])
    firsts = firsts.to(trainer.ctx.device.torch)
    trainer.ctx.mesh.world.all_reduce(firsts, op="max")
    first_mistaken, first_damaged = firsts.tolist()
    if first_mistaken:
        raise error if error is not None and first_mistaken == place else SystemExit(2)
    if not first_damaged:
        _check_all_used(trainer, reader)
        complete_load(trainer, reader, model_only)
        reader.close()
        return None
    return error if isinstance(error, fmt.DamagedCheckpoint) and first_damaged == place else SystemExit(2)


def _compare(trainer: CheckpointedTrainer, reader: Reader, model_only: bool) -> None:
    """Compare the settings that tensor shapes do not show: whether the model computes something else with the same
    weights, and whether sample numbers refer to other samples.

    A run that continues must keep its model. A run that starts from another run's weights may change it on purpose.
    """
    ours, theirs = (flat(config) for config in (to_mapping(trainer.ctx.config), reader.index.config))
    # These keys do not affect the model's results, or tensor shapes show their changes already.
    ignored = {*TRAINING_KEYS, "seq", "vocab"}
    ignored |= set() if trainer.ctx.config.model.has_rope else {"rope_theta"}
    ignored |= {"qkv_bias"} if ours["model.bias"] else set()
    computed = [key for key in ours if key.startswith("model.") and key.removeprefix("model.") not in ignored]
    computed += [key for key in ours if key.startswith("tune.") and key not in ("tune.base", "tune.dropout")]
    check_digest(reader.folder, trainer.ctx.config.tune.base)
    if trainer.writes:
        check_tokenizer(reader.folder, trainer.ctx.config.data)

    # Checkpoints of older releases have no such key.
    theirs.setdefault("data.draw_split", False)
    for config in (ours, theirs):
        prefixes = config.get("data.prefixes")
        config["data.prefixes"] = [os.path.normpath(str(p)) for p in prefixes] if isinstance(prefixes, list) else []

    def changed(keys: Sequence[str]) -> str:
        # A checkpoint of an older release may lack a key.
        others = [key for key in keys if key in theirs and theirs[key] != ours[key]]
        return ", ".join(f"{key} (there {theirs[key]}, here {ours[key]})" for key in others)

    model = changed(computed)
    data = changed(SAMPLES) if not model_only else ""
    if model and not model_only:
        fits = not changed([f"model.{key}" for key in SHAPING])
        again = f"from these weights with another run.dir and --from {reader.folder}" if fits else "in another run.dir"
        raise UserError(
            f"{reader.folder} is of a model that computes something else: {model}; set it back, or begin a new run "
            f"{again}"
        )
    warnings = [(model, "these weights were trained with other settings"),
                (data, "the run continues with other samples than it began with, and may see some again")]  # fmt: skip
    for keys, text in warnings if trainer.writes else []:
        if keys:
            print(f"meshwright: warning: {text}: {keys}", file=sys.stderr, flush=True)


def _check_all_used(trainer: CheckpointedTrainer, reader: Reader) -> None:
    """Raise if some weight has no place on any rank. It belongs to another model, and the next checkpoint would lose
    it."""
    names = sorted(name for name in reader.index.tensors if name.startswith("param/"))
    ours = {f"param/{slot.record.name}" for buffer in trainer.data_parallel.buffers for slot in buffer.slots}
    is_used = torch.tensor([name in ours for name in names], dtype=torch.int64).to(trainer.ctx.device.torch)
    trainer.ctx.mesh.world.all_reduce(is_used, op="max")
    unused = [name.removeprefix("param/") for name, there in zip(names, is_used.tolist(), strict=True) if not there]
    if unused:
        if not trainer.writes:
            raise SystemExit(2)
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        raise UserError(
            f"{reader.folder} holds {', '.join(unused[:3])}{more}, for which this config's model has no place: "
            "check the model section"
        )


def load_checkpoint(trainer: CheckpointedTrainer, folder: Path, model_only: bool = False) -> None:
    """Load this checkpoint, with all of its state or only the weights, and change no folder. Every rank calls this."""
    damage = _attempt(trainer, partial(Reader, folder), model_only)
    if damage is not None:
        raise damage
