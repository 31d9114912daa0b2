"""One pipeline chunk of an unmodified transformers module: its blocks, and the ends of the model where it has them.

The whole module's own forward runs on every stage, so that masks, positions and all that it computes from the ids are
its own. What a stage does not hold is left out of it: the embedding's place returns what was received, the first block
here takes it whatever came in between, and forward is left when the last block here has returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.config.sections import Config
from meshwright.errors import UserError
from meshwright.models.stage import Receives, StageResult
from meshwright.models.wrapped.blueprint import Blueprint, blueprint, of_blocks, read_config, rotary_elements, skeleton
from meshwright.models.wrapped.calls import outer_modules, recomputed, with_first
from meshwright.models.wrapped.foreign import Absent, ForeignStage, local_part, place_all
from meshwright.nn.parallel import Parallel
from meshwright.spec.layout.params import ParamRecord, stream_seed
from meshwright.spec.model.graph import Stage
from meshwright.spec.model.hf.folder import has_weights
from meshwright.spec.model.part import Coordinate, MicroBatch

# Kinds of layers that see nothing of another document where positions begin anew.
MASKED_LAYERS = {
    "full_attention", "sliding_attention", "chunked_attention", "attention", "moe", "mlp", "dense", "sparse",
}  # fmt: skip


class _Left(Exception):
    """Raised by the last block of a stage that is not the last: forward ends there."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class PlannedStage(ForeignStage):
    """A chunk of the model of a folder, cut by its plan."""

    def __init__(self, parallel: Parallel, config: Config, at: Coordinate, stage: Stage) -> None:
        folder = config.model.hf
        plan, hf = blueprint(folder), read_config(folder)
        net = skeleton(hf, parallel.dtype)
        super().__init__(net)
        self.stage, self._table = stage, Absent()
        records = {record.name: record for record in plan.model.records(at, stage).values()}
        cut_blocks(net, plan, stage)
        check_dropout(net, hf, parallel.tp.size)
        if config.has_segments:
            check_documents(hf)
        batch = MicroBatch(config.train.micro_batch, config.model.seq)
        shapes = plan.model.passes(at, batch, stage).items()
        self.receives: Receives = {name: (shape, parallel.dtype) for name, shape in shapes}
        self.needs = {"tokens", "positions"} | ({"labels", "loss_mask"} if stage.last else set())
        ties = {name: each.tied for each in _parameters(plan, stage) for name in [each.name] if each.tied}
        materialise(net, parallel, records, ties, None if has_weights(Path(folder)) else config.train.seed)
        cut_ends(net, plan, stage, self._table)
        place_all(net, plan.plan, parallel.tp, partial(rotary_elements, hf))
        blocks = [net.get_submodule(f"{plan.model.path}.{n}") for n in stage.layers]
        if config.recompute.mode == "full":
            for block in blocks:
                recomputed(block)
        self.divide([*dict.fromkeys(name.rpartition(".")[0] for name in plan.after)] if stage.last else ())
        if not stage.last:
            blocks[-1].register_forward_hook(_leave)
        if not stage.first:
            blocks[0].register_forward_pre_hook(self._enter, with_kwargs=True)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return with_first(args, kwargs, lambda x: self._received)

    def forward(self, batch: dict[str, Tensor], hidden: Tensor | None = None) -> Tensor:
        """Returns the logits or, before the last stage, what leaves its last block."""
        given: dict[str, Any] = {"input_ids": batch["tokens"], "use_cache": False}
        if "positions" in batch:
            given["position_ids"] = batch["positions"]
        self._received = hidden
        self._table.given = None if hidden is None else hidden.detach()
        try:
            return self.with_loose(lambda: self._run(given))
        finally:
            self._received = self._table.given = None

    def step(self, batch: dict[str, Tensor], received: Mapping[str, Tensor]) -> StageResult:
        """Returns what leaves the last block here or, in the last stage, our loss of the logits."""
        out = self(batch, **received)
        return ({}, [("loss", *loss_of(out, batch), 1.0)]) if self.stage.last else ({"hidden": out}, [])

    def _run(self, given: dict[str, Any]) -> Tensor:
        try:
            logits: Tensor = self.net(**given).logits
        except _Left as left:
            return left.hidden
        return logits


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    raise _Left(output[0] if isinstance(output, tuple) else output)


def _parameters(plan: Blueprint, stage: Stage) -> list[Any]:
    return [
        each._replace(name=node.prefix + each.name)
        for node in plan.model.nodes_of(stage)
        for _, _, part in node.unit.parts
        for each in part.parameters  # type: ignore[attr-defined]
    ]


def check_dropout(module: nn.Module, config: Any, tp: int) -> None:
    """Refuses dropout where ranks would have to draw some numbers alike and others not."""
    drops = [name for name, each in module.named_modules() if isinstance(each, nn.Dropout) and each.p > 0]
    drops += [key for key in ("attention_dropout",) if any(of_blocks(config.get_text_config(), key))]
    if tp > 1 and drops:
        raise UserError(f"{drops[0]} of this model drops elements, which layout.tp={tp} can't draw alike: set it to 0 "
                        "in its config.json, or layout.tp=1")  # fmt: skip


def check_documents(config: Any) -> None:
    """Refuses documents in one sequence where some layers carry a state from token to token, whatever positions say."""
    text = config.get_text_config()
    kinds = {*(getattr(text, "layer_types", None) or ()), *(getattr(text, "layers_block_type", None) or ())}
    carrying = sorted(str(kind) for kind in kinds - MASKED_LAYERS)
    if carrying:
        raise UserError(
            f"layers of the kind {carrying[0]} carry a state over the ends of documents: set data.reset_attention and "
            "data.reset_positions to false, and give each document a sample of its own"
        )


def cut_blocks(module: nn.Module, plan: Blueprint, stage: Stage) -> None:
    """Takes out of a skeleton the blocks that other stages hold."""
    blocks = module.get_submodule(plan.model.path)
    assert isinstance(blocks, nn.ModuleList)
    for n in range(len(blocks)):
        if n not in stage.layers:
            blocks[n] = Absent(blocks[n])


def cut_ends(module: nn.Module, plan: Blueprint, stage: Stage, table: Absent) -> None:
    """Takes out of it the ends of the model that other stages hold; `table` comes in the place of the embedding."""
    for name, _ in outer_modules(module)[0]:
        ends = [
            held for held, kept in ((plan.before, stage.first), (plan.after, stage.last))
            if not kept and any(each.startswith(f"{name}.") for each in held)
        ]  # fmt: skip
        if ends:
            parent, _, key = name.rpartition(".")
            setattr(module.get_submodule(parent), key, table if ends == [plan.before] else Absent())


@torch.no_grad()
def materialise(
    module: nn.Module, parallel: Parallel, records: dict[str, ParamRecord], ties: dict[str, str], seed: int | None
) -> None:
    """Gives a skeleton this rank's part of its parameters, drawn as the module's own program draws
    them: module by module, each from a seed of its own, so that every layout begins with the same model. Without a seed
    the parameters' values are left to others."""
    made: dict[str, nn.Parameter] = {}
    units = [(name, _children_first(unit)) for name, unit in outer_modules(module)[0]]
    inside = {id(each) for _, modules in units for each in modules}
    paths = {id(each): name for name, each in module.named_modules(remove_duplicate=False)}
    for name, modules in [*units, ("", [each for each in _children_first(module) if id(each) not in inside])]:
        own = [(each, key) for each in modules for key, value in each._parameters.items() if value is not None]
        names = {(id(each), key): f"{paths[id(each)]}.{key}".removeprefix(".") for each, key in own}
        wanted = {at: records.get(ties.get(full, full)) for at, full in names.items()}
        if own and not any(wanted.values()):
            continue  # an end of the model that another stage holds
        if seed is not None:
            torch.manual_seed(stream_seed(seed, name))
            for each in modules:
                _to_host(each)
        for each in modules:
            if seed is not None:
                with default_dtype(parallel.dtype):
                    _initialiser(module, paths[id(each)])._initialize_weights(each)  # type: ignore[operator]
            for key, value in each._buffers.items():
                each._buffers[key] = None if value is None else value.to(parallel.device)
        for each, key in own:
            value, record = each._parameters[key], wanted[id(each), key]
            if record is not None and value is not None:
                if record.name not in made:
                    made[record.name] = local_part(value, record, parallel)
                each._parameters[key] = made[record.name]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, tensors of no stated dtype have this one, as where a module of that precision is built."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _initialiser(module: nn.Module, path: str) -> nn.Module:
    """The innermost model that a module belongs to, which knows how its modules begin."""
    found, at = module, module
    for word in path.split(".") if path else ():
        at = at.get_submodule(word)
        found = at if hasattr(at, "_initialize_weights") else found
    return found


def _children_first(module: nn.Module) -> list[nn.Module]:
    return list(module.modules())[::-1]


def _to_host(module: nn.Module) -> None:
    """Gives the parameters of a module that have no memory some of the host's."""
    for key, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            module._parameters[key] = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)


def loss_of(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of the cross entropies of the tokens that count, and their number."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    mask = batch["loss_mask"].flatten()
    each = F.cross_entropy(wide, batch["labels"].flatten(), reduction="none")
    return (each * mask).sum(), mask.sum()
