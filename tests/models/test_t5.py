"""A T5 computes the same as transformers' T5: buckets of distances, logits and every gradient, with both versions of
its MLP. It generates the same text, and its folders are read and written in both directions.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshwright.checkpoint.hf_files import HFFolder
from meshwright.checkpoint.load import load_weights
from meshwright.errors import UserError
from meshwright.infer.generate import EncoderDecoderGenerator, generate
from meshwright.interop.hf import export_folder, import_folder
from meshwright.models.graph_stage import GraphStage
from meshwright.spec.model.hf import family_for
from meshwright.spec.model.t5 import relative_bucket
from tests.support.oracle import EXACT, MadeSpans, make_trainer, small_config, true_gradients, worst

SIZES = {
    "d_model": 32, "d_kv": 6, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4, "vocab_size": 61,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "decoder_start_token_id": 0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "first": {},
    "newer": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "same-depth": {"num_decoder_layers": None, "feed_forward_proj": "gated-silu"},
}


@pytest.mark.parametrize("stack", ["encoder_bias", "decoder_bias"])
@pytest.mark.parametrize("seq", [16, 21])
def test_fused_kernels_take_the_bias(stack: str, seq: int) -> None:
    """They take a bias whose keys are adjacent in memory and whose rows begin at multiples of 16 elements. With any
    other bias, attention silently computes whole scores in float32.
    """
    stage = make_trainer(small_config(model={"kind": "t5", "layers": 4, "t5": {"decoder_seq": 8}})).modules[0]
    table = getattr(stage, stack)
    bias = table(table.buckets(seq, seq), seq)
    assert bias.shape[2:] == (seq, seq)
    assert bias.stride()[-2:] == (16 * -(-seq // 16), 1)


@pytest.fixture(autouse=True)
def _exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers' norm compute in the precision of the weights. It would take the mean of squares in float32."""
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    monkeypatch.setattr(
        T5LayerNorm, "forward", lambda self, x: F.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)
    )


def make(name: str) -> Any:
    """Return a model of transformers in float64, all of whose weights are random. The newer version has a separate
    output layer.
    """
    import transformers

    torch.manual_seed(len(name))
    config = transformers.T5Config(**{**SIZES, **MODELS[name]}, dropout_rate=0.0)
    model = transformers.T5ForConditionalGeneration(config).double().eval()
    if name == "newer":
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model


def stage_of(folder: HFFolder, **train: int) -> tuple[Any, GraphStage, MadeSpans]:
    config = small_config(model={**asdict(folder.model), "seq": 16}, train={"global_batch": 4, **train})
    data = MadeSpans(config.model)
    trainer = make_trainer(config, data=data)
    load_weights(trainer.modules, folder)
    (stage,) = trainer.modules
    assert isinstance(stage, GraphStage)
    return trainer, stage, data


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (32, 20), (8, 12)])
def test_buckets_equal_those_of_transformers(both_ways: bool, buckets: int, farthest: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = torch.arange(-4096, 4097)
    theirs = T5Attention._relative_position_bucket(distances, both_ways, buckets, farthest)
    assert theirs.tolist() == [relative_bucket(at, both_ways, buckets, farthest) for at in distances.tolist()]


@pytest.mark.parametrize("name", list(MODELS))
def test_logits_gradients_and_text_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = make(name)
    theirs.save_pretrained(tmp_path / "hf")
    folder = HFFolder(tmp_path / "hf")
    assert folder.model.t5.scale_output == ("false" if name == "newer" else "true")
    trainer, stage, data = stage_of(folder)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for n in range(4):
        sample = {key: torch.as_tensor(value)[None] for key, value in data.sample(n).items()}
        logits = theirs(input_ids=sample["tokens"], decoder_input_ids=sample["decoder_tokens"]).logits
        each = F.cross_entropy(logits[0], sample["labels"][0], reduction="none")
        total, count = total + (each * sample["loss_mask"][0]).sum(), count + int(sample["loss_mask"].sum())
        if n == 1:
            with torch.no_grad():
                memory = stage.stream("memory", sample)
                hidden = stage.stream("decoded", sample, {"memory": memory})
                assert torch.allclose(stage.head.logits(hidden), logits[0], rtol=1e-10, atol=1e-10)
    (total / count).backward()
    gradients = {key: value.grad for key, value in theirs.named_parameters()}
    whole = {key: mapped_rows(mapped, gradients) for key, mapped in folder.tensors.items()}
    assert worst(true_gradients(trainer), whole)[0] <= EXACT
    prompt = data.sample(2)["tokens"].tolist()
    found = list(generate(EncoderDecoderGenerator(stage, 61, 9, 0), prompt, 9))
    asked = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "eos_token_id": None, "use_cache": False}
    assert found == theirs.generate(torch.tensor([prompt]), **asked)[0, 1:].tolist()


def mapped_rows(mapped: Any, gradients: dict[str, torch.Tensor]) -> Any:
    """Assemble one of Meshwright's tensors from rows of transformers' tensors."""
    return torch.cat([gradients[run.source][run.theirs] for run in mapped.runs]).numpy()


@pytest.mark.parametrize("name", list(MODELS))
def test_goes_through_a_checkpoint_unchanged(name: str, tmp_path: Path) -> None:
    import transformers

    theirs = make(name)
    theirs.save_pretrained(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "checkpoint", dtype="fp64")
    (tmp_path / "checkpoint" / "hf_origin.json").unlink()  # Now it looks as if it had been trained here.
    assert export_folder(tmp_path / "checkpoint", tmp_path / "out")["family"] == "t5"
    again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert again.config.scale_decoder_outputs == theirs.config.scale_decoder_outputs
    for key, value in theirs.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key


def test_what_a_folder_asks_for_and_we_have_not_is_told(tmp_path: Path) -> None:
    import transformers

    config = transformers.T5Config(**{**SIZES, "feed_forward_proj": "gated-gelu_fast"})
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="feed_forward_proj=gated-gelu_fast in config.json can't be imported"):
        HFFolder(tmp_path)
    with pytest.raises(UserError, match=r"the nearest, t5, has no model.norm=layernorm"):
        family_for(small_config(model={"kind": "t5", "norm": "layernorm"}).model)
