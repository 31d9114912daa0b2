"""Divides other programs' modules without changing their code: into units for ZeRO, and by a plan over tp."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm.group import Group
from meshwright.errors import UserError
from meshwright.models.stage import LossCounts, Receives
from meshwright.models.wrapped.calls import gate_members, map_tensors, outer_modules, place, style_of
from meshwright.nn.own_layers import ParallelLayer
from meshwright.nn.parallel import Parallel
from meshwright.nn.unit import GATE, WeightGate, call_in_backward
from meshwright.spec.layout.params import ParamRecord, slices_of
from meshwright.spec.model.part import Coordinate, LossTerm
from meshwright.spec.model.wrapped.parts import PlannedParameter


class AbsentModule(nn.Module):
    """A placeholder for a module that another stage holds. Its forward returns `given` or, without it, its input."""

    def __init__(self, stands_for: nn.Module | None = None) -> None:
        super().__init__()
        self.given: Tensor | None = None
        # The model may read simple attributes of the module, so the placeholder has them too.
        if stands_for is not None:
            public = {key: value for key, value in vars(stands_for).items() if not key.startswith("_")}
            vars(self).update({key: value for key, value in public.items() if isinstance(value, (str, int, float))})

    @property
    def weight(self) -> Tensor | None:
        """A tensor with the dtype and device of an embedding table's weight, which some models read."""
        return self.given

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.given is not None:
            return self.given
        return args[0] if args else next(iter(kwargs.values()))


class UncalledParameters(nn.Module):
    """The unit of the parameters whose module has no call that could gather them.

    They are gathered for a chunk's whole forward.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.held = nn.ParameterList(parameters)


class ModuleGroup(nn.Module):
    """A unit of several modules whose weights are gathered together."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.held = nn.ModuleList(modules)


class ForeignStage(nn.Module):
    """A chunk (`models.stage.StageModule`) around another program's module."""

    draws_by_key = False
    ungraded: Container[str] = ()
    layers: Mapping[int, nn.Module] = MappingProxyType({})
    foreign = True
    losses: Sequence[tuple[LossTerm, int]] = ()
    loss_counts: LossCounts | None = None
    receives: Receives = {}  # noqa: RUF012 (a subclass sets its own)
    needs: set[str] | None = None

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self._units: list[nn.Module] = []
        self.loose: UncalledParameters | None = None

    def divide(self, together: Sequence[str] = ()) -> None:
        """Divide the module into units. The modules that `together` names form one unit.

        This wraps the modules' forwards, so it must follow everything else that changes them.
        """
        units, loose = outer_modules(self.net)
        self._units = [module for name, module in units if name not in together]
        for module in self._units:
            gate_members(module, [module])
        if group := [module for name, module in units if name in together]:
            self._units.append(ModuleGroup(group))
            gate_members(self._units[-1], group)
        self.loose = UncalledParameters([value for _, value in loose]) if loose else None

    def units(self) -> list[nn.Module]:
        return self._units if self.loose is None else [self.loose, *self._units]

    def announce(self, loss_weight: float | None) -> None:
        pass

    def compiled_blocks(self) -> list[nn.Module]:
        return []

    def with_loose(self, run: Callable[[], Any]) -> Any:
        """Call `run` with the loose parameters gathered, in forward and in backward."""
        gate: WeightGate | None = getattr(self.loose, GATE, None) if self.loose is not None else None
        if gate is None:
            return run()
        gate.open()
        result = run()
        # Backward starts at the result, so the parameters are gathered again there.
        return map_tensors(result, lambda xs: call_in_backward(gate.open, *xs))


class WrappedModule(ForeignStage):
    """A user's whole module, which every rank has built alike. With a plan, tp shards it."""

    def __init__(self, net: nn.Module, parallel: Parallel, at: Coordinate, plan: Mapping[str, str]) -> None:
        super().__init__(net)
        layers = [module for module in net.modules() if isinstance(module, ParallelLayer)]
        if at.size("tp") > 1 and not plan and not layers:
            raise UserError(
                f"layout.tp={at.size('tp')} needs layers of meshwright.layers, or a plan with the style of each module "
                'that is cut, as in plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}: use one of them, or '
                "set layout.tp=1"
            )
        made: dict[int, nn.Parameter] = {}
        for path, module in list(net.named_modules()):
            for key, value in list(module._parameters.items()):
                if value is not None:
                    name = f"{path}.{key}" if path else key
                    if id(value) not in made:
                        own = module.styles.get(key) if isinstance(module, ParallelLayer) else None
                        style = own or style_of(name, plan)
                        record = PlannedParameter(name, tuple(value.shape), style).record(at, name)
                        made[id(value)] = local_part(value.data, record, parallel, value.requires_grad)
                    module._parameters[key] = made[id(value)]
        net.to(parallel.device)
        place_all(net, plan, parallel.tp)
        for layer in layers:
            layer.join(parallel)
        self.divide()


def place_all(
    net: nn.Module, plan: Mapping[str, str], tp: Group, rotary: Callable[[str], int] = lambda name: 0
) -> None:
    """Put a plan's calls around every module that it names. `rotary` maps a name to `place`'s argument of that name."""
    for name, module in net.named_modules():
        style = style_of(name, plan, parameter=False)
        if not isinstance(module, AbsentModule) and style:
            place(module, style, tp, rotary(name) if style == "mla_kv_a_proj" else 0)


def local_part(whole: Tensor, record: ParamRecord, parallel: Parallel, trained: bool | None = None) -> nn.Parameter:
    """Return this rank's shard of a parameter, with its record."""
    trained = whole.requires_grad if trained is None else trained
    # A parameter on `meta` has no values to copy.
    if whole.is_meta:
        parameter = parallel.parameter(record)
        if not parallel.unallocated:
            parameter.data.zero_()
        parameter.requires_grad_(trained)
        return parameter
    local = torch.zeros(record.local_shape, dtype=whole.dtype, device=parallel.device)
    for box in record.boxes:
        local[slices_of(box.local_start, box.shape)] = whole[slices_of(box.start, box.shape)].to(parallel.device)
    parameter = nn.Parameter(local, whole.is_floating_point() and trained)
    parameter.record = record  # type: ignore[attr-defined]
    return parameter
