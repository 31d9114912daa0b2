"""A mixture of experts on a GPU: its kernels match their plain definitions, the module matches float64 on the CPU, and
the host never waits for the device during a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.device import Device
from meshwright.engine.context import build_context
from meshwright.engine.providers import forward_step, model_provider
from meshwright.engine.step import Trainer
from meshwright.kernels import kernels_take
from meshwright.nn.experts.experts import RoutedInputs, SavedRouting
from meshwright.nn.experts.routing import _largest
from meshwright.nn.unit import recompute
from meshwright.run.pretrain import build_modules
from tests.nn.expert_runs import attach_sinks, in_bf16, one_pass
from tests.nn.fused_cases import BOUNDS, Where, error
from tests.nn.grouped_cases import CASES, COUNTS
from tests.nn.plain_experts import built, drawn
from tests.support.oracle import Made, gather_global, make_trainer, small_config, true_gradients, worst

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.backends.cuda.matmul.allow_tf32 = False
    yield


@contextmanager
def nobody_waits() -> Iterator[None]:
    """Fail if the host waits for the device in here."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("name", list(CASES))
def test_a_kernel_is_its_definition(name: str, dtype: torch.dtype, seed: int) -> None:
    """Inputs that the kernels do not take, such as float64, take the plain path on the GPU too."""
    assert kernels_take(torch.empty(1, dtype=dtype, device=CUDA)) == (dtype != torch.float64)
    assert CASES[name](Where(CUDA, dtype, seed)) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", list(COUNTS))
@pytest.mark.parametrize(("out", "ins"), [(128, 256), (1, 1), (130, 520)])
def test_weight_gradients_are_summed_in_float32(out: int, ins: int, name: str, dtype: torch.dtype) -> None:
    """`add` sums into the existing values. Without it they are overwritten, even if they are NaN."""
    from meshwright.kernels.experts import add_grouped

    at, counts = Where(CUDA, dtype), COUNTS[name]
    ends = torch.tensor(counts, device=CUDA).cumsum(0, dtype=torch.int32)
    x, grad, before = at.draw(sum(counts), ins), at.draw(sum(counts), out), at.draw(len(counts), out, ins).float()
    parts = zip(grad.double().cpu().split(counts), x.double().cpu().split(counts), strict=True)
    expected = torch.stack([g.t() @ part for g, part in parts])
    over, onto = torch.full_like(before, float("nan")), before.clone()
    add_grouped(over, grad, x, ends, add=False)
    add_grouped(onto, grad, x, ends, add=True)
    assert error([(over, expected), (onto, expected + before.double().cpu())]) <= 1e-5


@pytest.mark.parametrize("count", [7, 60, 64])
def test_a_row_that_is_not_finite_chooses_experts_that_exist(count: int) -> None:
    """So the step ends, its gradient is found to be non-finite, and it is skipped."""
    scores = torch.rand(9, count, device=CUDA)
    scores[2], scores[5, 3], scores[7] = float("nan"), float("nan"), float("-inf")
    chosen = _largest(scores, 4)
    assert ((chosen >= 0) & (chosen < count)).all()
    good = [row for row in range(9) if row not in (2, 5, 7)]
    assert torch.equal(chosen[good], scores[good].sort(dim=1, descending=True, stable=True).indices[:, :4])


MIXTURES: dict[str, dict[str, Any]] = {
    "softmax": {"top_k": 2},
    "as DeepSeek-V3": {
        "top_k": 3, "router": "sigmoid", "scale": 2.5, "groups": 4, "groups_used": 2, "shared": 1, "aux_loss": 0.1,
        "z_loss": 0.01,
    },
    "capacity": {"top_k": 2, "capacity": 0.75},
    "one expert gets all": {"top_k": 1, "normalise": False, "bias_balance": 0.001},
}  # fmt: skip


@pytest.mark.parametrize("sinks", [False, True], ids=["autograd", "sinks"])
@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
@pytest.mark.parametrize("name", list(MIXTURES))
def test_the_module_in_bf16(name: str, mlp: str, sinks: bool) -> None:
    """Output, losses and every gradient are within rounding of float64, which follows the choices made in bf16. It
    would have made nearly all of them too.
    """
    found = in_bf16(Device.choose("cuda"), mlp, MIXTURES[name], sinks, favoured="gets all" in name)
    assert max(found.errors.values()) <= found.BOUND, found.errors
    assert found.others <= found.FEW


def test_the_module_in_fp32_and_fp64_is_the_cpus() -> None:
    for precision, bound in (("fp64", 1e-12), ("fp32", 2e-5)):
        keys = {"precision": precision, **MIXTURES["as DeepSeek-V3"]}
        ours, other = built(**keys), built(device=Device("cuda"), **keys)
        x, grad = drawn(14, 12), drawn(14, 12, seed=2)
        expected, found = (one_pass(mixture, x, grad, batch=2) for mixture in (ours, other))
        assert expected.keys() == found.keys()
        assert error([(found[name], value) for name, value in expected.items()]) <= bound


def test_recomputation_changes_no_bit() -> None:
    """The kernels overwrite inner features in backward. Recomputation creates new ones."""
    sizes = {"hidden": 256, "ffn": 192}
    found = []
    for again in (False, True):
        keys = MIXTURES["as DeepSeek-V3"] | {"ffn": 96}
        mixture = built(precision="bf16", device=Device("cuda"), sizes=sizes, **keys)
        views, saved = attach_sinks(mixture), SavedRouting()
        x = drawn(1000, 256).to(CUDA, torch.bfloat16).requires_grad_()

        def run(x: Tensor, again: bool, mixture: Any = mixture, saved: SavedRouting = saved) -> tuple[Tensor, ...]:
            y, losses = mixture(x, 4, RoutedInputs(None, saved, again))
            return y, losses

        y, losses = recompute(run, x) if again else run(x, False)
        torch.autograd.backward((y, losses), (torch.ones_like(y), torch.ones_like(losses)))
        found.append([y, losses, x.grad, mixture.experts.tally, mixture.norm.weight.grad, *views.values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", [name for name in MIXTURES if "gets all" not in name])
def test_the_module_never_waits(name: str) -> None:
    """This holds for forward and backward with ep=1, after one of each."""
    keys = MIXTURES[name] | {"ffn": 96}
    mixture = built(precision="bf16", device=Device("cuda"), sizes={"hidden": 256, "ffn": 192}, **keys)
    views = attach_sinks(mixture)
    x, mask = drawn(1000, 256).to(CUDA, torch.bfloat16), torch.ones(1000, device=CUDA)

    def both() -> None:
        y, losses = mixture(x, 4, RoutedInputs(mask))
        (y.float().sum() if losses is None else y.float().sum() + losses.sum()).backward()

    both()
    with nobody_waits():
        both()
    assert all(view.isfinite().all() for view in views.values())


MODEL = {
    "layers": 3, "hidden": 64, "norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "kv_heads": 2, "bias": False,
    "ffn": 96, "seq": 32,
    "experts": {
        "count": 8, "top_k": 3, "ffn": 32, "shared": 1, "first_dense": 1, "router": "sigmoid", "bias_balance": 0.001,
        "groups": 4, "groups_used": 2, "aux_loss": 0.05, "z_loss": 0.01,
    },
}  # fmt: skip


def gpu_trainer(**train: Any) -> Trainer:
    config = small_config(model=MODEL, train=train)
    ctx = build_context(config, 0, 1, Device.choose("cuda"))
    return Trainer(ctx, build_modules(ctx, model_provider), forward_step, Made(config.model.vocab, config.model.seq))


@pytest.mark.parametrize(("precision", "bound"), [("fp64", 1e-10), ("fp32", 1e-4)])
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_gradients_of_a_model_are_the_cpus(compiled: str, precision: str, bound: float) -> None:
    whole = gather_global(true_gradients(make_trainer(small_config(model=MODEL))))
    trainer = gpu_trainer(precision=precision, compile=compiled)
    largest, name = worst([(record, grad.cpu()) for record, grad in true_gradients(trainer)], whole)
    assert largest <= bound, name


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_step_neither_waits_nor_recompiles(precision: str) -> None:
    """This includes the router's losses, the balancing bias and the tallies of experts, after the first step."""
    trainer = gpu_trainer(precision=precision, compile="true", steps=20, global_batch=4)
    assert trainer.runs_ahead
    trainer.step()
    torch._dynamo.config.error_on_recompile = True
    try:
        with nobody_waits():
            launched = [trainer.launch() for _ in range(4)]
    finally:
        torch._dynamo.config.error_on_recompile = False
    results = [trainer.read(each) for each in launched]
    assert not any(result.skipped for result in results)
    assert all(sum(rows) == 4 * 32 * 3 for result in results for rows in result.experts["rows"])


def test_training_lowers_the_loss() -> None:
    class Repeated(Made):
        def sample(self, n: int) -> dict[str, Any]:
            return super().sample(n % 8)

    config = small_config(
        model=MODEL, train={"precision": "bf16", "compile": "true", "steps": 30, "micro_batch": 4},
        optimizer={"lr": 3e-3}, lr={"warmup": 5},
    )  # fmt: skip
    ctx = build_context(config, 0, 1, Device.choose("cuda"))
    data = Repeated(config.model.vocab, config.model.seq)
    trainer = Trainer(ctx, build_modules(ctx, model_provider), forward_step, data)
    losses = [trainer.step().losses["loss"] for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]
