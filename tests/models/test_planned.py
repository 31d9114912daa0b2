"""Models that transformers builds, cut by their plans: gradients equal one process, weights are read by boxes, and
unsupported combinations are refused.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open

from meshwright.checkpoint.base import begin_with_folder
from meshwright.checkpoint.planned_files import PlannedFolder
from meshwright.checkpoint.save import Saver
from meshwright.cli.dryrun import compare
from meshwright.config.load import config_from
from meshwright.config.rules import check
from meshwright.device import Device
from meshwright.dryrun.run_rank import make_rank, run_rank
from meshwright.dryrun.stand_ins import fake_world
from meshwright.engine.marks import unit_name
from meshwright.engine.sharding.buffers import Bucket
from meshwright.errors import UserError
from meshwright.interop.hf import export_folder
from meshwright.models.stage import stage_of
from meshwright.models.wrapped.blueprint import blueprint, of_blocks
from meshwright.models.wrapped.sections import _common
from meshwright.plan.gathered import whole_bytes
from meshwright.plan.job import checked_job
from meshwright.plan.rank import planned_rank
from meshwright.record.checkpoint_format import find_checkpoint
from meshwright.spec.model.coordinate import Coordinate
from meshwright.spec.model.description import layout_of
from meshwright.spec.model.wrapped.parts import STYLES
from tests.models.planned_families import Alone, alone, config_of, make_trainer, measure, tiny, write_tiny
from tests.support.ranks import run_ranks

# A dense family with tied ends, and one with experts and norms of heads.
FAMILIES = ("granite", "qwen3_moe")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Alone]]:
    folder = tmp_path_factory.mktemp("models")
    return [(at, alone(at)) for at in (write_tiny(name, folder) for name in FAMILIES)]


def with_planted_bugs(rank: int, world: int, folders: list[str], found: list[Alone]) -> tuple[Any, Any, Any]:
    """Return the errors of both models, and those of the mixture with two planted bugs: norms of heads are not summed
    over tp, or the input of experts has each rank's local gradient.
    """
    right = measure(rank, world, folders, found, ["tp 2", "pp 2", "ZeRO 3, recomputed"])
    wrong = []
    for style in ("replicated_with_grad_allreduce", "moe_tp_experts"):
        kept = STYLES[style]
        STYLES[style] = kept._replace(partial=False, before="")
        wrong.append(measure(rank, world, folders[1:], found[1:], ["tp 2"])[0]["tp 2"])
        STYLES[style] = kept
    return right, *wrong


def test_gradients_are_those_of_transformers_in_one_process(models: list[tuple[str, Alone]]) -> None:
    assert all(found.logits == 0.0 for _, found in models)
    folders, found = zip(*models, strict=True)
    for right, norms, experts in run_ranks(2, with_planted_bugs, list(folders), list(found)):
        for errors in right:
            limits = {name: 1e-5 if "recomputed" in name else 1e-10 for name in errors}
            assert all(errors[name][0] < limits[name] for name in errors), errors
        assert norms[0] > 0.01 and "_norm" in norms[1]
        assert experts[0] > 0.01


def test_files_are_read_by_boxes_as_transformers_reads_them(tmp_path: Path) -> None:
    """The files of a mixture hold every expert's gate and up separately, and a parameter has all of them."""
    import transformers

    config = tiny("mixtral")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    ours = PlannedFolder(tmp_path)
    assert set(ours.shapes) == set(theirs)
    assert all(torch.equal(ours.whole(name), value) for name, value in theirs.items())
    name, value = "model.layers.1.mlp.experts.gate_up_proj", theirs["model.layers.1.mlp.experts.gate_up_proj"]
    start, shape = (1, value.shape[1] // 2 - 3, 5), (2, 6, 7)
    assert torch.equal(ours.block(name, start, shape), value[1:3, start[1] : start[1] + 6, 5:12])


def test_weights_go_out_as_they_came_in(tmp_path: Path) -> None:
    """They go into a run, its checkpoint, and a folder again. Names and values stay the same, also those of untrained
    buffers.
    """
    import transformers

    came, went = tmp_path / "came", tmp_path / "went"
    model = transformers.AutoModelForCausalLM.from_config(tiny("deepseek_v3"))
    for name, value in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            value.copy_(torch.randn_like(value))
    model.save_pretrained(came)
    trainer = make_trainer(config_of(str(came), {"train": {"precision": "fp32", "global_batch": 4}}))
    begin_with_folder(trainer, trainer.modules, fresh=True)
    trainer.publish()
    assert all(torch.equal(x, trainer.modules[0].net.state_dict()[name]) for name, x in model.state_dict().items())
    with Saver(trainer, tmp_path / "saved", False, "wait", 0) as saver:
        saver.save(last=True)
        saver.wait()
    summary = export_folder(find_checkpoint(str(tmp_path / "saved")), went)
    ours, theirs = (safe_open(at / "model.safetensors", framework="pt") for at in (went, came))
    assert summary["family"] == "deepseek_v3" and set(ours.keys()) == set(theirs.keys())
    assert all(torch.equal(ours.get_tensor(name), theirs.get_tensor(name)) for name in theirs.keys())  # noqa: SIM118


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "sections",
    [{"layout": {"tp": 2}}, {"layout": {"tp": 2, "pp": 2}, "zero": {"stage": 1}},
     {"layout": {"tp": 2}, "zero": {"stage": 3}}],
    ids=("tp", "tp-pp", "tp-zero3"),
)  # fmt: skip
def test_bytes_and_calls_are_as_planned(tmp_path: Path, family: str, sections: dict[str, Any]) -> None:
    """One rank of four runs, and its states and collectives are compared with those that the parts state."""
    config = config_of(write_tiny(family, tmp_path), sections)
    ran, said = run_rank(config, 4, 0, Device("cpu")), planned_rank(checked_job(config, 4), 0)
    found = compare(0, ran, said)
    pairs = [found["parameters"], *found["bytes"].values(), *found["comm"].values(), *found["calls"]]
    assert [pair for pair in pairs if not pair["equal"]] == []


@pytest.mark.parametrize("sections", [{}, {"layout": {"pp": 2}}], ids=("dp", "pp"))
def test_whole_gradients_of_stage_2_are_as_planned(tmp_path: Path, sections: dict[str, Any]) -> None:
    """A foreign module shows only at the end of a chunk's backward which of its parameters it uses. All gradients exist
    until then.
    """
    config = config_of(write_tiny("granite", tmp_path), {"zero": {"stage": 2}, **sections})
    most, allocate = [0], Bucket.allocate_grads
    with fake_world(0, 4):
        trainer = make_rank(config, 4, 0, Device("cpu"))

        def counted(bucket: Bucket) -> None:
            allocate(bucket)
            most.append(sum(each.grads.tensor.nbytes for each in trainer.data_parallel.buckets if each.grads.allocated))

        with mock.patch.object(Bucket, "allocate_grads", counted):
            trainer.step()
    chunks = whole_bytes(checked_job(config, 4), 0)
    assert max(most) == max(each.gradients for chunk in chunks for each in chunk)


def test_documents_see_nothing_of_each_other(tmp_path: Path) -> None:
    """Positions that restart keep attention inside a document. Layers that carry a state are refused."""
    granite = make_trainer(config_of(write_tiny("granite", tmp_path), {})).modules[0].eval()
    ids = torch.arange(3, 19)[None]
    positions = torch.tensor([[*range(6), *range(10)]])
    with torch.no_grad():
        packed = granite({"tokens": ids, "positions": positions})
        apart = torch.cat([granite({"tokens": ids[:, at]}) for at in (slice(0, 6), slice(6, 16))], dim=1)
    assert torch.allclose(packed, apart, rtol=1e-12, atol=1e-14)
    sections = {"data": {"reset_positions": True, "reset_attention": True}}
    with pytest.raises(UserError, match="layers of the kind linear_attention carry a state"):
        make_trainer(config_of(write_tiny("qwen3_next", tmp_path), sections))


def test_a_plan_becomes_records(tmp_path: Path) -> None:
    model = blueprint(write_tiny("qwen3_moe", tmp_path)).model
    records = {each.name: each for each in model.records(Coordinate((("tp", 2, 1),))).values()}
    block = "model.layers.0."
    packed = records[f"{block}mlp.experts.gate_up_proj"]
    half = packed.shape[1] // 2
    assert [box.start[1] for box in packed.boxes] == [half // 2, half + half // 2]
    assert records[f"{block}self_attn.q_norm.weight"].partial == ("tp",)
    assert records[f"{block}input_layernorm.weight"].partial == ()
    assert records[f"{block}self_attn.o_proj.weight"].boxes[0].start == (0, 16)
    assert records["model.embed_tokens.weight"].local_shape == (32, 32)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"layout": {"cp": 2}}, "layout.cp=2 can't be combined with a model that transformers builds"),
        ({"tune": {"kind": "lora", "base": "x"}}, "tune.kind=lora can't be combined"),
        ({"layout": {"tp": 4}}, "does not divide the 2 key-value heads"),
        ({"train": {"precision": "fp8"}}, "set train.precision=bf16"),
    ],
)
def test_what_can_not_be_combined_is_refused(tmp_path: Path, sections: dict[str, Any], says: str) -> None:
    config = config_of(write_tiny("granite", tmp_path), sections)
    with pytest.raises(UserError, match=says):
        check(config, 4)


def test_a_family_that_was_not_found_right_is_refused_by_name(tmp_path: Path) -> None:
    config = config_of(write_tiny("doge", tmp_path), {"layout": {"tp": 2}})
    with pytest.raises(UserError, match="with the family doge: its dynamic mask .+; set layout.tp=1"):
        layout_of(config, 2)


def test_families_that_are_described_here_are_chosen_by_themselves(tmp_path: Path) -> None:
    at = write_tiny("llama", tmp_path)
    sections = {"model": {"hf": at, "seq": 16}, "data": {"prefixes": ["made"]}}
    assert config_from(sections).model.kind == "gpt"
    assert config_from({**sections, "model": {**sections["model"], "kind": "hf"}}).model.kind == "hf"


def test_sizes_in_which_blocks_differ_are_read(tmp_path: Path) -> None:
    """Gemma 4's blocks have heads of two widths. A number of heads must fit all blocks."""
    pytest.importorskip("transformers", "5.20")
    assert config_of(write_tiny("gemma4_unified_text", tmp_path), {}).model.head_dim == 16
    apart = SimpleNamespace(is_heterogeneous=True, num_hidden_layers=3, per_layer_config=[
        SimpleNamespace(heads=count) for count in (8, 12, 8)
    ])  # fmt: skip
    assert of_blocks(apart, "heads") == [8, 12] and _common(of_blocks(apart, "heads")) == 4


def test_every_unit_of_a_wrapped_model_has_a_name(tmp_path: Path) -> None:
    """A run names the units that it watches. The unit that joins the last norm and the head is not part of the
    module.
    """
    config = config_of(write_tiny("granite", tmp_path), {})
    (module,) = make_trainer(config).modules
    names = [unit_name(module, unit) for unit in stage_of(module).units() or []]
    assert names == ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"]
