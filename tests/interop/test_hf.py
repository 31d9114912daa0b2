"""Import from Hugging Face folders and export to them, compared with transformers itself."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import meshwright.interop.hf as hf
import meshwright.record.checkpoint_format as fmt
from meshwright.checkpoint.hf_files import HFFolder
from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.save import Saver
from meshwright.cli.main import main
from meshwright.config.sections import ModelConfig
from meshwright.errors import UserError
from meshwright.interop.hf import ORIGIN, export_folder, import_folder
from meshwright.spec.model.description import describe, layout_of
from meshwright.spec.model.hf import FAMILIES
from meshwright.spec.model.hf.family import model_section
from meshwright.spec.model.part import coordinate_of
from tests.interop.hf_models import EXPERTS, MODELS, YARN, logits, make, run_models, save, sections_of
from tests.models.test_hf_families import SECTIONS
from tests.support.oracle import load_into, make_trainer, small_config
from tests.support.ranks import run_ranks

transformers = pytest.importorskip("transformers")

IDS = torch.from_numpy(np.random.default_rng(3).integers(0, 61, (2, 24)))
CLOSE = 1e-5
LAYOUTS: dict[str, dict[str, int]] = {
    "tp1": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "ep2": {"tp": 2, "ep": 2, "etp": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Save every model with transformers (NAME/hf), import it (NAME/checkpoint), and return it with its logits."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("families")
    found = {}
    for name in MODELS:
        model = save(name, folder / name / "hf")
        import_folder(folder / name / "hf", folder / name / "checkpoint")
        found[name] = (folder / name, logits(model, IDS))
    return found


@pytest.fixture(scope="module")
def computed(made: dict[str, Any]) -> Any:
    """Return a function that computes our logits of all models at once in a layout."""

    @cache
    def at(layout: str) -> dict[str, np.ndarray]:
        keys = LAYOUTS[layout]
        names = EXPERTS if "ep" in keys else list(made)
        checkpoints = [str(made[name][0] / "checkpoint") for name in names]
        world = max(keys.values(), default=1)
        ranks = run_ranks(world, run_models, checkpoints, IDS, keys, deadline=300.0)
        parts = [[rank[n] for rank in ranks if rank[n] is not None] for n in range(len(checkpoints))]
        return {name: np.concatenate(each, -1) for name, each in zip(names, parts, strict=True)}

    return at


def same_files(a: Path, b: Path) -> None:
    """Assert that two files have the same tensors: names, shapes, dtypes and bytes."""
    first, second = load_file(a), load_file(b)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype and value.shape == second[name].shape, name
        assert torch.equal(value.view(torch.uint8), second[name].view(torch.uint8)), name


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for layout in LAYOUTS for name in (EXPERTS if layout == "ep2" else MODELS)],
)
def test_imported_models_have_the_same_logits(name: str, layout: str, made: dict[str, Any], computed: Any) -> None:
    ours, theirs = computed(layout)[name][..., :61], made[name][1].numpy()
    assert np.abs(ours - theirs).max() <= CLOSE
    assert np.abs(theirs).max() > 1.0  # the logits are not all near zero


@pytest.mark.parametrize(
    ("name", "scaling", "longest"),
    [
        ("llama2", {"rope_type": "dynamic", "factor": 3.0}, 10),
        ("llama2", YARN, 96),
        ("llama2", YARN | {"attention_factor": 1.3, "beta_fast": 1.5, "beta_slow": 0.5}, 96),
        # Without latent attention, the scale of the scores stays.
        ("llama2", YARN | {"mscale": 1.0, "mscale_all_dim": 0.6}, 96),
        ("deepseek-v3", YARN | {"mscale_all_dim": 0.8}, 96),
        ("deepseek-v3", {"rope_type": "linear", "factor": 3.0}, 96),
        ("deepseek-v3", {"rope_type": "dynamic", "factor": 3.0}, 10),
    ],
    ids=str,
)
def test_rotary_scalings_have_the_same_logits(name: str, scaling: Any, longest: int, tmp_path: Path) -> None:
    """Dynamic scaling is compared at model.seq, which exceeds the context of the first training here.

    Transformers also computes the same from an export that knows nothing of the model's origin.
    """
    changed = {"rope_scaling": scaling, "max_position_embeddings": longest, "rope_theta": 100.0}
    theirs = logits(save(name, tmp_path / "hf", **changed), IDS)
    import_folder(tmp_path / "hf", tmp_path / "checkpoint", seq=IDS.shape[1])
    (ours,) = run_models(0, 1, [str(tmp_path / "checkpoint")], IDS, {})
    assert np.abs(ours[..., :61] - theirs.numpy()).max() <= CLOSE
    unscaled = logits(make(name, **changed | {"rope_scaling": None}), IDS)
    assert (unscaled - theirs).abs().max() > 1e-3
    (tmp_path / "checkpoint" / ORIGIN).unlink()
    export_folder(tmp_path / "checkpoint", tmp_path / "out")
    assert torch.equal(logits(load(tmp_path / "out"), IDS), theirs)


@pytest.mark.parametrize("name", list(MODELS))
def test_a_round_trip_gives_everything_back(name: str, made: dict[str, Any], tmp_path: Path) -> None:
    folder = made[name][0]
    export_folder(folder / "checkpoint", tmp_path / "out")
    same_files(folder / "hf" / "model.safetensors", tmp_path / "out" / "model.safetensors")
    for file in ("config.json", "generation_config.json"):
        assert json.loads((folder / "hf" / file).read_text()) == json.loads((tmp_path / "out" / file).read_text())


@pytest.mark.parametrize("name", list(MODELS))
def test_transformers_loads_what_we_write_ourselves(name: str, made: dict[str, Any], tmp_path: Path) -> None:
    """The export knows nothing of the model's origin, so we write its config.json ourselves."""
    folder, theirs = made[name]
    shutil.copytree(folder / "checkpoint", tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / ORIGIN).unlink()
    export_folder(tmp_path / "checkpoint", tmp_path / "out")
    assert torch.equal(logits(load(tmp_path / "out"), IDS), theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes_come_back_as_they_were(dtype: torch.dtype, tmp_path: Path) -> None:
    save("qwen3", tmp_path / "hf", dtype)
    import_folder(tmp_path / "hf", tmp_path / "checkpoint")
    export_folder(tmp_path / "checkpoint", tmp_path / "out")
    same_files(tmp_path / "hf" / "model.safetensors", tmp_path / "out" / "model.safetensors")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == json.loads((tmp_path / "hf" / "config.json").read_text())
    import_folder(tmp_path / "hf", tmp_path / "small", "bf16")
    export_folder(tmp_path / "small", tmp_path / "half", "bf16")
    halves = load_file(tmp_path / "half" / "model.safetensors")
    assert {value.dtype for value in halves.values()} == {torch.bfloat16}
    assert "bfloat16" in json.loads((tmp_path / "half" / "config.json").read_text()).values()


def test_models_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: dict[str, Any]) -> None:
    monkeypatch.setattr(hf, "SHARD_BYTES", 20_000)
    written = export_folder(made["opt"][0] / "checkpoint", tmp_path / "out")
    assert len(written["files"]) > 2
    assert torch.equal(logits(load(tmp_path / "out"), IDS), made["opt"][1])
    make("llama3").save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert not (tmp_path / "hf" / "model.safetensors").exists()
    import_folder(tmp_path / "hf", tmp_path / "checkpoint")
    monkeypatch.undo()
    export_folder(tmp_path / "checkpoint", tmp_path / "again")
    same_files(made["llama3"][0] / "hf" / "model.safetensors", tmp_path / "again" / "model.safetensors")


def test_blocks_of_a_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: dict[str, Any]) -> None:
    """Tensors may be cut at any row, also within a head, as large ones are to bound memory."""
    monkeypatch.setattr(fmt, "BLOCK_BYTES", 700)
    for name in ("bloom", "gpt2", "qwen2", "mixtral", "deepseek-v3"):
        import_folder(made[name][0] / "hf", tmp_path / name)
        assert len(Reader(tmp_path / name).index.blocks) > 100
        export_folder(tmp_path / name, tmp_path / f"{name}-out")
        same_files(made[name][0] / "hf" / "model.safetensors", tmp_path / f"{name}-out" / "model.safetensors")


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 4, "ep": 2}, {"tp": 2, "ep": 4, "etp": 1}], ids=str)
def test_a_rank_s_part_of_experts_is_read_straight_from_the_folder(
    name: str, layout: dict[str, int], made: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder gives the same experts as the checkpoint, also if a few rows of a matrix are read at a time."""
    folder, reader = HFFolder(made[name][0] / "hf"), Reader(made[name][0] / "checkpoint")
    config = small_config(**sections_of(str(made[name][0] / "checkpoint"), **layout))
    for rank, block_bytes in ((3, 2**20), (6, 500)):
        monkeypatch.setattr(fmt, "BLOCK_BYTES", block_bytes)
        at = coordinate_of(layout_of(config, 8), rank, False)
        for record in describe(config.model).records(at).values():
            locals_ = [torch.zeros(record.local_shape) for _ in range(2)]
            for source, local in zip((folder, reader), locals_, strict=True):
                source.fill(f"param/{record.name}", record, local)  # type: ignore[attr-defined]
            assert torch.equal(*locals_) and locals_[0].any(), record.name


def test_layers_that_predict_further_tokens_are_left_out(
    tmp_path: Path, made: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSeek-V3's files have one such layer after the last one. The config.json of an export says that there is
    none.
    """
    shutil.copytree(made["deepseek-v3"][0] / "hf", tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    more = {"model.layers.2.eh_proj.weight": torch.ones(4, 4), "model.layers.2.self_attn.o_proj.weight": torch.ones(2)}
    save_file(tensors | more, tmp_path / "hf" / "model.safetensors")
    import_folder(tmp_path / "hf", tmp_path / "checkpoint")
    said = capsys.readouterr().err
    assert "2 tensors of layers after the last (model.layers.2.eh_proj.weight, ...)" in said and "left out" in said
    export_folder(tmp_path / "checkpoint", tmp_path / "out")
    same_files(made["deepseek-v3"][0] / "hf" / "model.safetensors", tmp_path / "out" / "model.safetensors")
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "out")]
    assert configs[1] == configs[0] | {"num_nextn_predict_layers": 0}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(configs[1]))
    with pytest.raises(UserError, match="holds model.layers.2.eh_proj.weight, which no deepseek_v3"):
        import_folder(tmp_path / "hf", tmp_path / "more")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(configs[0] | {"quantization_config": {"fmt": "e4m3"}}))
    with pytest.raises(UserError, match="holds quantised weights .* load the model with transformers in bfloat16"):
        import_folder(tmp_path / "hf", tmp_path / "more")


def test_the_bias_that_balances_experts_stays_in_float32(tmp_path: Path, made: dict[str, Any]) -> None:
    """The bias stays in float32 in checkpoints and exports of any precision, as in transformers. The dtype in
    config.json is that of the other weights.
    """
    import_folder(made["deepseek-v3"][0] / "hf", tmp_path / "checkpoint", "bf16")
    bias = "layers.1.experts.router.bias"
    assert Reader(tmp_path / "checkpoint").index.tensors[f"param/{bias}"]["dtype"] == "float32"
    export_folder(tmp_path / "checkpoint", tmp_path / "out", "bf16")
    written = load_file(tmp_path / "out" / "model.safetensors")
    wide = {name for name, value in written.items() if value.dtype != torch.bfloat16}
    assert wide == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = load(tmp_path / "out", torch.bfloat16).model.layers[1].mlp.gate.e_score_correction_bias
    original = load(made["deepseek-v3"][0] / "hf").model.layers[1].mlp.gate.e_score_correction_bias
    assert loaded.dtype == torch.float32 and torch.equal(loaded, original)


def test_names_without_prefix_old_buffers_and_a_stored_tie(tmp_path: Path, made: dict[str, Any]) -> None:
    """The first GPT-2 files are like this."""
    shutil.copytree(made["gpt2"][0] / "hf", tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    plain = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    plain["lm_head.weight"] = plain["wte.weight"].clone()
    save_file(plain | {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}, tmp_path / "hf" / "model.safetensors")
    import_folder(tmp_path / "hf", tmp_path / "checkpoint")
    export_folder(tmp_path / "checkpoint", tmp_path / "out")
    save_file(plain, tmp_path / "wanted.safetensors")
    same_files(tmp_path / "wanted.safetensors", tmp_path / "out" / "model.safetensors")


# tests/models/test_bert.py and test_t5.py cover the other families.
@pytest.mark.parametrize("name", [name for name in SECTIONS if name not in ("bert", "t5")])
def test_a_model_trained_here_has_the_same_logits_in_transformers(name: str, tmp_path: Path) -> None:
    """transformers loads a model after ten steps in each family's shape, from our config.json and weights alone."""
    sections = {
        "model": SECTIONS[name], "train": {"precision": "fp32", "global_batch": 4, "micro_batch": 2},
        "optimizer": {"lr": 1e-2}, "lr": {"warmup": 0},
    }  # fmt: skip
    trainer = make_trainer(small_config(**sections))
    module = trainer.modules[0]

    def ours() -> torch.Tensor:
        with torch.no_grad():
            return module.head.logits(module.trunk({"tokens": IDS})[0]).view(*IDS.shape, -1)

    new = ours()
    for _ in range(10):
        trainer.step()
    saver = Saver(trainer, tmp_path / "run", asynchronous=False, busy="wait", keep=0)
    saver.save()
    saver.wait_for_commit()
    written = export_folder(tmp_path / "run" / "step-00000010", tmp_path / "hf", family=name)
    assert written["family"] == name
    found = logits(load(tmp_path / "hf"), IDS)
    assert float((ours() - found).abs().max()) <= CLOSE
    assert float((new - found).abs().max()) > 0.3, "it has learned something"


def _train_and_save(rank: int, world: int, sections: dict[str, Any], folder: str) -> None:
    trainer = make_trainer(small_config(**sections), rank, world)
    for _ in range(3):
        trainer.step()
    saver = Saver(trainer, Path(folder), asynchronous=False, busy="wait", keep=0)
    saver.save()
    saver.wait_for_commit()


@pytest.mark.wide
def test_a_model_trained_on_many_ranks_is_exported_as_one_process_would(tmp_path: Path) -> None:
    """The model is trained on dp 2 x tp 2 x pp 2. One process loads the same checkpoint and saves it again.
    transformers agrees on its logits.
    """
    model = {
        "layers": 2, "heads": 4, "kv_heads": 2, "norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "ffn": 48,
        "bias": False, "qk_norm": True, "vocab": 61, "seq": 24,
    }  # fmt: skip
    train = {"precision": "fp32", "global_batch": 8, "micro_batch": 2}
    many = {"model": model, "train": train, "layout": {"tp": 2, "pp": 2, "sequence_parallel": True}}
    run_ranks(8, _train_and_save, many, str(tmp_path / "many"), deadline=300.0)
    one = make_trainer(small_config(model=model, train=train))
    load_into(one, Reader(tmp_path / "many" / "step-00000003"))
    saver = Saver(one, tmp_path / "one", asynchronous=False, busy="wait", keep=0)
    saver.save()
    saver.wait_for_commit()
    for name in ("many", "one"):
        export_folder(tmp_path / name / "step-00000003", tmp_path / f"{name}-out")
    files = sorted(path.name for path in (tmp_path / "many-out").iterdir())
    assert files == ["config.json", "model.safetensors"]
    for file in files:
        assert (tmp_path / "many-out" / file).read_bytes() == (tmp_path / "one-out" / file).read_bytes()
    with torch.no_grad():
        module = one.modules[0].eval()
        ours = module.head.logits(module.trunk({"tokens": IDS})[0]).view(*IDS.shape, -1)
    assert (logits(load(tmp_path / "one-out"), IDS) - ours).abs().max() <= CLOSE


def test_the_two_commands(
    tmp_path: Path, made: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands import, export, and export another checkpoint like a given one. The tokenizer's files are copied."""
    shutil.copytree(made["llama2"][0] / "hf", tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    checkpoint, out = str(tmp_path / "checkpoint"), str(tmp_path / "out")
    assert main(["import", str(tmp_path / "hf"), "--to", checkpoint, "--seq", "16", "--json"]) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert (model["seq"], model["position"], model["kv_heads"]) == (16, "rope", 4)
    assert main(["export", checkpoint, "--to", out, "--dtype", "fp16", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert (written["family"], "tokenizer.json" in written["beside"]) == ("llama", True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"] == 96, "as in hf"
    assert logits(load(tmp_path / "out"), IDS[:, :16]).shape == (2, 16, 61)
    (tmp_path / "checkpoint" / ORIGIN).unlink()
    like = ["--like", str(tmp_path / "hf"), "--family", "mistral"]
    assert main(["export", checkpoint, "--to", str(tmp_path / "other"), *like]) == 0
    assert "MistralForCausalLM" in (tmp_path / "other" / "config.json").read_text()
    capsys.readouterr()
    assert main(["export", checkpoint, "--to", out]) == 2
    assert "exists already" in capsys.readouterr().err
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["export", checkpoint, "--to", "."]) == 0 and (tmp_path / "here" / "config.json").is_file()
    capsys.readouterr()
    (tmp_path / "hf" / "config.json").write_text("[]")
    assert main(["export", checkpoint, "--to", str(tmp_path / "more"), "--like", str(tmp_path / "hf")]) == 2
    assert "can't be read" in capsys.readouterr().err


def _read(config: dict[str, Any]) -> ModelConfig | str:
    """Return our model section for a config.json, or the complaint about it."""
    try:
        return FAMILIES[config["model_type"]].model_of(config)
    except UserError as error:
        return str(error)


def _written(name: str) -> dict[str, Any]:
    """Return a config.json that we write, in which no key has its default and the context exceeds the default
    window.
    """
    eps = {"opt": 1e-5, "deepseek_v3": 1e-6}.get(name, 1e-3)
    section = SECTIONS[name] | {"heads": 64, "hidden": 1536, "seq": 8192, "norm_eps": eps}
    tied = FAMILIES[name].defaults["tie_word_embeddings"] ^ ("tied_embeddings" not in FAMILIES[name].allows)
    changes = {"init_std": 0.01, "dropout": 0.2, "tied_embeddings": tied}
    section |= changes | ({} if name == "bloom" else {"ffn": 96})
    if section.get("position") == "rope":
        section |= {"rope_theta": 5e5, "rotary_fraction": 0.5 if name == "gpt_neox" else 1.0}
    window = {"sliding_window": 8192, "use_sliding_window": True} if name.startswith("qwen") else {}
    return FAMILIES[name].config_of(model_section(section)) | window


SIZES = ("layers", "hidden", "heads", "vocab")
NAMED = {name: {"model_type", *(FAMILIES[name].keys[size][0] for size in SIZES)} for name in FAMILIES}
# transformers 5 treats every T5 as tied, whatever the file says.
WITH_DEFAULTS = [name for name in FAMILIES if name != "t5"]
NULL = [
    ("gpt2", "n_inner"), ("llama", "head_dim"), ("llama", "num_key_value_heads"), ("llama", "rope_scaling"),
    ("mistral", "head_dim"), ("mistral", "sliding_window"), ("qwen2", "num_key_value_heads"),
    ("qwen3", "num_key_value_heads"), ("qwen3", "sliding_window"),
]  # fmt: skip


@pytest.mark.parametrize("name", WITH_DEFAULTS)
def test_keys_that_are_missing_or_null_are_read_as_transformers_reads_them(name: str, tmp_path: Path) -> None:
    """transformers completes the file with its defaults. Null is tried for keys where it allows that. The four sizes
    are always present, since a file without them is refused.
    """
    whole = _written(name)
    tried: list[tuple[str, dict[str, None]]] = [(key, {}) for key in whole if key not in NAMED[name]]
    tried += [(key, {key: None}) for family, key in NULL if family == name]
    for key, change in tried:
        config = {each: value for each, value in whole.items() if each != key} | change
        (tmp_path / "config.json").write_text(json.dumps(config))
        theirs = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
        assert _read(config) == _read(theirs), (key, change)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"vocab_size": 62}, "its files don't fit its config.json"),
        ({"attention_bias": True, "mlp_bias": True}, "lacks the tensor"),
        ({"num_hidden_layers": 1}, "holds model.layers.1."),
        ({"attention_bias": True}, "biases on some"),
        ({"model_type": "gemma"}, "is not a family"),
        ({"model_type": ["llama"]}, "is not a family"),
        ({"hidden_act": ["silu"]}, "can't be imported"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"hidden_size": None}, "lacks hidden_size"),
    ],
    ids=str,
)
def test_a_folder_that_does_not_fit(change: Any, complaint: str, made: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(made["llama2"][0] / "hf", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text()) | change
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=complaint):
        import_folder(tmp_path / "hf", tmp_path / "checkpoint")
    assert not list(tmp_path.glob("*checkpoint*"))
