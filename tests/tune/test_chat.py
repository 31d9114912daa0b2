"""Instruction data: the learned tokens of conversations, in the formats and templates that are in use."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.cli.main import main
from meshwright.config.load import to_yaml
from meshwright.data.chat_template import ChatTemplate, TemplateError
from meshwright.data.conversations import Conversation, PreferencePair, record_of
from meshwright.data.packed import PackedStream, best_fit
from meshwright.data.tokenizers import Tokenizer, load_tokenizer
from meshwright.engine.datasets import datasets_of
from meshwright.errors import UserError
from tests.support.oracle import EXACT, gather_global, make_trainer, small_config, true_gradients, worst
from tests.tune.templates import CASES, CHATML, HERMES, LLAMA2, SPECIAL, THINKING


def talk(messages: list[tuple[str, str]], **more: Any) -> Conversation:
    return Conversation([{"role": role, "content": text} for role, text in messages], **more)


def make_model(folder: Path, template: str = CHATML) -> Path:
    """Write a folder with a tokenizer of bytes and of the special tokens that the templates use."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE({each: n for n, each in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    marks = {mark for _, _, text in CASES.values() for mark in re.findall(r"<[|｜][^<>]*>|<[a-z_]+>|</s>", text)}
    library.add_special_tokens([AddedToken(mark, special=True) for mark in sorted(marks | {"<s>", "</s>"})])
    library.save(str(folder / "tokenizer.json"))
    settings = {**SPECIAL, "eos_token": {"content": "</s>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def marked(tokenizer: Tokenizer, tokens: list[int], mask: list[int]) -> str:
    """Return the text of tokens, with the learned parts between signs."""
    library: Any = tokenizer._library  # type: ignore[attr-defined]
    text, inside = "", 0
    run_of_tokens: list[int] = []
    for token, learned in [*zip(tokens, mask, strict=True), (None, 0)]:
        if learned != inside or token is None:
            text += library.decode(run_of_tokens, skip_special_tokens=False)
            if learned != inside:
                text += "«" if learned else "»"
            run_of_tokens, inside = [], learned
        run_of_tokens += [token] if token is not None else []
    return text


@pytest.mark.parametrize("name", list(CASES))
def test_what_is_learned_is_what_the_assistant_says(name: str, model: Path) -> None:
    """Only the answers and their end tokens are learned, whether templates mark generation or not."""
    template, messages, wanted = CASES[name]
    tokenizer = load_tokenizer(str(model))
    found = ChatTemplate(template, SPECIAL).encode(talk(messages), tokenizer)
    assert marked(tokenizer, *found) == wanted
    last = ChatTemplate(template, SPECIAL).encode(talk(messages, only_last=True), tokenizer)
    assert marked(tokenizer, *last) == wanted.replace("«", "", 1).replace("»", "", 1)


def test_calls_of_tools_are_learned_and_their_results_are_not(model: Path) -> None:
    call = {"name": "add", "arguments": {"a": 1}}
    messages = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Two."},
    ]
    tokenizer = load_tokenizer(str(model))
    found = ChatTemplate(HERMES, SPECIAL).encode(Conversation(messages, [{"name": "add"}]), tokenizer)
    assert marked(tokenizer, *found) == (
        '<|im_start|>system\n<tools>[{"name": "add"}]</tools><|im_end|>\n<|im_start|>user\n1+1<|im_end|>\n'
        f"<|im_start|>assistant\n«<tool_call>{json.dumps(call)}</tool_call><|im_end|>»\n"
        "<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n«Two.<|im_end|>»\n"
    )


def test_what_can_not_be_told_is_refused(model: Path) -> None:
    tokenizer = load_tokenizer(str(model))
    thoughts = talk([("user", "a"), ("assistant", "<think>x</think>b"), ("user", "c"), ("assistant", "d")])
    with pytest.raises(TemplateError, match="changes earlier text when a turn is added"):
        ChatTemplate(THINKING, SPECIAL).encode(thoughts, tokenizer)
    assert sum(ChatTemplate(THINKING, SPECIAL).encode(talk([("user", "a"), ("assistant", "b")]), tokenizer).mask) == 2
    with pytest.raises(TemplateError, match="no message of the assistant"):
        ChatTemplate(CHATML, SPECIAL).encode(talk([("user", "a")]), tokenizer)
    with pytest.raises(TemplateError, match="roles must alternate"):
        ChatTemplate(CASES["mistral"][0], SPECIAL).render([{"role": "assistant", "content": "a"}])
    with pytest.raises(TemplateError, match="can't be read"):
        ChatTemplate("{% for %}", SPECIAL).render([])
    with pytest.raises(TemplateError, match="unsafe"):  # a template is a program, and runs in a sandbox
        ChatTemplate("{{ messages.__class__.__mro__[-1].__subclasses__() }}", SPECIAL).render([])


ASKED, SAID = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
FORMATS: list[dict[str, Any]] = [
    {"messages": [ASKED, SAID]},
    {"prompt": "q", "completion": "a"},
    {"prompt": [ASKED], "completion": [SAID]},
    {"instruction": "q", "input": "", "output": "a"},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
]


def test_every_format_is_the_same_conversation() -> None:
    for value in FORMATS:
        found = record_of(value)
        assert isinstance(found, Conversation) and found.messages == [ASKED, SAID]
    alpaca = {"instruction": "i", "input": "j", "output": "o", "history": [["q", "a"]], "system": "s"}
    found = record_of(alpaca)
    assert isinstance(found, Conversation) and [m["content"] for m in found.messages] == ["s", "q", "a", "i\nj", "o"]
    bad = {"role": "assistant", "content": "b"}
    for value in ({"prompt": "q", "chosen": "a", "rejected": "b"}, {"chosen": [ASKED, SAID], "rejected": [ASKED, bad]}):
        pair = record_of(value)
        assert (
            isinstance(pair, PreferencePair)
            and pair.chosen.messages == [ASKED, SAID]
            and pair.rejected.messages[1] == bad
        )
    judged = record_of({"prompt": "q", "completion": "a", "label": False})
    assert isinstance(judged, Conversation) and judged.good is False
    for value in ({"text": "x"}, {"messages": []}, {"messages": [{"role": "alien", "content": ""}]},
                  {"chosen": [ASKED, SAID], "rejected": [ASKED, SAID]}):  # fmt: skip
        with pytest.raises(ValueError):
            record_of(value)


def test_best_fit_packs_tightly_and_loses_nothing() -> None:
    assert best_fit([5, 7, 5, 2, 4, 2, 5, 1, 6], 10) == [[1, 3, 7], [8, 4], [0, 2], [6, 5]]
    random = np.random.default_rng(0)
    sizes = random.integers(1, 100, 3000).tolist()
    bins = best_fit(sizes, 100)
    assert sorted(item for each in bins for item in each) == list(range(3000))
    assert max(sum(sizes[n] for n in each) for each in bins) <= 100
    assert len(bins) <= 11 / 9 * (sum(sizes) / 100) + 1


def write_talks(path: Path, count: int = 30) -> None:
    random = np.random.default_rng(1)
    words = ["a", "bc", "def", "ghij"]
    lines = []
    for n in range(count):
        asked, said = f"{n}?", " ".join(random.choice(words, 1 + n % 4))
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines))


def packed_config(prefix: Path, **more: dict[str, Any]) -> Any:
    sections: dict[str, Any] = {
        "model": {"layers": 2, "seq": 192, "vocab": 320, "position": "rope"}, "train": {"global_batch": 2},
        "data": {"prefixes": [str(prefix)], "objective": "chat", "split": [1, 0, 0]},
    }  # fmt: skip
    return small_config(**{key: {**sections.get(key, {}), **more.get(key, {})} for key in {*sections, *more}})


def test_the_command_writes_what_training_reads(model: Path, tmp_path: Path, capsys: Any) -> None:
    write_talks(tmp_path / "talks.jsonl")
    words = ["data", "chat", str(tmp_path / "talks.jsonl"), "--model", str(model), "--out", str(tmp_path / "talks")]
    assert main([*words, "--seq", "192"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("<|im_start|>assistant") == 5 and "are learned (" in shown and "% filled" in shown
    assert main(words) == 2 and "--force" in capsys.readouterr().err
    stream = datasets_of(packed_config(tmp_path / "talks"))[0]
    tokenizer = load_tokenizer(str(model))
    seen = []
    for n in range(stream.dataset.epoch_samples):
        sample = stream.sample(n)
        for segment in range(int(sample["segments"].max()) + 1):
            here = sample["segments"] == segment
            if not sample["loss_mask"][here].any():
                continue  # padding
            assert sample["positions"][here].tolist() == list(range(here.sum()))
            seen.append(marked(tokenizer, sample["labels"][here].tolist(), sample["loss_mask"][here].tolist()))
    wanted = [f"\n{n}?<|im_end|>\n" for n in range(30)]
    assert len(seen) == 30 and all(any(each in text for text in seen) for each in wanted)
    assert all(text.count("«") == 1 and text.endswith("<|im_end|>»\n") for text in seen)
    with pytest.raises(UserError, match="set data.objective=chat"):
        datasets_of(packed_config(tmp_path / "talks", data={"objective": "auto"}))
    (tmp_path / "bad.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}')
    words[2], words[-1] = str(tmp_path / "bad.jsonl"), str(tmp_path / "bad")
    assert main(words) == 2 and "line 1: no message of the assistant" in capsys.readouterr().err
    make_model(model, LLAMA2 + "{{ messages | length }}")
    words[2] = str(tmp_path / "talks.jsonl")
    assert main(words) == 2 and "changes earlier text" in capsys.readouterr().err


def test_a_sample_is_shown_as_conversations(model: Path, tmp_path: Path, capsys: Any) -> None:
    """Chat samples have segments and positions as samples with blanks do, and were once shown like those."""
    write_talks(tmp_path / "talks.jsonl")
    prefix = tmp_path / "talks"
    assert main(["data", "chat", str(tmp_path / "talks.jsonl"), "--model", str(model), "--out", str(prefix)]) == 0
    (tmp_path / "chat.yaml").write_text(to_yaml(packed_config(prefix)))
    capsys.readouterr()
    assert main(["data", "show", str(tmp_path / "chat.yaml"), "--sample", "0"]) == 0
    shown = capsys.readouterr().out
    sample = datasets_of(packed_config(prefix))[0].sample(0)
    learned = int(sample["loss_mask"].sum())
    count = shown.count("<|im_start|>assistant")
    assert f"sample 0 of train: {count} conversations in 192 tokens, {learned} of them learned" in shown
    assert shown.count("«") - 1 == count, "each answer is marked, and the legend once"
    assert "blank" not in shown and "padding" not in shown


class Alone:
    """The conversations of a packed stream, each in a separate sample."""

    def __init__(self, stream: PackedStream) -> None:
        self.found = []
        for n in range(2):
            sample = stream.sample(n)
            for segment in range(int(sample["segments"].max()) + 1):
                at = np.flatnonzero(sample["segments"] == segment)
                one = {key: np.zeros_like(value) for key, value in sample.items()}
                for key in one:
                    one[key][: len(at)] = sample[key][at]
                one["segments"][: len(at)], one["segments"][len(at) :] = 0, 1
                self.found.append(one)

    def sample(self, n: int) -> dict[str, Any]:
        blank = {key: np.zeros_like(value) for key, value in self.found[0].items()}
        return self.found[n] if n < len(self.found) else blank


def test_packed_and_unpacked_gradients_are_equal(model: Path, tmp_path: Path) -> None:
    """Gradients are equal in float64 for any number of micro-batches: the loss counts the tokens of the whole batch."""
    write_talks(tmp_path / "talks.jsonl")
    main(["data", "chat", str(tmp_path / "talks.jsonl"), "--model", str(model), "--out", str(tmp_path / "talks")])
    config = packed_config(tmp_path / "talks", train={"global_batch": 2, "micro_batch": 1})
    stream = datasets_of(config)[0].dataset
    alone = Alone(stream)
    packed = gather_global(true_gradients(make_trainer(config, data=stream)))
    count = len(alone.found)
    apart = packed_config(tmp_path / "talks", train={"global_batch": count, "micro_batch": 1})
    assert count > 4 and worst(true_gradients(make_trainer(apart, data=alone)), packed)[0] < EXACT
