"""The formulas behind `meshwright memory` match the tensors of real ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.config.load import config_from, to_yaml
from meshwright.config.sections import Config
from meshwright.dryrun.meta_mode import SavedBytes
from meshwright.dryrun.run_rank import lasting, state_bytes
from meshwright.plan import activations, memory
from meshwright.plan.cost import NORM_BYTES, optimizer_bytes
from meshwright.plan.job import job_of
from meshwright.plan.memory import Memory
from meshwright.plan.rank import bytes_at_peak
from meshwright.plan.stack import STACKS, states_of
from meshwright.spec.model.mlp import MLPPart
from meshwright.spec.model.part import SavedTensor
from tests.parity.cases import OFFLOAD
from tests.support.oracle import Made, make_trainer, small_config
from tests.support.ranks import run_ranks

LLAMA = {"kv_heads": 2, "norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": False, "ffn": 96}
UNTIED = {"tied_embeddings": False}
SP = {"tp": 2, "sequence_parallel": True}
DOCUMENTS = {"reset_attention": True, "reset_positions": True}
KINDS = ("parameters", "gradients", "master", "optimizer")

TOKEN_NORMS = {"qk_norm": True, "qk_norm_over": "all"}

CASES: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "dp4": (4, {}),
    "dp4-bf16": (4, {"train": {"precision": "bf16"}}),
    "zero1": (4, {"zero": {"stage": 1}, "train": {"precision": "bf16"}}),
    "zero2-llama": (4, {"zero": {"stage": 2}, "model": LLAMA | UNTIED, "train": {"precision": "bf16"}}),
    "zero3": (4, {"zero": {"stage": 3}}),
    "zero3-tp-sp-full": (4, {"zero": {"stage": 3}, "layout": SP, "recompute": {"mode": "full"}, "model": LLAMA}),
    "tp-sp": (4, {"layout": SP, "model": LLAMA | UNTIED, "train": {"precision": "bf16"}}),
    "tp-above-kv-heads": (4, {"layout": {"tp": 4}, "model": LLAMA}),
    "tp-selective": (4, {"layout": {"tp": 2}, "recompute": {"mode": "selective"}}),
    "pp-every": (4, {"layout": {"pp": 2}, "recompute": {"mode": "every:2"}, "model": {"layers": 8}}),
    "pp-gpipe": (4, {"layout": {"pp": 2}, "pipeline": {"schedule": "gpipe"}, "model": UNTIED}),
    "grads-bf16": (4, {"train": {"precision": "bf16", "grad_dtype": "bf16"}, "zero": {"stage": 2}}),
    "moments-bf16": (4, {"train": {"precision": "bf16"}, "optimizer": {"state_dtype": "bf16", "master_dtype": "bf16"}}),
    "moments-bf16-with-masters": (4, {"train": {"precision": "bf16"}, "optimizer": {"state_dtype": "bf16"}}),
    "muon": (4, {"train": {"precision": "bf16"}, "optimizer": {"name": "muon"}, "zero": {"stage": 2}}),
    "muon-disk": (4, {
        "zero": {"stage": 3, "offload": {"optimizer": "disk", "params": "disk", "buffer_mib": 0.04, "path": OFFLOAD}},
        "optimizer": {"name": "muon"}, "layout": {"tp": 2}, "model": LLAMA,
    }),
    "lion": (4, {"train": {"precision": "bf16"}, "optimizer": {"name": "lion", "state_dtype": "bf16"}}),
    "ema": (4, {"train": {"precision": "bf16"}, "optimizer": {"ema": 0.9}}),
    "states-cpu": (4, {"zero": {"stage": 1, "offload": {"optimizer": "cpu"}}, "train": {"precision": "bf16"}}),
    "states-disk": (4, {
        "zero": {"stage": 3, "offload": {"optimizer": "disk", "params": "disk", "buffer_mib": 0.04, "path": OFFLOAD}},
        "train": {"precision": "bf16"}, "comm": {"bucket_mib": 1.0},
    }),
    "dropout": (4, {"model": {"dropout": 0.1}, "layout": SP}),
    "alibi": (4, {"model": {"position": "alibi", "embedding_norm": True}, "layout": {"tp": 2, "pp": 2}}),
    "qk-norm": (4, {"model": LLAMA | {"qk_norm": True}, "layout": {"tp": 2}}),
    "qk-norm-bf16": (4, {"model": LLAMA | {"qk_norm": True}, "train": {"precision": "bf16"}}),
    "token-norms": (4, {"model": LLAMA | TOKEN_NORMS, "layout": {"tp": 2}}),
    "token-norms-bf16": (4, {"model": LLAMA | TOKEN_NORMS, "layout": {"tp": 4}, "train": {"precision": "bf16"}}),
    "documents": (4, {"model": LLAMA, "data": DOCUMENTS, "layout": {"tp": 2, "pp": 2}}),
    "documents-full": (4, {"data": DOCUMENTS, "recompute": {"mode": "full"}}),
    "parallel-residual": (4, {"model": {"parallel_residual": True, "mlp": "relu"}, "layout": {"pp": 4}}),
    "all": (8, {
        "layout": {**SP, "pp": 2, "chunks": 2}, "pipeline": {"schedule": "interleaved"}, "zero": {"stage": 3},
        "model": LLAMA, "train": {"precision": "bf16"}, "recompute": {"mode": "full"},
    }),
    "all-plain": (8, {"layout": {**SP, "pp": 2}, "zero": {"stage": 1}, "model": UNTIED}),
}  # fmt: skip


def config_of(name: str) -> Config:
    sections = {key: dict(value) for key, value in CASES[name][1].items()}
    sections["model"] = {"layers": 4, "hidden": 64, "heads": 4, "vocab": 300, "seq": 64} | sections.get("model", {})
    sections["train"] = {"precision": "fp32", "global_batch": 16, "micro_batch": 2} | sections.get("train", {})
    sections["run"] = {"device": "cpu"}
    return small_config(**sections)


def said_of(name: str, rank: int) -> Memory:
    """Return the planner's prediction for a rank."""
    job = job_of(config_of(name), CASES[name][0])
    return memory.rank_memory(job, job.layout.coordinate(rank)["pp"])


def count(rank: int, world: int, names: list[str]) -> list[dict[str, int]]:
    """Train every case on this rank. Return, by case, the bytes of its tensors by kind and the most that autograd saved
    at once.
    """
    found = []
    for name in names:
        c = config_of(name)
        trainer = make_trainer(c, rank, world, Made(c.model.vocab, c.model.seq, segments=c.data.reset_attention))
        trainer.step()
        saved = SavedBytes(lasting(trainer))
        with saved:
            trainer.gradients()
        states = trainer.optimizer.states
        rings = [pair for state in states if not state.ready for ring in state._prefetcher._rings for pair in ring]
        brought = sum(working.nbytes for _, working in rings)
        found.append(state_bytes(trainer) | {"activations": saved.bytes.most, "rings": brought})
    return found


QUICK = ("tp-sp", "documents", "zero2-llama", "moments-bf16-with-masters", "muon", "lion", "alibi", "dropout")


@pytest.fixture(scope="module")
def counted(request: pytest.FixtureRequest) -> dict[str, list[dict[str, int]]]:
    """Count the cases of this test run only: deselected cases cost nothing."""
    items = [item for item in request.session.items if item.path == request.path]
    specs = (getattr(item, "callspec", None) for item in items if "counted" in getattr(item, "fixturenames", ()))
    chosen = {spec.params.get("name") for spec in specs if spec is not None}
    found: dict[str, list[dict[str, int]]] = {}
    for world in (4, 8):
        names = [name for name, (ranks, _) in CASES.items() if ranks == world and name in chosen | {"tp-sp"}]
        by_rank = run_ranks(world, count, names, deadline=300.0) if names else []
        found |= {name: [rank[i] for rank in by_rank] for i, name in enumerate(names)}
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.wide]) for name in CASES]
)
def test_tensors_of_every_rank_are_what_the_formula_says(name: str, counted: dict[str, list[dict[str, int]]]) -> None:
    """States match to the byte, and the activations saved for backward within 5 %."""
    for rank, real in enumerate(counted[name]):
        said = said_of(name, rank)
        assert {kind: getattr(said, kind) for kind in KINDS} == {kind: real[kind] for kind in KINDS}, f"rank {rank}"
        assert abs(said.activations / real["activations"] - 1.0) <= 0.05, (rank, said.activations, real["activations"])
        assert rings(name, rank) == real["rings"]


def rings(name: str, rank: int) -> int:
    """Return how much the transfer rings of offloaded states add to `buffers`. The other buffers exist even with rings
    of size zero.
    """
    with pytest.MonkeyPatch.context() as patch:
        with_pieces = said_of(name, rank)
        patch.setattr(memory, "RING", 0)
        without = said_of(name, rank)
    assert with_pieces.peak - without.peak == with_pieces.buffers - without.buffers
    return int(with_pieces.buffers - without.buffers)


def test_other_programs_keep_whole_masters() -> None:
    """Meshwright's masters are only the 16 bits that a bf16 weight lacks. The update then also reads and writes the
    weights: 28 bytes in all.
    """
    config = config_of("dp4-bf16")
    ours, theirs = (memory.rank_memory(job_of(config, 4, stack), 0) for stack in (None, STACKS["fused"]))
    assert (ours.master, theirs.master) == (ours.parameters, 2 * ours.parameters)
    assert [optimizer_bytes(states_of(config, own)) - NORM_BYTES for own in (True, False)] == [28, 30]


def test_weights_that_are_their_own_masters_are_read_and_written_once() -> None:
    """In fp32 the update touches the gradient once, the weight twice and two moments twice. In bf16 without masters
    everything but the gradient is half of that.
    """
    narrow = {"master_dtype": "bf16", "state_dtype": "bf16"}
    for keys, wanted in (({"precision": "fp32"}, 4 + 8 + 16), ({"precision": "bf16"}, 4 + 4 + 8)):
        config = small_config(train=keys, optimizer=narrow if wanted == 16 else {})
        assert optimizer_bytes(states_of(config)) - NORM_BYTES == wanted


def test_a_wrong_formula_is_found(counted: dict[str, list[dict[str, int]]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Here an MLP claims to save its inner features only once. The planner's cache is bypassed."""

    def once(mlp: MLPPart, at: Any, batch: Any, kernels: Any) -> list[SavedTensor]:
        return [SavedTensor("mlp", batch.tokens(at) * mlp.width(at) * batch.element)]

    real = counted["tp-sp"][0]["activations"]
    monkeypatch.setattr(activations, "saved_by_unit", activations.saved_by_unit.__wrapped__)
    assert abs(said_of("tp-sp", 0).activations / real - 1.0) <= 0.05
    monkeypatch.setattr(MLPPart, "saved", once)
    assert abs(said_of("tp-sp", 0).activations / real - 1.0) > 0.05


@pytest.mark.parametrize("name", list(CASES))
def test_what_is_there_at_the_peak_adds_up_to_it(name: str) -> None:
    """Each kind is within its own maximum, kernels have some workspace, and nothing is left over."""
    for rank in range(CASES[name][0]):
        found = said_of(name, rank)
        at = found.at_peak
        always = found.parameters + found.master + found.optimizer
        parts = (at.gradients, at.activations, at.buffers, at.temporary)
        assert always + sum(parts) == pytest.approx(found.peak, abs=1.0) and min(parts) >= 0
        assert at.gradients <= found.gradients and at.activations <= found.activations and at.buffers <= found.buffers
        assert at.temporary > 0 or at.activations == 0
        shown = bytes_at_peak(found)
        assert shown["temporary"] == pytest.approx(at.temporary, abs=8.0) and shown["peak"] == int(found.peak)


def test_the_table_says_for_which_devices_it_is(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A CPU compiles only if the config asks for it."""
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config_from({"model": {"preset": "gpt2-124m"}, "data": {"prefixes": ["none"]}})))
    for word, says in (
        ("run.device=auto", "on accelerators, blocks compiled (train.compile=auto); with run.device=cpu for CPUs"),
        ("run.device=cpu", "on CPUs, blocks not compiled (run.device=cpu, train.compile=auto)"),
    ):
        assert main(["memory", str(path), word]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert says in lines and any(line.endswith("at the peak") for line in lines)
        assert any("temporary" in line for line in lines)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 119.5), (1, 31.3), (2, 16.6), (3, 1.87)])
def test_the_example_of_the_zero_paper(
    stage: int, gigabytes: float, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The paper has 7.5B parameters on 64 ranks with fp16 weights and gradients: 120, 31.4, 16.6 and 1.9 GB (here
    7.47B).
    """
    config = config_from({
        "model": {"layers": 36, "hidden": 4096, "heads": 32, "vocab": 51200, "seq": 1024},
        "train": {"precision": "fp16", "grad_dtype": "fp16", "global_batch": 64}, "data": {"prefixes": ["none"]},
        "zero": {"stage": stage},
    })  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    main(["memory", str(path), "--world", "64", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert sum(said[kind] for kind in KINDS) / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_a_cluster_keeps_the_layout_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    """The cluster only determines the devices that the total is for."""
    found = []
    for words in ([], ["--cluster", "h100-80g-dgx"]):
        assert main(["memory", "llama3-70b", "--json", *words]) == 0
        found.append(json.loads(capsys.readouterr().out))
    alone, named = found
    assert named["rank_parameters"] == alone["rank_parameters"] and named["device_gib"] < 80
