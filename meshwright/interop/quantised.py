"""Store the linear layers of a Hugging Face folder in 8 or 4 bits, in formats that vLLM and transformers load.

`fp8`, `int8` and `int4` are formats of compressed-tensors, `nf4` is that of bitsandbytes. The output layer, embeddings
and norms keep their precision. Without samples, every weight becomes the nearest code. With samples, GPTQ (Frantar et
al. 2022, arXiv:2210.17323) chooses the integer codes: it quantises one column after another and moves each column's
error to the columns that follow, weighted by the inputs that the samples have there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from meshwright.checkpoint.hf_files import opened_weights
from meshwright.checkpoint.tensor_file import TensorEntry
from meshwright.errors import UserError, plural
from meshwright.interop.hf import write_shards, written_aside
from meshwright.models.wrapped.blueprint import read_config, skeleton
from meshwright.nn.adapters.nf4 import LEVELS
from meshwright.record import checkpoint_format as fmt
from meshwright.record.companions import copy_files

DAMPING = 0.01  # The share of the mean squared input that GPTQ adds to all of them, as its authors do.
NF4_BLOCK = 64  # The values that share a scale in bitsandbytes' format.
GROUP, SMALLEST_GROUP = 128, 32  # The columns of a row that share a scale in int4: at most, and at least.
OUTPUT_LAYER = "lm_head"


@dataclass(frozen=True)
class Codes:
    """A weight [out, in] in few bits: its codes, and the scales [out, groups] of groups of columns."""

    codes: Tensor
    scales: Tensor

    def values(self) -> Tensor:
        """Return the float32 weights that the codes stand for."""
        width = self.codes.shape[1] // self.scales.shape[1]
        return self.codes.float() * self.scales.float().repeat_interleave(width, 1)


@dataclass(frozen=True)
class Format:
    """A quantised format: how values are rounded, and the tensors and config that stand for a weight.

    `largest` is the code of a group's largest magnitude. GPTQ needs codes at equal distances (`is_integer`).
    """

    largest: float
    is_integer: bool
    group: int  # The columns of a row that share a scale; 0: all of them.
    rounded: Callable[[Tensor], Tensor]
    stored: Callable[[str, Codes], dict[str, Tensor]]
    config: Callable[[int, str], dict[str, Any]]  # From the group and the dtype of products.

    def for_widths(self, widths: Iterable[int]) -> Format:
        """Return the format with groups that divide all rows, or without groups if only small ones would."""
        group = math.gcd(self.group, *widths) if self.group else 0
        return replace(self, group=group if group >= SMALLEST_GROUP else 0)

    def scales_of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the scales of a weight's groups, in the dtype in which they are stored."""
        groups = weight.float().unflatten(1, (-1, self.group or weight.shape[1]))
        scales = (groups.abs().amax(2) / self.largest).to(dtype)
        # A group of zeros needs a scale that divides.
        return torch.where(scales == 0, torch.ones_like(scales), scales)

    def nearest(self, weight: Tensor, dtype: torch.dtype) -> Codes:
        """Return the codes nearest to a weight."""
        scales = self.scales_of(weight, dtype)
        width = weight.shape[1] // scales.shape[1]
        return Codes(self.rounded(weight.float() / scales.float().repeat_interleave(width, 1)), scales)


def _integers(lowest: int, highest: int) -> Callable[[Tensor], Tensor]:
    return lambda values: values.round().clamp(lowest, highest).to(torch.int8)


def _fp8(values: Tensor) -> Tensor:
    return values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def _plain(name: str, codes: Codes) -> dict[str, Tensor]:
    return {f"{name}.weight": codes.codes, f"{name}.weight_scale": codes.scales}


def _packed(name: str, codes: Codes) -> dict[str, Tensor]:
    """Return int4 codes packed into 32-bit words, the first of eight columns in the lowest bits."""
    rows, width = codes.codes.shape
    shifted = torch.nn.functional.pad(codes.codes.to(torch.int64) + 8, (0, -width % 8)).view(rows, -1, 8)
    words = (shifted << torch.arange(0, 32, 4)).sum(2)
    # Python's and torch's int64 to int32 conversion keeps the lower 32 bits.
    packed = words.to(torch.int32)
    shape = torch.tensor([rows, width], dtype=torch.int64)
    return {f"{name}.weight_packed": packed, f"{name}.weight_scale": codes.scales, f"{name}.weight_shape": shape}


def _compressed(form: str, bits: int, kind: str, inputs: bool) -> Callable[[int, str], dict[str, Any]]:
    """Return a function that makes the quantization_config of compressed-tensors."""

    def config(group: int, dtype: str) -> dict[str, Any]:
        weights = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False}
        weights |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
        # vLLM quantises inputs of 8-bit products while it computes, token by token.
        dynamic = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": True, "strategy": "token"}
        one = {"targets": ["Linear"], "weights": weights, "input_activations": dynamic if inputs else None}
        return {
            "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
            "config_groups": {"group_0": {**one, "output_activations": None}}, "ignore": [OUTPUT_LAYER],
            "kv_cache_scheme": None,
        }  # fmt: skip

    return config


def _nf4_config(dtype: str) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False, "bnb_4bit_compute_dtype": dtype, "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": [OUTPUT_LAYER],
    }  # fmt: skip


FORMATS: dict[str, Format] = {
    "fp8": Format(448.0, False, 0, _fp8, _plain, _compressed("float-quantized", 8, "float", True)),
    "int8": Format(127.0, True, 0, _integers(-127, 127), _plain, _compressed("int-quantized", 8, "int", True)),
    "int4": Format(7.5, True, GROUP, _integers(-8, 7), _packed, _compressed("pack-quantized", 4, "int", False)),
}


def encoded(
    name: str, weight: Tensor, form: Format | None, dtype: torch.dtype, codes: Codes | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the stored tensors of a weight, and the values that they stand for. Without a `form` it is nf4."""
    if form is None:
        return nf4_tensors(name, weight, dtype)
    codes = codes or form.nearest(weight, dtype)
    return form.stored(name, codes), codes.values()


def nf4_tensors(name: str, weight: Tensor, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors of bitsandbytes' 4-bit format for a weight, and the weights that they stand for."""
    levels = torch.tensor(LEVELS)
    blocks = weight.float().reshape(-1, NF4_BLOCK)
    largest = blocks.abs().amax(1)
    divided = blocks / torch.where(largest == 0, torch.ones_like(largest), largest)[:, None]
    codes = torch.bucketize(divided, (levels[1:] + levels[:-1]) / 2)
    flat = codes.view(-1)
    packed = (flat[::2] << 4 | flat[1::2]).to(torch.uint8)[:, None]
    state = {
        "quant_type": "nf4", "blocksize": NF4_BLOCK, "dtype": str(dtype).removeprefix("torch."),
        "shape": list(weight.shape),
    }  # fmt: skip
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors = {
        f"{name}.weight": packed, f"{name}.weight.absmax": largest, f"{name}.weight.quant_map": levels,
        f"{name}.weight.quant_state.bitsandbytes__nf4": text,
    }  # fmt: skip
    return tensors, (levels[codes] * largest[:, None]).view(weight.shape)


def gptq(weight: Tensor, squares: Tensor, form: Format, dtype: torch.dtype) -> Codes:
    """Return codes for a weight [out, in] that keep its products with the sampled inputs close.

    `squares` [in, in] is the sum of the inputs' outer products.
    """
    work, squares = weight.double(), squares.double()
    unused = squares.diagonal() == 0
    squares[unused, unused] = 1.0
    work[:, unused] = 0.0
    width = work.shape[1]
    squares += torch.eye(width) * (DAMPING * squares.diagonal().mean())
    # The upper Cholesky factor of the inverse has, in each row, how an error spreads to later columns.
    spread = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(squares)), upper=True)
    codes, scales = torch.empty(work.shape, dtype=torch.int8), list[Tensor]()
    group = form.group or width
    for column in range(width):
        if column % group == 0:
            # Errors have already moved into these columns, so their scale is found now.
            scales.append(form.scales_of(work[:, column : column + group], dtype))
        scale = scales[-1][:, 0].double()
        codes[:, column] = form.rounded(work[:, column] / scale)
        error = (work[:, column] - codes[:, column].double() * scale) / spread[column, column]
        work[:, column + 1 :] -= error[:, None] * spread[column, column + 1 :]
    return Codes(codes, torch.cat(scales, 1))


def linear_names(folder: Path, stored: Sequence[str]) -> list[str]:
    """Return the names of the linear layers to quantise. Refuse models that have none, or that have experts."""
    module = skeleton(read_config(str(folder)), torch.float32)
    linears = [name for name, each in module.named_modules() if type(each) is nn.Linear]
    found = [name for name in linears if f"{name}.weight" in stored and name.split(".")[-1] != OUTPUT_LAYER]
    kind = read_config(str(folder)).model_type
    if any(".experts." in name for name in stored):
        raise UserError(f"{folder} ({kind}) has experts, which --quantise does not store yet: export without it")
    if not found:
        raise UserError(f"{folder} ({kind}) has no linear layers of torch, which --quantise needs: export without it")
    return found


@dataclass
class Measured:
    """Codes that samples chose, and the perplexity of the samples before and after."""

    codes: dict[str, Codes]
    before: float
    after: float


def quantise_folder(
    source: Path, to: Path, name: str, calibration: Sequence[Tensor] = (), measured: Sequence[Tensor] = ()
) -> dict[str, Any]:
    """Write a quantised copy of a Hugging Face folder, and return a summary.

    `calibration` and `measured` are samples of tokens [seq]. The former choose the codes of integer formats; the
    perplexity of the latter is measured before and after. Without both, only one weight is in memory at a time.
    """
    file_of = opened_weights(source, False)
    linears = linear_names(source, list(file_of))
    shapes = {each: file_of[f"{each}.weight"].get_slice(f"{each}.weight").get_shape() for each in linears}
    form = FORMATS[name].for_widths(width for _, width in shapes.values()) if name in FORMATS else None
    if form is None:
        _check_blocks(source, shapes)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    word = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    dtype = getattr(torch, word)
    found = Measured({}, math.nan, math.nan)
    if calibration or measured:
        found = _measured(source, form, linears, dtype, calibration, measured)

    def tensors_of(linear: str) -> dict[str, Tensor]:
        weight = file_of[f"{linear}.weight"].get_tensor(f"{linear}.weight")
        return encoded(linear, weight, form, dtype, found.codes.get(linear))[0]

    with written_aside(to) as aside:
        beside = copy_files(source, aside)
        config["quantization_config"] = form.config(form.group, word) if form else _nf4_config(word)
        fmt.write_whole(aside / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        files, total = _write(aside, file_of, linears, tensors_of)
    before = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    summary = {"format": name, "layers": len(linears), "bytes_before": before, "bytes": total, "files": files}
    if measured:
        summary |= {"perplexity_before": found.before, "perplexity": found.after}
    return {**summary, "calibrated": len(calibration) if found.codes else 0, "beside": beside}


def _check_blocks(source: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Refuse layers that bitsandbytes' blocks do not fill."""
    for name, shape in shapes.items():
        if math.prod(shape) % NF4_BLOCK:
            raise UserError(
                f"{source}: {name}.weight has {math.prod(shape)} values, and nf4 stores blocks of {NF4_BLOCK}: "
                "choose --quantise int4 or int8"
            )


@dataclass(frozen=True)
class _Stored:
    """A tensor to write and the layer that it belongs to, or an empty string for one that is copied."""

    entry: TensorEntry
    linear: str


def _write(
    aside: Path, file_of: Mapping[str, Any], linears: Sequence[str], tensors_of: Callable[[str], dict[str, Tensor]]
) -> tuple[list[str], int]:
    """Write the tensors layer by layer, and return the files' names and the bytes.

    Each layer is quantised twice, for the header and for the file, so that only one layer is in memory.
    """
    wanted = {f"{linear}.weight": linear for linear in linears}
    planned: list[_Stored] = []
    for name, file in file_of.items():
        linear = wanted.get(name, "")
        each = tensors_of(linear) if linear else {name: file.get_tensor(name)}
        planned += [_Stored(TensorEntry.of(key, value), linear) for key, value in each.items()]

    def chunks(shard: list[_Stored]) -> Iterator[Tensor]:
        made: tuple[str, dict[str, Tensor]] = ("", {})
        for each in shard:
            if each.linear and made[0] != each.linear:
                made = (each.linear, tensors_of(each.linear))
            yield made[1][each.entry.name] if each.linear else file_of[each.entry.name].get_tensor(each.entry.name)

    return write_shards(aside, planned, chunks), sum(each.entry.bytes for each in planned)


@torch.no_grad()
def _measured(
    source: Path, form: Format | None, linears: Sequence[str], dtype: torch.dtype, calibration: Sequence[Tensor],
    measured: Sequence[Tensor],
) -> Measured:  # fmt: skip
    """Quantise transformers' model of the folder in place, block by block, and measure it before and after."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.eval()
    before = perplexity(model, measured)
    layers = {name: model.get_submodule(name) for name in linears}
    codes: dict[str, Codes] = {}
    if calibration and form is not None and form.is_integer:
        codes = _calibrated(model, layers, form, dtype, calibration)
    for name, layer in layers.items():
        if name not in codes:
            layer.weight.copy_(encoded(name, layer.weight, form, dtype)[1])
    return Measured(codes, before, perplexity(model, measured))


def perplexity(model: Any, samples: Sequence[Tensor]) -> float:
    """Return exp of the mean loss of all tokens but the first of each sample; NaN without samples."""
    total = count = 0.0
    for sample in samples:
        logits = model(input_ids=sample[None]).logits[0, :-1].float()
        total += float(nn.functional.cross_entropy(logits, sample[1:], reduction="sum"))
        count += len(sample) - 1
    return math.exp(min(total / count, 700.0)) if count else math.nan


class _FirstBlockReached(Exception):
    """Ends a forward pass at the first block, whose inputs are then known."""


def _calibrated(
    model: Any, layers: Mapping[str, Any], form: Format, dtype: torch.dtype, samples: Sequence[Tensor]
) -> dict[str, Codes]:
    """Quantise all linear layers with GPTQ, one block after another, so that each sees what earlier errors cause."""
    # The model's blocks are its longest list of modules.
    blocks = max((each for each in model.modules() if isinstance(each, nn.ModuleList)), key=len)
    inputs = [_inputs_of(model, blocks[0], sample) for sample in samples]
    codes: dict[str, Codes] = {}
    for block in blocks:
        inside = {name: layer for name, layer in layers.items() if any(layer is each for each in block.modules())}
        squares = {name: torch.zeros(layer.in_features, layer.in_features) for name, layer in inside.items()}
        hooks = [layer.register_forward_pre_hook(_adder(squares[name])) for name, layer in inside.items()]
        for hidden, args, more in inputs:
            block(hidden, *args, **more)
        for hook in hooks:
            hook.remove()
        for name, layer in inside.items():
            codes[name] = gptq(layer.weight, squares[name], form, dtype)
            layer.weight.copy_(codes[name].values())
        inputs = [(_first(block(hidden, *args, **more)), args, more) for hidden, args, more in inputs]
    return codes


def _inputs_of(model: Any, block: nn.Module, sample: Tensor) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which the model calls its first block."""
    seen: list[tuple[Tensor, tuple[Any, ...], dict[str, Any]]] = []

    def stop(module: nn.Module, args: tuple[Any, ...], more: dict[str, Any]) -> None:
        hidden, *rest = args if args else (more.pop("hidden_states"),)
        seen.append((hidden, tuple(rest), more))
        raise _FirstBlockReached

    hook = block.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model(input_ids=sample[None], use_cache=False)
    except _FirstBlockReached:
        pass
    finally:
        hook.remove()
    return seen[0]


def _adder(squares: Tensor) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    """Return a hook that adds the outer products of a layer's inputs to `squares`."""

    def add(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        rows = args[0].flatten(0, -2).float()
        squares.addmm_(rows.t(), rows)

    return add


def _first(result: Any) -> Tensor:
    """Return the hidden states that a block computes. Some blocks return a tuple with more."""
    hidden: Tensor = result[0] if isinstance(result, tuple) else result
    return hidden


def windows(tokens: NDArray[Any], count: int, seq: int) -> list[Tensor]:
    """Return `count` samples of `seq` tokens, spread evenly over the tokens without overlap."""
    possible = len(tokens) // seq
    if possible < 1:
        raise UserError(f"the text has {plural(len(tokens), 'token')}, and a sample takes {seq}: give more text")
    starts = np.unique(np.linspace(0, possible - 1, min(count, possible)).round().astype(int)) * seq
    return [torch.from_numpy(tokens[start : start + seq].astype(np.int64)) for start in starts.tolist()]


def samples_of(tokens: NDArray[Any], count: int, seq: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return samples to calibrate with, and others to measure with: from the first nine tenths, and from the rest."""
    cut = min(len(tokens) * 9 // 10, len(tokens) - seq)
    if cut < seq:
        raise UserError(f"the text has {plural(len(tokens), 'token')}, and --samples needs {2 * seq}: give more text")
    return windows(tokens[:cut], count, seq), windows(tokens[cut:], count, seq)
