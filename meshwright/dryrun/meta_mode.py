"""Running without computing: tensors on the `meta` device have shapes but no memory, and we count the bytes that they
would take.

Inside of `with MetaMode() as mode:` everything happens but the arithmetic. Our own registered operators run their
Python, so that collectives are counted and weight gradients arrive. torch's operators are asked once for the output
shapes of given input shapes, and their answer is remembered: torch needs up to milliseconds to work it out. Attention
and RMS norm take the path of an accelerator, one kernel each, so that what is kept for backward is what is kept there.
Storages are counted while they are alive, which gives the peak that an allocator would report.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.comm.registered import BODIES
from meshwright.nn.weight_grad import Deferred
from meshwright.spec.model.gpt import kernel_workspace

# The types of an operator's arguments, besides tensors, that its output shapes may depend on.
PLAIN_TYPES = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_RESIZE, _SDPA = torch.UntypedStorage.resize_, F.scaled_dot_product_attention


# Kernels of attention's gradients that take (gradient, queries, keys, ...), each [batch, heads, rows, width].
ATTENTION_BACKWARDS = ("aten::_scaled_dot_product_flash_attention_backward", "meshwright::document_attention_backward")


class ResultShape(NamedTuple):
    """The shape of a result, from which a tensor like it can be created."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class ByteCounter:
    """The bytes that are held now, and the most that were held at once."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def add(self, count: int) -> None:
        self.now += count
        self.most = max(self.most, self.now)


class Storages:
    """Every storage that is allocated, with its size. `all` counts every one, `named` only the chosen ones."""

    def __init__(self) -> None:
        self.all, self.named = ByteCounter(), ByteCounter()
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, Any] = {}
        self._names: set[int] = set()

    def saw(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._alive[key] = weakref.ref(storage, partial(self._freed, key))
            self._sizes[key] = 0
            self.resized(storage)

    def resized(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._sizes:
            self._change(key, size - self._sizes[key])
            self._sizes[key] = size

    def passing(self, count: int) -> None:
        """Counts memory that is released again at once."""
        self.all.add(count)
        self.all.add(-count)

    def name(self, tensors: Iterable[Tensor]) -> None:
        for key in {x.untyped_storage()._cdata for x in tensors} - self._names:
            self._names.add(key)
            self.named.add(self._sizes.get(key, 0))

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Stops counting what would be offloaded in a real run."""
        for key in {x.untyped_storage()._cdata for x in tensors}:
            self._change(key, -self._sizes[key])
            self._sizes[key] = 0

    def forget(self) -> None:
        """Resets the peaks to what is held now."""
        for tally in (self.all, self.named):
            tally.most = tally.now

    def _freed(self, key: int, _: object) -> None:
        self._change(key, -self._sizes.pop(key))
        self._names.discard(key)
        del self._alive[key]

    def _change(self, key: int, count: int) -> None:
        self.all.add(count)
        if key in self._names:
            self.named.add(count)


class MetaMode(TorchDispatchMode):
    """`accelerated`: what an accelerator's kernels allocate for themselves is counted too."""

    def __init__(self, accelerated: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.accelerated = accelerated
        self.storages = Storages()
        self._bodies: dict[Any, Callable[..., Any] | None] = {}
        self._fresh: dict[Any, bool] = {}
        self._known: dict[Any, ResultShape | tuple[ResultShape | None, ...]] = {}
        self._replaced = ExitStack()

    def __enter__(self) -> MetaMode:
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            # Releasing a storage under a tensor that stays is not an operator, so no mode sees it.
            done = _RESIZE(storage, size)
            self.storages.resized(storage)
            return done

        attention = (F, "scaled_dot_product_attention", _attention)
        for owner, name, new in (attention, (F, "rms_norm", _rms_norm), (torch.UntypedStorage, "resize_", resize_)):
            self._replaced.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, new)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._replaced.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool:
            # A wrapped module branches on its data, in which nothing is out of the ordinary: each sample is one
            # document, every mask is full, and no number is infinite. So `all` is true and `any` is false.
            return not getattr(args[0], "found_by_any", False)
        if func not in self._bodies:
            self._bodies[func] = BODIES.get(func.name())
            self._fresh[func] = _makes_new(func)
        body = self._bodies[func]
        if body is not None:
            # Torch sets this mode aside while it handles a call, but it must also see what our operators call.
            super().__enter__()  # type: ignore[no-untyped-call]
            try:
                return body(*args, **kwargs)
            finally:
                super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        key = _key(func, args, kwargs) if self._fresh[func] else None
        known = self._known.get(key) if key is not None else None
        if known is None:
            out = func(*args, **kwargs)
            if key is not None:
                self._learn(key, args, out)
        else:
            out = known.make() if isinstance(known, ResultShape) else tuple(one and one.make() for one in known)
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor) and x.is_meta:
                self.storages.saw(x)
        if func.overloadpacket is torch.ops.aten.any:
            out.found_by_any = True
        if self.accelerated and func.name() in ATTENTION_BACKWARDS:
            self.storages.passing(_workspace(*args[1:3]))
        return out

    def _learn(self, key: Any, args: Any, out: Any) -> None:
        several = isinstance(out, (tuple, list))
        results = out if several else (out,)
        given = {x.untyped_storage()._cdata for x in args if isinstance(x, Tensor)}
        made = []
        for x in results:
            if x is not None and (not isinstance(x, Tensor) or not x.is_meta or x.untyped_storage()._cdata in given):
                return  # not a tensor, or another view of an input
            made.append(None if x is None else ResultShape(tuple(x.shape), x.stride(), x.dtype))
        if several:
            self._known[key] = tuple(made)
        elif made[0] is not None:
            self._known[key] = made[0]


def _makes_new(func: Any) -> bool:
    """Returns whether this is an operator of torch that returns new tensors and changes none."""
    schema = func._schema
    parts = (*schema.arguments, *schema.returns)
    return func.namespace == "aten" and bool(schema.returns) and all(part.alias_info is None for part in parts)


def _key(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Returns everything that the result's shapes depend on; None where we can't tell."""
    parts: list[Any] = [func]
    return tuple(parts) if _describe(parts, args) and _describe(parts, kwargs.items()) else None


def _describe(parts: list[Any], values: Iterable[Any]) -> bool:
    for x in values:
        if isinstance(x, Tensor):
            if not x.is_meta:
                return False
            parts.append((x.shape, x.stride(), x.dtype))
        elif isinstance(x, (list, tuple)):
            parts.append(len(x))
            if not _describe(parts, x):
                return False
        elif isinstance(x, PLAIN_TYPES):
            parts.append((type(x), x))
        else:
            return False
    return True


def _workspace(q: Tensor, k: Tensor) -> int:
    batch, heads, rows, width = q.shape
    return kernel_workspace(batch * rows, heads, k.shape[1], width, 2) if q.element_size() == 2 else 0


class _RmsNorm(torch.autograd.Function):
    """An RMS norm with the inputs, outputs and saved tensors of CUDA's kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=wide))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
    out: Tensor = _RmsNorm.apply(x, weight)  # type: ignore[no-untyped-call]
    return out


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    enable_gqa: bool = False, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Calls the kernel that CUDA would choose: flash attention in half precision without a mask, memory-efficient
    attention otherwise, and none in float64."""
    aten: Any = torch.ops.aten
    out: Tensor
    if q.dtype == torch.float64:
        return _SDPA(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is None and q.element_size() == 2:
        out = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
        return out
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    if attn_mask is not None:
        added = attn_mask if attn_mask.dtype == q.dtype else attn_mask.new_empty(attn_mask.shape, dtype=q.dtype)
        attn_mask = added.expand(*q.shape[:3], k.shape[2])
    out = aten._scaled_dot_product_efficient_attention(q, k, v, attn_mask, True, dropout_p, is_causal)[0]
    return out


class SavedBytes(saved_tensors_hooks):
    """Counts the storages that are kept for backward, by autograd or for a deferred weight gradient, except those of
    `lasting` tensors."""

    def __init__(self, lasting: Iterable[Tensor]) -> None:
        self.bytes = ByteCounter()
        self._lasting = {x.untyped_storage()._cdata for x in lasting}
        self._uses: dict[int, int] = {}
        super().__init__(self._pack, lambda saved: saved.x if isinstance(saved, _Saved) else saved)

    def __enter__(self) -> None:
        plain = self._plain = Deferred.kept

        def kept(deferred: Deferred, x: Tensor) -> Tensor:
            found = plain(deferred, x)
            found.counted = self._pack(found.detach())  # type: ignore[attr-defined] # which lives as long as `found`
            return found

        Deferred.kept = kept  # type: ignore[method-assign, assignment]
        super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        Deferred.kept = self._plain  # type: ignore[method-assign]

    def _pack(self, x: Tensor) -> Any:
        storage = x.untyped_storage()
        return x if storage._cdata in self._lasting else _Saved(self, x, storage)

    def use(self, key: int, size: int, by: int) -> None:
        before = self._uses.get(key, 0)
        self._uses[key] = before + by
        if before == 0:
            self.bytes.add(size)
        elif before + by == 0:
            self.bytes.add(-size)


class _Saved:
    def __init__(self, owner: SavedBytes, x: Tensor, storage: torch.UntypedStorage) -> None:
        self.owner, self.x, self.key, self.size = owner, x, storage._cdata, storage.nbytes()
        owner.use(self.key, self.size, 1)

    def __del__(self) -> None:
        self.owner.use(self.key, self.size, -1)
