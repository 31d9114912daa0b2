"""The fast paths on a GPU: kernels match their plain definitions, gradients match the CPU's, and a step neither
recompiles nor waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from meshwright.config.optimizer import OptimizerConfig
from meshwright.config.sections import Config
from meshwright.device import Device
from meshwright.dryrun.stand_ins import fake_world, stand_in
from meshwright.engine.context import build_context
from meshwright.engine.providers import forward_step, model_provider
from meshwright.engine.sharding.remainders import as_tensor
from meshwright.engine.step import Trainer
from meshwright.kernels import kernels_take
from meshwright.nn import fused
from meshwright.nn.adapters.adapters import add_low_rank
from meshwright.nn.adapters.nf4 import pack, unpack
from meshwright.plan.communication import Line, Traffic, predict_rank
from meshwright.run.loop import LaunchAhead
from meshwright.run.pretrain import build_modules
from tests.nn.fused_cases import BOUNDS, CASES, Where, fp8_keeps_what_is_not_finite, fp8_products
from tests.support.oracle import Made, gather_global, make_trainer, small_config, true_gradients, worst

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "kv_heads": 2, "bias": False, "ffn": 48}
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.backends.cuda.matmul.allow_tf32 = False
    yield


def gpu_trainer(config: Config, rank: int = 0, world: int = 1) -> Trainer:
    ctx = build_context(config, rank, world, Device.choose("cuda"))
    return Trainer(ctx, build_modules(ctx, model_provider), forward_step, Made(config.model.vocab, config.model.seq))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("name", list(CASES))
def test_a_kernel_is_its_definition(name: str, dtype: torch.dtype, seed: int) -> None:
    assert CASES[name](Where(CUDA, dtype, seed)) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1000, 2048, 4096, 4104, 8192, 12288, 20480])
def test_rms_norm_of_any_width(width: int, dtype: torch.dtype) -> None:
    """Rows are read ahead if shared memory has room for them."""
    torch.manual_seed(width)
    x, grad, passed = (torch.randn(700, width, device=CUDA, dtype=dtype) for _ in range(3))
    weight = torch.randn(width, device=CUDA, dtype=dtype)
    assert kernels_take(x, grad, passed)
    normed, rstd = fused.rms_norm_in_one_pass(x, weight, 1e-5)
    found = (normed, rstd, *fused.rms_norm_backward(x, rstd, weight, grad, passed))
    wide = [part.cpu().double() for part in (x, rstd, weight, grad, passed)]
    expected = (*fused.rms_norm(wide[0], wide[2], 1e-5), *fused.rms_norm_backward(*wide))
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    for part, true in zip(found, expected, strict=True):
        assert float((part.cpu() - true).norm() / true.norm()) <= bound


@pytest.mark.parametrize("kind", ["fp8", "fp8-row"])
def test_fp8_products_are_the_emulated_ones(kind: str) -> None:
    assert fp8_products(Where(CUDA, torch.bfloat16), kind) < 1e-2


@pytest.mark.parametrize("kind", ["fp8", "fp8-row"])
def test_what_is_not_finite_stays_so_in_fp8(kind: str) -> None:
    assert fp8_keeps_what_is_not_finite(Where(CUDA, torch.bfloat16), kind)


@pytest.mark.parametrize("low", [None, torch.bfloat16])
def test_the_optimizer_pass_is_adamw(low: torch.dtype | None) -> None:
    from meshwright.kernels.adamw import adamw

    size, c, lr, inverse = 5003, OptimizerConfig(), 1e-2, 0.25
    torch.manual_seed(1)
    master, grads = torch.randn(size, device=CUDA), [torch.randn(size, device=CUDA) for _ in range(3)]
    exact = master.double().clone().requires_grad_()
    other = torch.optim.AdamW([exact], lr=lr, betas=(c.betas[0], c.betas[1]), eps=c.eps, weight_decay=c.weight_decay)
    first, second = torch.zeros_like(master), torch.zeros_like(master)
    weights = None if low is None else torch.zeros(size, dtype=low, device=CUDA)
    for step, grad in enumerate(grads, 1):
        exact.grad = inverse * grad.double()
        other.step()
        for update in (1.0, 0.0):  # The second one must leave everything as it is.
            kept = [x.clone() for x in (master, first, second)]
            numbers = torch.tensor([update, inverse, *(1 - b**step for b in c.betas)], device=CUDA)
            betas = (c.betas[0], c.betas[1])
            adamw(master, grad, first, second, weights, numbers, lr=lr, betas=betas, eps=c.eps, decay=c.weight_decay)
            if not update:
                assert all(torch.equal(x, y) for x, y in zip(kept, (master, first, second), strict=True))
    assert float((master - exact).detach().norm() / exact.detach().norm()) < 1e-6
    assert weights is None or torch.equal(weights, master.to(weights.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_weights_in_four_bits_have_the_values_of_the_plain_definition(dtype: torch.dtype) -> None:
    packed = pack(torch.randn(70, 4096 + 192))
    assert torch.equal(unpack(packed.to(CUDA), dtype).cpu(), unpack(packed, dtype))


@pytest.mark.parametrize("rank", [4, 16, 40, 64])
@pytest.mark.parametrize("turned", [False, True])
def test_low_rank_changes_are_added(rank: int, turned: bool) -> None:
    rows, spans = 1000, [8, 520, 520, 777]
    y, short = (torch.randn(rows, n, device=CUDA, dtype=torch.bfloat16) for n in (800, 2 * rank))
    ups = [torch.randn(stop - start, rank, device=CUDA, dtype=torch.bfloat16) for start, stop in ((8, 520), (520, 777))]
    if turned:
        ups = [up.t().contiguous().t() for up in ups]
    exact = y.double()
    for part, up, start in zip(short.double().chunk(2, 1), ups, spans[::2], strict=True):
        exact[:, start : start + len(up)] += 0.5 * part @ up.double().t()
    add_low_rank(y, short, ups, spans, 0.5)
    assert float((y - exact).norm() / exact.norm()) < 3e-3  # Rounding to bf16 explains this.
    assert torch.equal(y[:, :8], exact[:, :8].bfloat16()) and torch.equal(y[:, 777:], exact[:, 777:].bfloat16())


@pytest.mark.parametrize("kinds", ["master", "moments", "grad", "moments grad", "master moments grad"])
def test_the_optimizer_pass_rounds_to_what_is_stored(kinds: str) -> None:
    from meshwright.kernels.adamw import adamw

    size, c = 5003, OptimizerConfig()
    torch.manual_seed(1)
    kept = [torch.bfloat16 if kind in kinds else torch.float32 for kind in ("master", "grad", "moments", "moments")]
    narrow = [torch.rand(size, device=CUDA).to(dtype) for dtype in kept]
    wide = [x.float().clone() for x in narrow]
    numbers = torch.tensor([1.0, 0.25, *(1 - b**3 for b in c.betas)], device=CUDA)
    for tensors in (narrow, wide):
        adamw(*tensors, None, numbers, lr=1e-2, betas=c.betas[:2], eps=c.eps, decay=c.weight_decay)  # type: ignore[misc]
    for one, other, dtype in zip(narrow, wide, kept, strict=True):
        assert one.dtype == dtype and torch.allclose(one.float(), other, rtol=torch.finfo(dtype).eps, atol=0.0)


@pytest.mark.parametrize("decays", [True, False])
def test_one_pass_updates_weights_that_decay_and_others(decays: bool) -> None:
    """The decay changes at the ends, at the beginning of a block, several times in a block, and not at all in many
    blocks.
    """
    from meshwright.kernels.adamw import adamw

    size, flips = 20011, (1, 5, 6, 1024, 2048, 2050, 3000, 11111, 11112, 20010)
    torch.manual_seed(3)
    given = [torch.randn(size, device=CUDA), torch.randn(size, device=CUDA), *torch.rand(2, size, device=CUDA)]
    numbers = torch.tensor([1.0, 0.5, 0.1, 0.01], device=CUDA)
    how: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8}
    found = [x.clone() for x in given]
    adamw(*found, None, numbers, **how, decay=0.3, decays=decays, flips=flips)  # type: ignore[call-arg]
    expected = [x.clone() for x in given]
    for number, (low, high) in enumerate(zip((0, *flips), (*flips, size), strict=True)):
        decay = 0.3 if (number % 2 == 0) == decays else 0.0
        adamw(*(x[low:high] for x in expected), None, numbers, **how, decay=decay)  # type: ignore[call-arg]
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-4), ("bf16", 0.05), ("fp8", 0.2)])
def test_gradients_of_a_compiled_model(precision: str, bound: float) -> None:
    """fp32 is compared with the CPU. bf16 and fp8 are within their rounding of float64, by the norm of the worst
    parameter.
    """
    model = LLAMA | {"hidden": 128, "ffn": 192, "seq": 32}
    whole = gather_global(true_gradients(make_trainer(small_config(model=model))))
    trainer = gpu_trainer(small_config(model=model, train={"precision": precision, "compile": "true"}))
    found = [(record, grad.cpu()) for record, grad in true_gradients(trainer)]
    error, name = worst(found, whole)
    assert error <= bound, name


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp32"])
def test_a_step_neither_waits_nor_recompiles(precision: str) -> None:
    """This holds over a ramp of the batch size, after the first step."""
    config = small_config(
        model=LLAMA | {"ffn": 64}, lr={"warmup": 3},
        train={"precision": precision, "compile": "true", "steps": 20, "ramp": [2, 2, 16], "global_batch": 8},
    )  # fmt: skip
    trainer = gpu_trainer(config)
    assert trainer.runs_ahead and kernels_take(trainer.data_parallel.buffers[0].grads)
    trainer.step()
    torch._dynamo.config.error_on_recompile = True
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = [trainer.launch() for _ in range(8)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch._dynamo.config.error_on_recompile = False
    results = [trainer.read(each) for each in launched]
    assert len({r.global_batch for r in results}) > 2 and not any(r.skipped for r in results)


def test_results_read_late_are_the_same() -> None:
    config = small_config(model=LLAMA, train={"precision": "bf16", "compile": "false", "steps": 6})
    trainer, other = gpu_trainer(config), gpu_trainer(config)
    ahead = LaunchAhead(other, lambda step: step in (3, 6))
    for step in range(1, 7):
        now, late = trainer.step(), ahead.next(stop_requested=step == 5)
        assert (now.step, now.loss, now.grad_norm) == (late.step, late.loss, late.grad_norm)
        # Step 6 was launched with the request, when step 5 was read. Nothing runs beyond the step that reports the
        # stop.
        assert late.stop == (step == 6)
        assert other.step_number == (step if step in (3, 6) else step + 1)
    assert trainer.optimizer.updates == other.optimizer.updates == 6


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    trainer = gpu_trainer(small_config(model=LLAMA, train={"precision": "bf16", "compile": "false"}))
    trainer.step()
    before = [as_tensor(share).clone() for state in trainer.optimizer.states for share in state.master]
    trainer.before_update = lambda: None
    weight = trainer.modules[0].blocks["0"].mlp.down.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("inf"))
    assert trainer.step().skipped
    with torch.no_grad():
        weight.copy_(kept)  # The weight is one half of its master.
    after = [as_tensor(share) for state in trainer.optimizer.states for share in state.master]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not trainer.step().skipped and trainer.optimizer.updates == 2


def one_of_a_fake_world(config: Config, world: int) -> dict[Line, Traffic]:
    with fake_world(0, world):
        trainer = gpu_trainer(config, 0, world)
        for _ in range(2):
            trainer.step()
        found: dict[Line, Traffic] = {}
        for entry, tally in trainer.ctx.ledger.entries.items():
            line = Line(entry.phase, entry.axis, entry.op)
            more = Traffic(tally.calls, tally.payload_bytes, tally.wire_bytes)
            found[line] = found.get(line, Traffic()).plus(more)
        return found


def share_gradients(device: Device, precision: str, compiled: str, sequence_parallel: bool) -> dict[str, torch.Tensor]:
    """Return the gradients of the first of two tp ranks. A stand-in replaces its partner, with the same numbers on
    every device.
    """
    layout = {"tp": 2, "sequence_parallel": sequence_parallel}
    model = LLAMA | {"hidden": 64, "ffn": 96}
    config = small_config(model=model, layout=layout, train={"precision": precision, "compile": compiled})
    with fake_world(0, 2):
        ctx = build_context(config, 0, 2, device)
        stand_in(ctx.mesh)
        data = Made(config.model.vocab // 2, config.model.seq)
        trainer = Trainer(ctx, build_modules(ctx, model_provider), forward_step, data)
        return {record.name: grad.cpu() for record, grad in true_gradients(trainer)}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_of_a_tensor_parallel_share(sequence_parallel: bool) -> None:
    expected = share_gradients(Device("cpu"), "fp64", "false", sequence_parallel)
    found = share_gradients(Device.choose("cuda"), "fp32", "true", sequence_parallel)
    assert expected.keys() == found.keys()
    for name, grad in expected.items():
        assert float((found[name] - grad).norm() / grad.norm()) <= 1e-4, name


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_ledger_of_fast_paths_equals_the_formulas(precision: str, sequence_parallel: bool) -> None:
    """One compiled rank of four runs, with stand-ins for its partners."""
    layout: dict[str, Any] = {"tp": 2, "sequence_parallel": sequence_parallel}
    config = small_config(
        model=LLAMA | {"ffn": 64}, layout=layout, train={"precision": precision, "compile": "true", "global_batch": 8}
    )
    assert one_of_a_fake_world(config, 4) == predict_rank(config, 4, 0)
