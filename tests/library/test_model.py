"""`meshwright.load`: logits, gradients and texts of a loaded model, compared with transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import meshwright
from meshwright.checkpoint.hf_files import HFFolder
from meshwright.errors import UserError
from meshwright.nn.parallel import record_of
from tests.cli.test_text_commands import write_tokenizer
from tests.interop.hf_models import save
from tests.models.test_t5 import MODELS as PAIRS
from tests.models.test_t5 import make as make_pair
from tests.models.test_t5 import mapped_rows

transformers = pytest.importorskip("transformers")
IDS = torch.tensor([[0, 7, 3, 41, 9, 12], [0, 5, 5, 30, 2, 60]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    made = tmp_path_factory.mktemp("llama")
    save("llama2", made, std=0.5)
    write_tokenizer(made)
    return made


def test_logits_and_every_gradient_are_those_of_transformers(tmp_path: Path) -> None:
    theirs = save("opt", tmp_path, std=0.5).double().train(False)
    ours = meshwright.load(tmp_path, precision="fp64", device="cpu")
    torch.testing.assert_close(ours(IDS), theirs(input_ids=IDS).logits)
    ours(IDS).square().sum().backward()
    theirs(input_ids=IDS).logits.square().sum().backward()
    gradients = {key: value.grad for key, value in theirs.named_parameters()}
    mine = {record_of(parameter).name: parameter.grad for parameter in ours.parameters()}
    whole = {key: mapped_rows(mapped, gradients) for key, mapped in HFFolder(tmp_path).tensors.items()}
    assert set(mine) <= set(whole) and len(mine) > 20
    for name, grad in mine.items():
        assert grad is not None
        torch.testing.assert_close(grad, torch.as_tensor(whole[name]), msg=name)


def test_texts_are_those_of_transformers_alone_and_together(folder: Path) -> None:
    model = meshwright.load(folder, precision="fp32", device="cpu")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def expected(prompt: list[int]) -> str:
        ids = torch.tensor([prompt])
        seen = torch.ones_like(ids)
        out = theirs.generate(ids, attention_mask=seen, max_new_tokens=12, do_sample=False, pad_token_id=0)
        tokens = out[0, len(prompt) :].tolist()
        return str(model.tokenizer.decode(tokens[:-1] if tokens[-1] == 2 else tokens))

    short, long = model.generate("w7 w3", max_tokens=12), model.generate("w9 w11 w40 w8", max_tokens=12)
    assert (short, long) == (expected([0, 7, 3]), expected([0, 9, 11, 40, 8])) and short != long
    assert model.generate(["w9 w11 w40 w8", "w7 w3"], max_tokens=12) == [long, short]
    drawn = {model.generate("w7 w3", max_tokens=12, temperature=2.0, seed=seed) for seed in range(4)}
    assert len(drawn) > 1
    assert not model.training and not model.net.training


def test_an_encoder_decoder_takes_both_texts(tmp_path: Path) -> None:
    theirs = make_pair(next(iter(PAIRS))).float()
    theirs.save_pretrained(tmp_path)
    model = meshwright.load(tmp_path, precision="fp32", device="cpu")
    out = theirs.eval()(input_ids=IDS, decoder_input_ids=IDS[:, :4]).logits
    torch.testing.assert_close(model(IDS, IDS[:, :4]), out, rtol=1e-3, atol=1e-4)
    with pytest.raises(UserError, match="is an encoder-decoder: give decoder_input_ids too"):
        model(IDS)


def test_a_family_without_a_description_is_loaded(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    made = transformers.StableLmConfig(vocab_size=61, num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    theirs = transformers.StableLmForCausalLM(made).eval()
    theirs.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    model = meshwright.load(tmp_path, precision="fp32", device="cpu")
    torch.testing.assert_close(model(IDS), theirs(input_ids=IDS).logits, rtol=1e-4, atol=1e-5)
    assert model.generate(["w7 w3", "w9"], max_tokens=3)[0] == model.generate("w7 w3", max_tokens=3)


def test_mistakes_are_sentences(folder: Path, tmp_path: Path) -> None:
    model = meshwright.load(folder, device="cpu")
    for call, message in (
        (lambda: model(torch.zeros(1, model.config.model.seq + 1, dtype=torch.int64)), "are more than the model's"),
        (lambda: model(IDS, IDS), "leave decoder_input_ids out"),
        (lambda: model.generate("w7", temperature=-1.0), "temperature must be 0 or at least"),
        (lambda: model.generate("w7", max_tokens=0), "max_tokens and batch must be at least 1"),
        (lambda: meshwright.load(tmp_path / "none"), "none"),
    ):
        with pytest.raises(UserError, match=message):
            call()  # type: ignore[no-untyped-call]
