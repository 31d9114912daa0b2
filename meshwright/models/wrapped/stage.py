"""One pipeline chunk of an unmodified transformers module: its blocks, and the ends of the model if it holds them.

The forward of the whole module runs on every stage, so that masks, positions and everything else that depends on the
ids are computed as usual. Modules that a stage does not hold are left out. A placeholder for the embedding returns the
received activations. The first block of the stage takes them as its input, whatever the modules in between returned.
The forward is left as soon as the last block of the stage has returned.
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
from meshwright.models.wrapped.calls import outer_modules, recompute_in_backward, with_first
from meshwright.models.wrapped.foreign import AbsentModule, ForeignStage, local_part, place_all
from meshwright.nn.parallel import Parallel
from meshwright.spec.layout.params import ParamRecord, stream_seed
from meshwright.spec.model.description import model_of
from meshwright.spec.model.graph import Stage
from meshwright.spec.model.hf.folder import has_weights
from meshwright.spec.model.part import Coordinate, MicroBatch

# The kinds of layers that see nothing of another document if positions restart at its beginning.
MASKED_LAYERS = {
    "full_attention", "sliding_attention", "chunked_attention", "attention", "moe", "mlp", "dense", "sparse",
}  # fmt: skip


class _StopForward(Exception):
    """Raised after the last block of a stage other than the last, to end the module's forward there."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class PlannedStage(ForeignStage):
    """A chunk of the transformers model in a folder, sharded by the model's plan."""

    def __init__(self, parallel: Parallel, config: Config, at: Coordinate, stage: Stage) -> None:
        folder = config.model.hf
        plan, hf = blueprint(folder), read_config(folder)
        net = skeleton(hf, parallel.dtype)
        super().__init__(net)
        self.stage, self._table = stage, AbsentModule()
        records = {record.name: record for record in model_of(config).records(at, stage).values()}
        cut_blocks(net, plan, stage)
        check_dropout(net, hf, parallel.tp.size)
        if config.has_segments:
            check_documents(hf)
        batch = MicroBatch(config.train.micro_batch, config.model.seq)
        shapes = plan.model.passes(at, batch, stage).items()
        self.receives: Receives = {name: (shape, parallel.dtype) for name, shape in shapes}
        self.needs = {"tokens", "positions"} | ({"labels", "loss_mask"} if stage.last else set())
        ties = {parameter.name: parameter.tied for parameter in _parameters(plan, stage) if parameter.tied}
        # A folder with weights fills the parameters later.
        seed = None if has_weights(Path(folder)) else config.train.seed
        materialise(net, parallel, records, ties, seed)
        cut_ends(net, plan, stage, self._table)
        place_all(net, plan.plan, parallel.tp, partial(rotary_elements, hf))
        blocks = [net.get_submodule(f"{plan.model.path}.{n}") for n in stage.layers]
        if config.recompute.blocks:
            for block in blocks:
                recompute_in_backward(block)

        # Dividing wraps the forwards as they are now, so it comes after all other changes of them.
        self.divide([*dict.fromkeys(name.rpartition(".")[0] for name in plan.after)] if stage.last else ())
        if not stage.last:
            blocks[-1].register_forward_hook(_leave)
        if not stage.first:
            blocks[0].register_forward_pre_hook(self._enter, with_kwargs=True)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return with_first(args, kwargs, lambda x: self._received)

    def forward(self, batch: dict[str, Tensor], hidden: Tensor | None = None) -> Tensor:
        """Return the logits or, in any stage but the last, the output of the stage's last block."""
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
        """Return the output of the stage's last block or, in the last stage, our own loss of the logits."""
        out = self(batch, **received)
        return ({}, [("loss", *loss_of(out, batch), 1.0)]) if self.stage.last else ({"hidden": out}, [])

    def _run(self, given: dict[str, Any]) -> Tensor:
        try:
            logits: Tensor = self.net(**given).logits
        except _StopForward as stop:
            return stop.hidden
        return logits


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    raise _StopForward(output[0] if isinstance(output, tuple) else output)


def _parameters(plan: Blueprint, stage: Stage) -> list[Any]:
    return [
        each._replace(name=node.prefix + each.name)
        for node in plan.model.nodes_of(stage)
        for _, _, part in node.unit.parts
        for each in part.parameters  # type: ignore[attr-defined]
    ]


def check_dropout(module: nn.Module, config: Any, tp: int) -> None:
    """Refuse dropout with tp, where ranks would have to draw the same numbers for some tensors but not for others."""
    drops = [name for name, each in module.named_modules() if isinstance(each, nn.Dropout) and each.p > 0]
    drops += [key for key in ("attention_dropout",) if any(of_blocks(config.get_text_config(), key))]
    if tp > 1 and drops:
        raise UserError(f"{drops[0]} of this model drops elements, which layout.tp={tp} can't draw alike: set it to 0 "
                        "in its config.json, or layout.tp=1")  # fmt: skip


def check_documents(config: Any) -> None:
    """Refuse several documents in one sequence if some layers carry a state across their boundaries."""
    text = config.get_text_config()
    kinds = {*(getattr(text, "layer_types", None) or ()), *(getattr(text, "layers_block_type", None) or ())}
    carrying = sorted(str(kind) for kind in kinds - MASKED_LAYERS)
    if carrying:
        raise UserError(
            f"layers of the kind {carrying[0]} carry a state over the ends of documents: set data.reset_attention and "
            "data.reset_positions to false, and give each document a sample of its own"
        )


def cut_blocks(module: nn.Module, plan: Blueprint, stage: Stage) -> None:
    """Replace the blocks that other stages hold by placeholders."""
    blocks = module.get_submodule(plan.model.path)
    assert isinstance(blocks, nn.ModuleList)
    for n in range(len(blocks)):
        if n not in stage.layers:
            blocks[n] = AbsentModule(blocks[n])


def cut_ends(module: nn.Module, plan: Blueprint, stage: Stage, table: AbsentModule) -> None:
    """Replace the ends of the model that other stages hold by placeholders; `table` replaces the embedding."""
    for name, _ in outer_modules(module)[0]:
        ends = [
            names for names, is_here in ((plan.before, stage.first), (plan.after, stage.last))
            if not is_here and any(parameter.startswith(f"{name}.") for parameter in names)
        ]  # fmt: skip
        if ends:
            parent, _, key = name.rpartition(".")
            setattr(module.get_submodule(parent), key, table if ends == [plan.before] else AbsentModule())


@torch.no_grad()
def materialise(
    module: nn.Module, parallel: Parallel, records: dict[str, ParamRecord], ties: dict[str, str], seed: int | None
) -> None:
    """Give a skeleton this rank's shards of its parameters, with values drawn by the module's own program.

    Each unit is drawn whole, from a seed that depends on its name, so that every layout starts with the same model.
    Without a seed, the values are set later.
    """
    made: dict[str, nn.Parameter] = {}
    units = [(name, _children_first(unit)) for name, unit in outer_modules(module)[0]]
    inside = {id(each) for _, modules in units for each in modules}
    paths = {id(each): name for name, each in module.named_modules(remove_duplicate=False)}
    for name, modules in [*units, ("", [each for each in _children_first(module) if id(each) not in inside])]:
        slots = [(each, key) for each in modules for key, value in each._parameters.items() if value is not None]
        names = {(id(each), key): f"{paths[id(each)]}.{key}".removeprefix(".") for each, key in slots}
        wanted = {slot: records.get(ties.get(full, full)) for slot, full in names.items()}
        # This end of the model belongs to another stage.
        if slots and not any(wanted.values()):
            continue

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

        # Keep this rank's shards. Tied parameters share a record and become one parameter.
        for each, key in slots:
            value = each._parameters[key]
            record = wanted[id(each), key]
            if record is not None and value is not None:
                if record.name not in made:
                    made[record.name] = local_part(value, record, parallel)
                each._parameters[key] = made[record.name]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Give this dtype to tensors that are created without a stated one, as when a module of that precision is built."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _initialiser(module: nn.Module, path: str) -> nn.Module:
    """Return the innermost model that contains a module and can initialise it."""
    owner, at = module, module
    for word in path.split(".") if path else ():
        at = at.get_submodule(word)
        owner = at if hasattr(at, "_initialize_weights") else owner
    return owner


def _children_first(module: nn.Module) -> list[nn.Module]:
    """Return a module and all modules inside it, children before their parents."""
    return list(module.modules())[::-1]


def _to_host(module: nn.Module) -> None:
    """Allocate host memory for the parameters of a module that are on `meta`."""
    for key, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            module._parameters[key] = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)


def loss_of(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum of the cross entropies of the unmasked tokens, and the number of these tokens."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    mask = batch["loss_mask"].flatten()
    losses = F.cross_entropy(wide, batch["labels"].flatten(), reduction="none")
    return (losses * mask).sum(), mask.sum()
