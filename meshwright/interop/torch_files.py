"""Read the files that torch.save wrote, without unpickling them.

Such a file is a zip archive: one pickle that describes a tree of values, and the bytes of every storage beside it. A
pickle is a program, and Python's and torch's readers run it: it may call any function. The interpreter here runs the
instructions that build plain values. A class or function in the file is only a name. The few that describe tensors and
containers are understood. Others of the libraries that write checkpoints become an `Opaque` value, and all the rest is
an error. Nothing named in a file is ever imported or called.
"""

from __future__ import annotations

import io
import math
import os
import pickletools
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.errors import UserError, shorten

DTYPES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}  # fmt: skip

# Modules whose objects checkpoints hold beside tensors: settings, random states, loss scalers. They stay opaque.
OPAQUE = (
    "torch", "megatron", "deepspeed", "transformer_engine", "apex", "transformers", "accelerate", "numpy", "argparse",
    "collections", "copyreg", "_codecs", "pathlib", "datetime", "enum", "types", "omegaconf", "typing",
)  # fmt: skip
# Builtins that are classes of values. Functions such as `eval` and `getattr` are not among them.
PLAIN = ("set", "frozenset", "list", "dict", "tuple", "int", "float", "bool", "str", "bytes", "bytearray", "complex",
         "slice", "range", "object")  # fmt: skip


@dataclass(frozen=True)
class Named:
    """A class or function that a pickle names."""

    module: str
    name: str

    @property
    def full(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Opaque:
    """An object of a class that is not understood: the class, its arguments, and the state that it would get."""

    kind: Named
    args: Any = ()
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)

    @property
    def fields(self) -> dict[str, Any]:
        """The attributes by name; empty if the object has another kind of state."""
        state = self.state[0] if isinstance(self.state, tuple) and self.state else self.state
        return state if isinstance(state, dict) else {}


@dataclass(frozen=True)
class Storage:
    """The bytes of a storage in a file."""

    file: TorchFile
    key: str
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class TorchTensor:
    """A tensor in a file. Its values are read when they are asked for, as a view of the mapped file if possible."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def read(self) -> Tensor:
        data = self.storage.file.storage(self.storage.key)
        size = self.dtype.itemsize
        # The furthest element; a tensor without elements has none.
        last = self.offset + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype)
        if (last + 1) * size > len(data):
            raise self.storage.file.broken(f"a tensor of shape {list(self.shape)} lies outside of its storage")
        data = data[: len(data) // size * size]
        # A view as a wider dtype must be aligned.
        if data.ctypes.data % size:
            data = data.copy()
        return torch.from_numpy(data).view(self.dtype).as_strided(self.shape, self.strides, self.offset)


class TorchFile:
    """A file of torch.save, or the bytes of one within another file."""

    def __init__(self, path: Path, data: np.ndarray[Any, Any] | None = None) -> None:
        self.path = path
        try:
            # `mode="c"` is copy-on-write: torch warns about read-only memory.
            self._data = np.memmap(path, dtype=np.uint8, mode="c") if data is None else data
            source: Any = path if data is None else io.BytesIO(self._data.tobytes())
            with zipfile.ZipFile(source) as archive:
                self._entries = {entry.filename: entry for entry in archive.infolist()}
                (description,) = [name for name in self._entries if name.endswith("data.pkl")]
                self._folder = description.removesuffix("data.pkl")
                if any(entry.compress_type for entry in self._entries.values()):
                    raise self.broken("it is compressed")
                order = f"{self._folder}byteorder"
                if order in self._entries and archive.read(order) != b"little":
                    raise self.broken("its numbers are big-endian")
                text = archive.read(description)
        except zipfile.BadZipFile:
            raise self.broken("it is not a zip archive, as torch.save writes since version 1.6") from None
        except ValueError:
            raise self.broken("it holds no data.pkl") from None
        except OSError as error:
            raise UserError(f"{path} can't be read ({error.strerror or error}): get it again") from None
        self.value = interpret(text, path, self)

    def broken(self, why: str) -> UserError:
        return broken(self.path, why)

    def storage(self, key: str) -> np.ndarray[Any, Any]:
        """Return the bytes of a storage, as a part of the mapped file."""
        entry = self._entries.get(f"{self._folder}data/{key}")
        if entry is None:
            raise self.broken(f"it lacks the storage {shorten(key, 40)}")
        # The lengths of the name and of the padding stand in the entry's own header, not in the archive's directory.
        at = entry.header_offset
        header = self._data[at : at + 30].tobytes()
        begin = at + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        if header[:4] != b"PK\x03\x04" or begin + entry.file_size > len(self._data):
            raise self.broken(f"the storage {shorten(key, 40)} lies outside of it")
        return self._data[begin : begin + entry.file_size]


def broken(path: Path, why: str) -> UserError:
    return UserError(f"{path} can't be read ({why}): get it again, or save it again with a current torch")


def _mapping(pairs: Any = ()) -> dict[Any, Any]:
    return dict(pairs)


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any, dtype: Any = None) -> TorchTensor:
    numbers = [offset, *shape, *strides]
    if not isinstance(storage, Storage) or not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
        raise ValueError("a tensor is not described by a storage and numbers")
    if len(shape) != len(strides) or math.prod(shape) >= 2**62:
        raise ValueError("a tensor has impossible sizes")
    chosen = storage.dtype
    if dtype is not None:
        found = getattr(torch, dtype.name, None) if isinstance(dtype, Named) and dtype.module == "torch" else None
        if not isinstance(found, torch.dtype):
            raise ValueError("a tensor has an unknown dtype")
        chosen = found
    return TorchTensor(storage, chosen, offset, tuple(shape), tuple(strides))


def _call(called: Any, args: Any) -> Any:
    """Return the value that a call stands for. Nothing of the file is executed: unknown calls become opaque."""
    if not isinstance(called, Named) or not isinstance(args, tuple):
        raise ValueError("it calls an object that is no class or function")
    meaning = MEANINGS.get(called.full)
    if meaning is not None:
        return meaning(*args)
    # The base of objects that were pickled by an old protocol: the class is the first argument.
    if called.full in ("copyreg._reconstructor", "copy_reg._reconstructor") and isinstance(args[0], Named):
        return Opaque(args[0])
    return Opaque(called, args)


MEANINGS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _mapping,
    "collections.defaultdict": lambda *args: _mapping(*args[1:]),
    "torch.Size": lambda values=(): tuple(values),
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": lambda *args: _tensor(*args[:4], dtype=args[6]),
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
    "torch._tensor._rebuild_from_type_v2": lambda make, kind, args, state: _call(make, args),
}


def _checked(named: Named) -> Named:
    """Return a name if checkpoints may hold it, or raise ValueError."""
    builtin = named.module in ("builtins", "__builtin__") and named.name in PLAIN
    if not builtin and named.module.split(".")[0] not in (*OPAQUE, "copy_reg"):
        raise _Foreign(named)
    return named


class _Foreign(Exception):
    """A pickle names a class or function that checkpoints have no use for."""


class _Mark:
    """The object on the stack that begins a list of operands."""


def interpret(text: bytes, path: Path, file: TorchFile | None = None) -> Any:
    """Return the plain value that a pickle of the file at `path` describes. `file` holds the storages that it names."""
    machine = _Machine(file)
    try:
        for opcode, argument, _ in pickletools.genops(text):
            if opcode.name == "STOP":
                return machine.stack.pop()
            machine.step(opcode.name, argument)
    except _Foreign as found:
        raise UserError(
            f"{path} asks for {shorten(found.args[0].full, 80)}, which no checkpoint of weights needs: "
            "nothing of it was run. Name a file without it, from a source that you trust"
        ) from None
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, UnicodeDecodeError, OverflowError) as error:
        raise broken(path, shorten(str(error) or type(error).__name__, 200)) from None
    raise broken(path, "its description ends too early")


class _Machine:
    """The state of an interpreted pickle: the stack, and the values that are used again."""

    def __init__(self, file: TorchFile | None) -> None:
        self.file = file
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """Run one instruction."""
        if name in VALUES:
            self.stack.append(argument)
        elif name in FIXED:
            self.stack.append(FIXED[name]())
        elif name in COLLECTED:
            self.stack.append(COLLECTED[name](self.marked()))
        elif name in INSTRUCTIONS:
            INSTRUCTIONS[name](self, argument)
        else:
            raise ValueError(f"it holds the instruction {name}, which torch.save does not write")

    def marked(self) -> list[Any]:
        """Take the values after the last mark off the stack."""
        at = max(n for n, each in enumerate(self.stack) if isinstance(each, _Mark))
        found = self.stack[at + 1 :]
        del self.stack[at:]
        return found

    def last(self, count: int) -> list[Any]:
        """Take some values off the stack."""
        found = self.stack[-count:]
        del self.stack[-count:]
        return found

    def remember(self, number: int | None) -> None:
        self.memo[len(self.memo) if number is None else number] = self.stack[-1]

    def extend(self, values: list[Any]) -> None:
        into = self.stack[-1]
        # Lists of other classes than `list` are not needed.
        if not isinstance(into, Opaque):
            into.extend(values)

    def update(self, values: list[Any]) -> None:
        into, pairs = self.stack[-1], zip(values[::2], values[1::2], strict=True)
        (into.items if isinstance(into, Opaque) else into).update(pairs)

    def add(self, values: list[Any]) -> None:
        self.stack[-1].update(values)

    def name(self, module: Any, attribute: Any) -> None:
        self.stack.append(_checked(Named(str(module), str(attribute))))

    def call(self, called: Any, args: Any, *_: Any) -> None:
        self.stack.append(_call(called, args))

    def set_state(self, state: Any) -> None:
        # Attributes of containers, such as the versions of a module's state, are not needed.
        if isinstance(self.stack[-1], Opaque):
            self.stack[-1].state = state

    def store(self, reference: Any) -> None:
        kind, of, key, *_ = reference
        named = isinstance(of, Named) and of.module.startswith("torch") and of.name in DTYPES
        if kind != "storage" or not named or not isinstance(key, str) or self.file is None:
            raise ValueError("it refers to an unknown kind of storage")
        self.stack.append(Storage(self.file, key, DTYPES[of.name]))


Instruction = Callable[[_Machine, Any], Any]
INSTRUCTIONS: dict[str, Instruction] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda machine, _: None),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), lambda machine, number: machine.remember(number)),
    **dict.fromkeys(
        ("GET", "BINGET", "LONG_BINGET"), lambda machine, number: machine.stack.append(machine.memo[number])
    ),
    "TUPLE1": lambda machine, _: machine.stack.append(tuple(machine.last(1))),
    "TUPLE2": lambda machine, _: machine.stack.append(tuple(machine.last(2))),
    "TUPLE3": lambda machine, _: machine.stack.append(tuple(machine.last(3))),
    "APPEND": lambda machine, _: machine.extend(machine.last(1)),
    "APPENDS": lambda machine, _: machine.extend(machine.marked()),
    "SETITEM": lambda machine, _: machine.update(machine.last(2)),
    "SETITEMS": lambda machine, _: machine.update(machine.marked()),
    "ADDITEMS": lambda machine, _: machine.add(machine.marked()),
    "GLOBAL": lambda machine, names: machine.name(*names.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.name(*machine.last(2)),
    "REDUCE": lambda machine, _: machine.call(*machine.last(2)),
    "NEWOBJ": lambda machine, _: machine.call(*machine.last(2)),
    "NEWOBJ_EX": lambda machine, _: machine.call(*machine.last(3)),
    "BUILD": lambda machine, _: machine.set_state(machine.stack.pop()),
    "BINPERSID": lambda machine, _: machine.store(machine.stack.pop()),
    "POP": lambda machine, _: machine.stack.pop(),
    "POP_MARK": lambda machine, _: machine.marked(),
    "DUP": lambda machine, _: machine.stack.append(machine.stack[-1]),
    "MARK": lambda machine, _: machine.stack.append(_Mark()),
}


VALUES = frozenset({
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
    "BINBYTES8", "BYTEARRAY8",
})  # fmt: skip
FIXED: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple, "EMPTY_DICT": dict, "EMPTY_SET": set,
}  # fmt: skip
COLLECTED: dict[str, Callable[[list[Any]], Any]] = {
    "LIST": list, "TUPLE": tuple, "FROZENSET": frozenset,
    "DICT": lambda values: dict(zip(values[::2], values[1::2], strict=True)),
}  # fmt: skip


def plain(value: Any) -> dict[str, Any]:
    """Return a mapping: a dict as it is, or the attributes of an object such as argparse.Namespace."""
    fields = value.fields if isinstance(value, Opaque) else {}
    return value if isinstance(value, dict) else fields


def tensors_of(tree: Any, prefix: str = "", depth: int = 12) -> dict[str, TorchTensor]:
    """Return the tensors of nested mappings by their dotted names."""
    found: dict[str, TorchTensor] = {}
    for key, value in tree.items() if isinstance(tree, dict) else ():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, TorchTensor):
            found[name] = value
        elif isinstance(value, dict) and depth:
            found |= tensors_of(value, name, depth - 1)
    return found


def numbered(folder: Path, pattern: str) -> list[tuple[tuple[int, ...], Path]]:
    """Return the entries of a folder whose names match, in the order of the numbers in their groups."""
    found = []
    for name in os.listdir(folder):
        if match := re.fullmatch(pattern, name):
            found.append((tuple(int(number or 0) for number in match.groups()), folder / name))
    return sorted(found)
