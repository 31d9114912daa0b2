"""Runs a step without computing: tensors on the `meta` device have shapes but no memory, and their bytes are counted.

Inside `with MetaMode() as mode:` everything happens except the arithmetic. Our registered operators run their Python
code, so that collectives are counted and weight gradients arrive. torch's operators are asked once for the output
shapes of given input shapes, and the answer is cached, since torch may take milliseconds to work it out. Attention and
RMS norm take the path of an accelerator, one kernel each, so that the same tensors are saved for backward as there.
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

# The types of an operator's arguments, apart from tensors, that its output shapes may depend on.
PLAIN_TYPES = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_RESIZE, _SDPA = torch.UntypedStorage.resize_, F.scaled_dot_product_attention


# Backward kernels of attention with the arguments (gradient, queries, keys, ...), each [batch, heads, rows, width].
ATTENTION_BACKWARDS = ("aten::_scaled_dot_product_flash_attention_backward", "meshwright::document_attention_backward")


class ResultShape(NamedTuple):
    """The shape of a result, from which a tensor like it can be created."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class ByteCounter:
    """The bytes that are allocated now, and the most that were allocated at once."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def add(self, count: int) -> None:
        self.now += count
        self.most = max(self.most, self.now)


class Storages:
    """All allocated storages and their sizes. `all` counts every storage, `named` only those passed to `name`."""

    def __init__(self) -> None:
        self.all, self.named = ByteCounter(), ByteCounter()
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, Any] = {}
        self._names: set[int] = set()

    def saw(self, x: Tensor) -> None:
        """Count the storage of a tensor until it is freed, unless it is counted already."""
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._alive[key] = weakref.ref(storage, partial(self._on_free, key))
            self._sizes[key] = 0
            self.on_resize(storage)

    def on_resize(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._sizes:
            self._change(key, size - self._sizes[key])
            self._sizes[key] = size

    def count_transient(self, count: int) -> None:
        """Count memory that is released again at once."""
        self.all.add(count)
        self.all.add(-count)

    def name(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of these tensors in `named` too."""
        for key in {x.untyped_storage()._cdata for x in tensors} - self._names:
            self._names.add(key)
            self.named.add(self._sizes.get(key, 0))

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Stop counting the storages of these tensors, which would be offloaded in a real run."""
        for key in {x.untyped_storage()._cdata for x in tensors}:
            self._change(key, -self._sizes[key])
            self._sizes[key] = 0

    def forget(self) -> None:
        """Reset the peaks to the bytes that are allocated now."""
        for counter in (self.all, self.named):
            counter.most = counter.now

    def _on_free(self, key: int, _: object) -> None:
        self._change(key, -self._sizes.pop(key))
        self._names.discard(key)
        del self._alive[key]

    def _change(self, key: int, count: int) -> None:
        self.all.add(count)
        if key in self._names:
            self.named.add(count)


class MetaMode(TorchDispatchMode):
    """A dispatch mode in which operators on `meta` only make shapes. `storages` counts the bytes of all results.

    `accelerated`: also count the workspaces of an accelerator's kernels.
    """

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
            self.storages.on_resize(storage)
            return done

        # On `meta`, torch's own functions would not choose the kernels of an accelerator.
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
            # A wrapped module branches on its data. Assume ordinary data: each sample is one document, every mask is
            # full, and no number is infinite. So `all` is true and `any` is false.
            return not getattr(args[0], "found_by_any", False)
        if func not in self._bodies:
            self._bodies[func] = BODIES.get(func.name())
            self._fresh[func] = _makes_new(func)
        body = self._bodies[func]
        if body is not None:
            # torch disables this mode while the mode handles a call. Enable it again to see the calls of our operators.
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
            out = known.make() if isinstance(known, ResultShape) else tuple(shape and shape.make() for shape in known)
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor) and x.is_meta:
                self.storages.saw(x)
        if func.overloadpacket is torch.ops.aten.any:
            out.found_by_any = True
        if self.accelerated and func.name() in ATTENTION_BACKWARDS:
            self.storages.count_transient(_workspace(*args[1:3]))
        return out

    def _learn(self, key: Any, args: Any, out: Any) -> None:
        """Remember the shapes of an operator's results, if all of them are new tensors."""
        is_tuple = isinstance(out, (tuple, list))
        results = out if is_tuple else (out,)
        inputs = {x.untyped_storage()._cdata for x in args if isinstance(x, Tensor)}
        shapes = []
        for x in results:
            # Not a tensor, or another view of an input.
            if x is not None and (not isinstance(x, Tensor) or not x.is_meta or x.untyped_storage()._cdata in inputs):
                return
            shapes.append(None if x is None else ResultShape(tuple(x.shape), x.stride(), x.dtype))
        if is_tuple:
            self._known[key] = tuple(shapes)
        elif shapes[0] is not None:
            self._known[key] = shapes[0]


def _makes_new(func: Any) -> bool:
    """Return True if this is an operator of torch that returns new tensors and changes none."""
    schema = func._schema
    parts = (*schema.arguments, *schema.returns)
    return func.namespace == "aten" and bool(schema.returns) and all(part.alias_info is None for part in parts)


def _key(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return a key of everything that the result's shapes depend on; None if that can't be determined."""
    parts: list[Any] = [func]
    return tuple(parts) if _describe(parts, args) and _describe(parts, kwargs.items()) else None


def _describe(parts: list[Any], values: Iterable[Any]) -> bool:
    """Append a description of each value to `parts`. Return False if a value is of another kind."""
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
    """Return the bytes that the backward kernel of flash attention allocates for itself; 0 outside half precision."""
    batch, heads, rows, width = q.shape
    return kernel_workspace(batch * rows, heads, k.shape[1], width, 2) if q.element_size() == 2 else 0


class _RmsNorm(torch.autograd.Function):
    """An RMS norm on `meta` with the inputs, outputs and saved tensors of CUDA's kernel."""

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
    """Call the kernel that CUDA would choose.

    That is flash attention in half precision without a mask, otherwise memory-efficient attention, and no fused kernel
    in float64.
    """
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
    """Counts the storages that are saved for backward, by autograd or for a deferred weight gradient.

    Storages of the `persistent` tensors are left out.
    """

    def __init__(self, persistent: Iterable[Tensor]) -> None:
        self.bytes = ByteCounter()
        self._persistent = {x.untyped_storage()._cdata for x in persistent}
        self._uses: dict[int, int] = {}
        super().__init__(self._pack, lambda saved: saved.x if isinstance(saved, _Saved) else saved)

    def __enter__(self) -> None:
        original = self._original = Deferred.detach

        def counted(deferred: Deferred, x: Tensor) -> Tensor:
            saved = original(deferred, x)
            # The count is an attribute of the saved tensor, so that both live equally long.
            saved.counted = self._pack(saved.detach())  # type: ignore[attr-defined]
            return saved

        Deferred.detach = counted  # type: ignore[method-assign, assignment]
        super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        Deferred.detach = self._original  # type: ignore[method-assign]

    def _pack(self, x: Tensor) -> Any:
        storage = x.untyped_storage()
        return x if storage._cdata in self._persistent else _Saved(self, x, storage)

    def use(self, key: int, size: int, by: int) -> None:
        """Change the number of uses of a storage by `by`. Its bytes count once while it has any use."""
        before = self._uses.get(key, 0)
        self._uses[key] = before + by
        if before == 0:
            self.bytes.add(size)
        elif before + by == 0:
            self.bytes.add(-size)


class _Saved:
    """A tensor that is saved for backward. Its storage is in use as long as this object lives."""

    def __init__(self, owner: SavedBytes, x: Tensor, storage: torch.UntypedStorage) -> None:
        self.owner = owner
        self.x = x
        self.key = storage._cdata
        self.size = storage.nbytes()
        owner.use(self.key, self.size, 1)

    def __del__(self) -> None:
        self.owner.use(self.key, self.size, -1)
