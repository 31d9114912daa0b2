"""A BERT computes the same logits and gradients as transformers' BERT, with padding. Its folders are read and written
in both directions.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from meshwright.checkpoint.hf_files import HFFolder
from meshwright.checkpoint.load import load_weights
from meshwright.errors import UserError
from meshwright.interop.hf import export_folder, import_folder
from meshwright.models.graph_stage import GraphStage
from meshwright.models.heads import MaskedHead
from meshwright.spec.model.hf import family_for
from tests.support.oracle import EXACT, MadeMasked, make_trainer, small_config, true_gradients, worst

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 61, "intermediate_size": 48,
    "max_position_embeddings": 16, "pad_token_id": None,  # transformers gives the padding token no gradient.
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "pretraining": ("BertForPreTraining", {}),
    "masked": ("BertForMaskedLM", {"hidden_act": "gelu_new", "type_vocab_size": 3}),
    "quick": ("BertForPreTraining", {"hidden_act": "quick_gelu", "num_attention_heads": 2}),
}


def make(name: str) -> Any:
    """Return a model of transformers in float64, all of whose weights are random."""
    import transformers

    kind, more = MODELS[name]
    torch.manual_seed(len(name))
    config = transformers.BertConfig(**{"num_attention_heads": 4, **SIZES, **more})
    model = getattr(transformers, kind)(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.15)
    return model


def plain_loss(model: Any, data: MadeMasked, samples: int) -> torch.Tensor:
    """Return the mean over the masked tokens of all samples plus the mean over the samples' order losses."""
    sums: dict[str, torch.Tensor] = {}
    for n in range(samples):
        sample = {name: torch.as_tensor(value)[None] for name, value in data.sample(n).items()}
        out = model(sample["tokens"], sample["segments"] == 0, sample["token_types"])
        count = int(sample["loss_mask"].sum())
        masked = (out.logits if "logits" in out else out.prediction_logits)[0, sample["places"][0, :count]]
        found = [("loss", F.cross_entropy(masked, sample["labels"][0, :count], reduction="sum"), count)]
        if "seq_relationship_logits" in out:
            found.append(("order", F.cross_entropy(out.seq_relationship_logits, sample["swapped"]), 1))
        for name, total, count in found:
            more = torch.stack((total, torch.tensor(float(count), dtype=total.dtype)))
            sums[name] = sums.get(name, torch.zeros(2, dtype=total.dtype)) + more
    return torch.stack([total[0] / total[1] for total in sums.values()]).sum()


@pytest.mark.parametrize("name", list(MODELS))
def test_logits_and_gradients_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = make(name)
    theirs.save_pretrained(tmp_path / "hf")
    folder = HFFolder(tmp_path / "hf")
    assert folder.model.pooler == (name != "masked") and folder.model.predictions == 2
    config = small_config(model={**asdict(folder.model), "predictions": 4}, train={"global_batch": 4})
    data = MadeMasked(config.model)
    trainer = make_trainer(config, data=data)
    load_weights(trainer.modules, folder)
    stage, sample = trainer.modules[0], {n: torch.as_tensor(x)[None] for n, x in data.sample(1).items()}
    assert isinstance(stage, GraphStage) and isinstance(stage.head, MaskedHead)
    with torch.no_grad():
        out = theirs(sample["tokens"], sample["segments"] == 0, sample["token_types"])
        hidden, _ = stage.trunk(sample)
        here = sample["segments"][0] == 0
        logits = out.logits if "logits" in out else out.prediction_logits
        assert torch.allclose(stage.head.logits(hidden)[here], logits[0, here], rtol=1e-10, atol=1e-10)
        if folder.model.pooler:
            order = stage.head.order_logits(hidden[:1])
            assert torch.allclose(order, out.seq_relationship_logits, rtol=1e-10, atol=1e-10)
    plain_loss(theirs, data, 4).backward()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
    theirs.save_pretrained(tmp_path / "gradients")
    found = HFFolder(tmp_path / "gradients")
    gradients = {each: found.block(each, (0,) * len(shape), shape).numpy() for each, shape in found.shapes.items()}
    assert worst(true_gradients(trainer), {each: np.asarray(value) for each, value in gradients.items()})[0] <= EXACT


@pytest.mark.parametrize("name", list(MODELS))
def test_goes_through_a_checkpoint_unchanged(name: str, tmp_path: Path) -> None:
    import transformers

    theirs = make(name)
    theirs.save_pretrained(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "checkpoint", dtype="fp64")
    (tmp_path / "checkpoint" / "hf_origin.json").unlink()  # Now it looks as if it had been trained here.
    assert export_folder(tmp_path / "checkpoint", tmp_path / "out")["family"] == "bert"
    again = getattr(transformers, MODELS[name][0]).from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert again.config.architectures == [MODELS[name][0]]
    for key, value in theirs.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key


def test_what_no_family_has_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the nearest, bert, has no model.norm_place=pre"):
        family_for(small_config(model={"kind": "bert", "norm_place": "pre"}).model)
    with pytest.raises(UserError, match="no Hugging Face family can express"):
        family_for(small_config(model={"norm_place": "post"}).model)
    import transformers

    transformers.BertModel(transformers.BertConfig(num_attention_heads=4, **SIZES)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="architectures=.*only BertForPreTraining and BertForMaskedLM can"):
        HFFolder(tmp_path)
    config = transformers.BertConfig(num_attention_heads=4, tie_word_embeddings=False, **SIZES)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "untied")
    with pytest.raises(UserError, match="asks for model.tied_embeddings=False, which no bert has here"):
        HFFolder(tmp_path / "untied")
