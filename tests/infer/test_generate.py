"""Generated text: greedy text equals that of transformers at any tp, and sampling follows the probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.errors import UserError
from meshwright.infer.generate import Generator, choose_token, generate
from meshwright.interop.hf import import_folder
from tests.interop.hf_models import EXPERTS, MODELS, continue_prompts, save
from tests.support.oracle import make_trainer, small_config
from tests.support.ranks import run_ranks

PROMPT = [7, 3, 3, 41, 0, 59]
COUNT = 64
STD = 0.5  # standard deviation of the weights, so large that a text does not settle on one token
LEAD = 1e-4  # lead of the likeliest token over the next, too large for another order of summation in float32 to reverse
# Models with one key-value head on two ranks, with divided ALiBi slopes, or with norms over all heads.
AT_TP2 = ["gpt2-untied-relu", "qwen2-tied", "bloom-six-heads", "olmoe"]

Texts = dict[str, tuple[Path, list[int]]]


def greedy(model: Any) -> tuple[list[int], float]:
    """Return transformers' continuation of the prompt, made with its own cache, and the smallest lead of a chosen
    token.
    """
    model.generation_config.eos_token_id = None  # random models have no end token
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False, pad_token_id=0,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    best = torch.cat(out.logits).topk(2).values
    return out.sequences[0, len(PROMPT) :].tolist(), float((best[:, 0] - best[:, 1]).min())


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    """Save each model as a checkpoint, and return it with the text of transformers."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("texts")
    found = {}
    for name in MODELS:
        text, lead = greedy(save(name, folder / name / "hf", std=STD))
        assert len(text) == COUNT and len(set(text)) >= 3 and lead > LEAD, "a text that says something"
        import_folder(folder / name / "hf", folder / name / "checkpoint")
        found[name] = (folder / name / "checkpoint", text)
    return found


def assert_same_texts(theirs: Texts, names: list[str], tp: int, **layout: int) -> None:
    words = ([str(theirs[name][0]) for name in names], PROMPT, COUNT, {"tp": tp, **layout})
    ranks = [continue_prompts(0, 1, *words)] if tp == 1 else run_ranks(tp, continue_prompts, *words, deadline=300.0)
    for rank in ranks:
        assert dict(zip(names, rank, strict=True)) == {name: theirs[name][1] for name in names}


def test_greedy_text_of_every_family_is_that_of_transformers(theirs: Texts) -> None:
    assert_same_texts(theirs, list(MODELS), 1)


@pytest.mark.wide
def test_greedy_text_at_tp2(theirs: Texts) -> None:
    assert_same_texts(theirs, AT_TP2, 2)


def test_greedy_text_with_experts_divided_over_tp(theirs: Texts) -> None:
    """Each of two ranks holds half of the experts. With a single token, one rank has nothing to route."""
    assert_same_texts(theirs, ["deepseek-v3"], 2, ep=2, etp=1)


@pytest.mark.wide
def test_greedy_text_of_every_family_at_tp2(theirs: Texts) -> None:
    assert_same_texts(theirs, EXPERTS, 2, ep=2, etp=1)
    assert_same_texts(theirs, [name for name in MODELS if name not in AT_TP2], 2)


def test_the_cache_changes_nothing_and_its_end_is_told() -> None:
    """The logits in float64 equal those of a pass over the whole sequence, for every kind of position. A full cache is
    refused.
    """
    for position in ("learned", "rope", "alibi", "none"):
        model = {"position": position, "seq": 16, "kv_heads": 2 if position == "rope" else 4}
        module = make_trainer(small_config(model=model)).modules[0]
        ids = [5, 1, 44, 2, 2, 19, 52, 0, 7, 7, 13, 30, 31, 8, 9, 50]
        generator = Generator(module, 53, 16)
        found = [generator.next_logits(ids[:5])] + [generator.next_logits([n]) for n in ids[5:]]
        with torch.no_grad():
            hidden, _ = module.trunk({"tokens": torch.tensor([ids])})
            whole = module.head.logits(hidden)[4:, :53]
        assert float((torch.stack(found) - whole).abs().max()) < 1e-13
        with pytest.raises(UserError, match="17 tokens are more than the model's 16"):
            generator.next_logits([1])


def test_a_text_ends_after_an_end_token() -> None:
    module = make_trainer(small_config(model={"seq": 16})).modules[0]
    text = list(generate(Generator(module, 53, 16), [3, 4], 10, temperature=2.0, seed=1))
    first = text.index(text[4])
    assert (
        len(text) == 10
        and list(generate(Generator(module, 53, 16), [3, 4], 10, 2.0, seed=1, ends={text[4]})) == (text[: first + 1])
    )


def test_what_is_drawn() -> None:
    """Tokens are drawn by temperature and top_p, and a seed always draws the same ones."""
    logits = torch.tensor([2.0, 1.0, 0.5, -1.0, 3.0]).double()

    def drawn(temperature: float, top_p: float = 1.0) -> torch.Tensor:
        random = torch.Generator().manual_seed(0)
        many = torch.tensor([choose_token(logits, temperature, top_p, random) for _ in range(1500)])
        return torch.bincount(many, minlength=5) / len(many)

    assert drawn(0.0).tolist() == [0, 0, 0, 0, 1]
    for temperature in (0.5, 1.0, 3.0):
        assert float((drawn(temperature) - torch.softmax(logits / temperature, 0)).abs().max()) < 0.05
    shares = torch.softmax(logits, 0)
    kept = torch.where(torch.tensor([True, False, False, False, True]), shares, 0.0)
    top = float(shares[4]) + 1e-3  # the likeliest token is not enough, and the first two are
    assert float((drawn(1.0, top) - kept / kept.sum()).abs().max()) < 0.05
    assert drawn(1.0, 1e-6).tolist() == [0, 0, 0, 0, 1]
    assert drawn(1.0).tolist() == drawn(1.0).tolist()
