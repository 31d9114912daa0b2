"""The protocol of update rules: the registry, and rules other than AdamW against their formulas."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch

from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.save import Saver
from meshwright.config.optimizer import RULES, OptimizerConfig, RuleEntry
from meshwright.engine.optim import flat as storage
from meshwright.engine.optim.flat import UpdatePart
from meshwright.engine.optim.rule import MatrixRule, Rule, StateSpec, UpdateStep, rules_of
from meshwright.engine.sharding.remainders import as_tensor
from meshwright.errors import UserError
from meshwright.plan.job import job_of
from meshwright.plan.memory import rank_memory
from meshwright.record.checkpoint_format import list_checkpoints
from tests.engine.test_adam import RATES, Small, drawn_gradients, fill, flat
from tests.support.oracle import load_into, make_trainer, small_config


def test_a_config_accepts_the_names_of_the_registry() -> None:
    for name in RULES:
        assert OptimizerConfig(name=name).name == name
    with pytest.raises(UserError, match="optimizer.name=lyon is not one of .*did you mean 'lion'"):
        small_config(optimizer={"name": "lyon"})


def test_rules_that_share_a_state_are_the_same_class() -> None:
    """Otherwise a run that changes its optimizer would resume from values with another meaning."""
    rules = [rule for name in RULES for rule in rules_of(OptimizerConfig(name=name))[0] if rule is not None]
    names = [state.name for rule in rules for state in rule.states]
    assert len(set(names)) == len(names) and "param" not in names


def test_the_registry_says_which_rules_need_whole_matrices() -> None:
    for name, entry in RULES.items():
        assert entry.whole_matrices == isinstance(rules_of(OptimizerConfig(name=name))[0].matrices, MatrixRule), name


@pytest.mark.parametrize("cut", [7, 2**22])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_lion_equals_its_formula(cut: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of the slices does not matter. bf16 weights follow fp32 masters."""
    monkeypatch.setattr(storage, "SLICE", cut)
    config = OptimizerConfig(name="lion", betas=(0.8, 0.95), weight_decay=0.25)
    module = Small(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    expected = [p.detach().to(wide, copy=True) for p in module.parameters()]
    momenta = [torch.zeros_like(p) for p in expected]
    buffers, optimizer = flat(module, config)
    for step, lr in enumerate(RATES):
        gradients = drawn_gradients(module, step)
        fill(buffers, module, gradients, scale=4.0)
        optimizer.step(lr, divisor=4.0)
        for p, g, m in zip(expected, gradients, momenta, strict=True):
            g = g.to(wide)
            p.mul_(1.0 - lr * (0.25 if p.dim() > 1 else 0.0)).sub_(lr * (0.8 * m + 0.2 * g).sign())
            m.mul_(0.95).add_(0.05 * g)
    for a, b in zip(module.parameters(), expected, strict=True):
        close = {"rtol": 1e-13, "atol": 1e-13} if dtype == torch.float64 else {"rtol": 2e-6, "atol": 2e-6}
        torch.testing.assert_close(a.detach(), b.to(dtype), **({} if dtype == torch.bfloat16 else close))


class HeavyBall(Rule):
    """A rule that the package does not contain: m = b1 m + g; p = p (1 - lr wd) - lr m. Its state stays in fp32."""

    states = (StateSpec("heavy_ball", wide=True),)

    def update(self, parts: Sequence[UpdatePart], decay: float, step: UpdateStep) -> None:
        for part in parts:
            (momentum,) = part.states
            momentum.mul_(self.config.betas[0]).add_(part.grad, alpha=1.0 / step.divisor)
            part.master.mul_(1.0 - step.lr * decay).sub_(momentum, alpha=step.lr)


@pytest.fixture
def heavy_ball(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("heavy_ball_of_a_test")
    module.HeavyBall = HeavyBall  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(RULES, "heavy_ball", RuleEntry(f"{module.__name__}:HeavyBall"))


@pytest.mark.usefixtures("heavy_ball")
def test_a_new_rule_needs_its_class_and_an_entry(tmp_path: Path) -> None:
    """It trains the same from states in a file, its state is in checkpoints, and the planner knows its bytes."""
    places: list[dict[str, object]] = [{}, {"optimizer": "disk", "path": str(tmp_path), "buffer_mib": 0.02}]
    trained = []
    for offload in places:
        optimizer, zero = {"state_dtype": "bf16"}, {"stage": 1, "offload": offload}
        config = small_config(train={"precision": "bf16"}, optimizer=optimizer, zero=zero)
        # The names that a config file may use were fixed at import, before this rule was registered.
        object.__setattr__(config.optimizer, "name", "heavy_ball")
        trained.append(make_trainer(config))
        for _ in range(3):
            trained[-1].step()
    kept, offloaded = ({state.name: state for state in trainer.states()} for trainer in trained)
    assert kept.keys() == offloaded.keys() == {"param", "heavy_ball"}
    for name, state in kept.items():
        for a, b in zip(state.tensors, offloaded[name].tensors, strict=True):
            assert a.dtype == torch.float32 and as_tensor(a).any() and torch.equal(as_tensor(a), as_tensor(b))
    stores = [store for state in trained[0].optimizer.states for store in state.stores[1:]]
    planned = rank_memory(job_of(trained[0].ctx.config, 1), 0).optimizer
    assert planned == sum(share.nbytes for store in stores for share in store.shares)


GROUPS: list[dict[str, object]] = [
    {"match": "*norm*", "decay": 0.3},
    {"match": "embedding.*", "lr": 0.004, "optimizer": "lion"},
    {"match": "layers.1.*", "lr": 0.005, "decay": 0.0},
    {"match": "*", "decay": 0.2},
]


def test_groups_have_their_own_settings() -> None:
    """The first group that matches a parameter applies, and layers need not be alike. The schedule scales all rates."""
    lr, (b1, b2) = 0.002, (0.9, 0.95)
    trainer = make_trainer(small_config(model={"layers": 2}, optimizer={"lr": lr, "groups": GROUPS}))
    slots = [slot for buffer in trainer.data_parallel.buffers for slot in buffer.slots]
    wanted = {slot.name: slot.view.detach().clone() for slot in slots}
    moments = {slot.name: [torch.zeros_like(slot.view) for _ in range(2)] for slot in slots}
    draw = torch.Generator().manual_seed(6)
    counts = [0, 0, 0, 0]
    for step in (1, 2):
        for slot in slots:
            g, name = torch.randn(slot.grad.shape, generator=draw, dtype=torch.float64), slot.record.name
            slot.grad.copy_(g * 7.0)
            p, (m, v) = wanted[slot.name], moments[slot.name]
            # The groups in the order of the config: the first that matches applies.
            matches = ("norm" in name, name.startswith("embedding."), "layers.1." in name, True)
            number = matches.index(True)
            counts[number] += 1
            # The second step is taken at half the peak.
            rate, decay = [(lr, 0.3), (0.004, 0.1), (0.005, 0.0), (lr, 0.2)][number]
            rate /= step
            p.mul_(1 - rate * decay)
            if number == 1:
                p.sub_(rate * (b1 * m + (1 - b1) * g).sign())
                m.mul_(b2).add_(g, alpha=1 - b2)
                continue
            m.mul_(b1).add_(g, alpha=1 - b1)
            v.mul_(b2).add_(g * g, alpha=1 - b2)
            p.sub_(rate * m / (1 - b1**step) / ((v / (1 - b2**step)).sqrt() + 1e-8))
        trainer.optimizer.step(lr / step, divisor=7.0)
    assert all(counts)
    for slot in slots:
        torch.testing.assert_close(slot.view.detach(), wanted[slot.name], rtol=1e-11, atol=1e-12)


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    config = small_config(optimizer={"groups": [{"match": "layers.0.atention.qkv.weight", "lr": 1e-4}]})
    with pytest.raises(UserError, match=r"match=layers.0.atention.qkv.weight matches no parameter \(did you mean "):
        make_trainer(config)
    with pytest.raises(UserError, match=r"optimizer.groups\[\*\].lr=-1.0 must not be negative"):
        small_config(optimizer={"groups": [{"match": "*", "lr": -1}]})


@pytest.mark.parametrize("before, after", [
    ("adamw", "lion"), ("lion", "adamw"), ("adamw", "muon"), ("muon", "adamw"), ("soap", "adafactor"),
    ("adafactor", "soap"),
])  # fmt: skip
def test_another_optimizers_states_begin_anew(before: str, after: str, tmp_path: Path) -> None:
    source = make_trainer(small_config(optimizer={"name": before}))
    source.step()
    saver = Saver(source, tmp_path, asynchronous=False, busy="wait", keep=0)
    saver.save()
    path = list_checkpoints(tmp_path)[-1][1]
    target = make_trainer(small_config(optimizer={"name": after}))
    target.step()
    load_into(target, Reader(path))
    assert target.optimizer.updates == 0
    assert not any(x.any() for state in target.states() if state.name != "param" for x in state.tensors)


def test_an_entry_that_contradicts_its_rule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "wrong", RULES["lion"]._replace(whole_matrices=True))
    with pytest.raises(UserError, match="optimizer.name=wrong is registered with whole_matrices=True"):
        rules_of(OptimizerConfig(name="wrong"))
