"""Weights in 4 bits: the distance that values move, and the bytes of a cut weight, which are those of the whole one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from meshwright.errors import UserError
from meshwright.nn.adapters.nf4 import LEVELS, pack, round_by_packing, unpack, weight_values
from meshwright.spec.layout.packed import packed_record, row_bytes
from meshwright.spec.layout.params import Init, ParamRecord, columns_of, rows_of, slices_of


def test_values_move_by_at_most_half_a_gap_of_the_levels() -> None:
    torch.manual_seed(0)
    values = torch.randn(96, 192).bfloat16()
    values[3, 64:128] = 0.0
    packed = pack(values)
    assert packed.shape == (96, row_bytes(192)) and packed.dtype == torch.uint8
    blocks, found = values.float().unflatten(1, (-1, 64)), round_by_packing(values.float()).unflatten(1, (-1, 64))
    largest = blocks.abs().amax(2, keepdim=True)
    gap = max(b - a for a, b in zip(LEVELS, LEVELS[1:], strict=False))
    error = (found - blocks).abs() / largest.clamp(min=1e-9)
    assert 0.5 * 0.9 * gap < error.max() <= 0.5 * gap * (1 + 1e-6)
    assert error.square().mean().sqrt() < 0.04  # The values are normal, and the levels are their quantiles.
    assert torch.equal(found.abs().amax(2, keepdim=True), largest)  # Scales of bfloat16 weights are exact.
    nearest = (blocks / largest.clamp(min=1e-9))[..., None].sub(torch.tensor(LEVELS)).abs().amin(-1)
    torch.testing.assert_close(error, nearest, rtol=0, atol=1e-6)


def test_levels_are_stored_exactly_and_in_their_order() -> None:
    values = torch.tensor(LEVELS * 8).view(2, 64) * 0.5
    packed = pack(values)
    # bitsandbytes uses the same order.
    assert packed[0, :8].tolist() == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert torch.equal(unpack(packed, dtype), values.to(dtype))


def test_a_compiler_keeps_no_values_for_backward() -> None:
    """torch.compile finds equal expressions in forward and backward, and would save their value in between."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(weight)
            return x @ weight_values(weight, x.dtype).t()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return grad @ weight_values(ctx.saved_tensors[0], grad.dtype, again=True), None

    kept: list[torch.Size] = []

    def look(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        results = next(node for node in graph.graph.nodes if node.op == "output").args[0]
        kept.extend(node.meta["val"].shape for node in results if node is not None)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=look, partition_fn=min_cut_rematerialization_partition)
    x, weight = torch.randn(5, 128, requires_grad=True), torch.randn(96, 128)
    y = torch.compile(Product.apply, backend=backend, fullgraph=True)(x, pack(weight))
    y.sum().backward()
    assert (5, 96) in kept and (96, 128) not in kept
    torch.testing.assert_close(x.grad, round_by_packing(weight).sum(0).expand(5, -1))


def _parts() -> list[ParamRecord]:
    whole = Init("zeros")
    halves = [columns_of("w", 6, 256, 2, index, whole) for index in (0, 1)]
    return [*halves, rows_of("w", ((1, 2, 0), (4, 2, 2)), 6, (256,), whole)]


@pytest.mark.parametrize("record", _parts(), ids=["left", "right", "rows"])
def test_a_part_of_a_weight_has_the_bytes_of_the_whole_one(record: ParamRecord) -> None:
    torch.manual_seed(1)
    whole = torch.randn(6, 256)
    local = torch.zeros(record.local_shape)
    for box in record.boxes:
        local[slices_of(box.local_start, box.shape)] = whole[slices_of(box.start, box.shape)]
    bytes_of, packed, own = packed_record(record), pack(whole), pack(local)
    assert own.shape == bytes_of.local_shape and packed.shape == bytes_of.shape and bytes_of.values == record
    covered = 0
    for box in bytes_of.boxes:
        found = own[slices_of(box.local_start, box.shape)]
        assert torch.equal(found, packed[slices_of(box.start, box.shape)])
        covered += found.numel()
    assert covered == own.numel()


def test_a_cut_inside_a_block_is_refused() -> None:
    with pytest.raises(UserError, match="blocks of 64 values, and a rank holds 32 of the 64 inputs of w"):
        packed_record(columns_of("w", 4, 64, 2, 0, Init("zeros")))
