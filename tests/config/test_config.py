"""Tests of configs: YAML and command-line words become frozen dataclasses and back, and rules check them."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.config.load import config_from, load_config, to_mapping, to_yaml
from meshwright.config.numbers import number_from
from meshwright.config.presets import PRESETS
from meshwright.config.rules import RULES, check, first_broken_rule
from meshwright.config.sections import ModelConfig
from meshwright.config.yaml_text import parse_yaml
from meshwright.errors import UserError
from meshwright.spec.model.description import describe
from meshwright.spec.model.part import SINGLE_RANK

SMALL = {"model": {"layers": 4, "hidden": 64, "heads": 4, "vocab": 100, "seq": 32}, "data": {"prefixes": ["a"]}}


def test_numbers_as_people_write_them() -> None:
    assert parse_yaml("[1e-3, 3E4, 1.5e2, .5, 7, -2e-1]", "here") == [1e-3, 3e4, 150.0, 0.5, 7, -0.2]
    config = config_from(SMALL | {"optimizer": {"lr": parse_yaml("1e-3", "")}, "train": {"steps": 1e3}})
    assert config.optimizer.lr == 1e-3 and config.train.steps == 1000 and isinstance(config.train.steps, int)
    words = ["model.seq=8k", "train.steps=10k"]
    with pytest.raises(UserError, match="optimizer.lr=0.3x must be a number"):
        load_config(None, ["model.preset=gpt2-124m", "data.prefixes=a", "optimizer.lr=0.3x"])
    given = load_config(None, ["model.preset=gpt2-124m", "data.prefixes=a", *words])
    assert given.model.seq == 8192 and given.train.steps == 10_000, "k is 1,024 in a context length"


@pytest.mark.parametrize(
    "text, number",
    [
        ("0,001", None), ("1,5", None), ("12,34", None), ("1,5B", None), ("0,000", None), ("1,000_000", None),
        ("1,000", 1e3), ("12,345,678.5", 12345678.5), ("1_000", 1e3), ("1.5B", 1.5e9), ("128k", 128e3),
        ("300e9", 3e11),
    ],
)  # fmt: skip
def test_commas_only_separate_thousands(text: str, number: float | None) -> None:
    assert number_from(text) == number


@pytest.mark.parametrize("word", ["optimizer.lr=0,001", "train.clip=1,5"])
def test_a_decimal_comma_is_refused(word: str) -> None:
    with pytest.raises(UserError, match=f"{word} must be a number"):
        load_config(None, ["model.preset=gpt2-124m", "data.prefixes=a", word])


def test_a_number_that_is_empty() -> None:
    with pytest.raises(UserError, match="train.steps is empty: give a whole number"):
        load_config(None, ["model.preset=gpt2-124m", "data.prefixes=a", "train.steps="])


def test_warm_up_may_be_a_share_of_the_steps() -> None:
    words = ["model.preset=gpt2-124m", "data.prefixes=a", "train.steps=50"]
    shared = load_config(None, [*words, "lr.warmup=2%"])
    assert shared.lr.warmup_steps(50) == 1 and shared.lr.warmup_steps(1000) == 20
    assert first_broken_rule(shared, 1) is None and config_from(to_mapping(shared)) == shared
    assert load_config(None, [*words, "lr.warmup=1k"]).lr.warmup == 1000
    with pytest.raises(UserError, match="lr.warmup=soon must be a number of steps or a share of them, e.g. 2%"):
        load_config(None, [*words, "lr.warmup=soon"])


def test_targets_may_have_the_names_that_peft_uses() -> None:
    words = ["model.preset=llama3-8b", "data.prefixes=a", "tune.kind=lora", "tune.base=x"]
    tune = load_config(None, [*words, "tune.targets=[q_proj,o_proj,down]"]).tune
    assert tune.targets == ("q", "out", "down")
    assert load_config(None, [*words, "tune.targets=all-linear"]).tune.targets == ("all",)


def test_words_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(to_yaml(config_from(SMALL)))
    config = load_config(path, ["train.steps=7", "data.prefixes=[x,y]", "data.weights=1,3", "train.compile=true"])
    assert config.train.steps == 7 and config.data.prefixes == ("x", "y") and config.data.weights == (1.0, 3.0)
    assert config.train.compile == "true"


@pytest.mark.parametrize("word", ["20240517_153000", "0123", "1e3", "2024-05-17", "2024-13-45", "1:30", "yes", "'7'"])
def test_a_word_that_looks_like_something_else_is_taken_as_it_stands(tmp_path: Path, word: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(to_yaml(config_from(SMALL)))
    words = [f"run.dir={word}", f"data.prefixes=[{word},b]", f"zero.offload.path={word}"]
    config = load_config(path, words)
    assert {config.run.dir, config.data.prefixes[0], config.zero.offload.path} == {word.strip("'")}
    assert config_from(parse_yaml(to_yaml(config), "")) == config
    assert load_config(path, [f"data.prefixes={word}"]).data.prefixes == (word.strip("'"),)
    assert load_config(path, [f"mine.name={word}"], {"mine": Mine}).extra["mine"].name == word.strip("'")
    path.write_text(f"{to_yaml(config_from(SMALL))}\n".replace("dir: runs/default", f"dir: {word}"))
    if "-" in word or "'" in word:
        assert load_config(path).run.dir == word.strip("'")
    else:
        with pytest.raises(UserError, match=r"run.dir must be a word, .* put it in quotes"):
            load_config(path)


@dataclass(frozen=True)
class Mine:
    name: str = ""


def test_merged_keys_are_no_second_ones() -> None:
    text = "base: &base {x: 1, y: 2}\ndeep:\n  b: &b\n    <<: *base\n    x: 5\nc:\n  <<: *b\n  y: 3\n"
    assert parse_yaml(text, "here")["c"] == {"x": 5, "y": 3}


@pytest.mark.parametrize(("text", "line"), [
    ("train: {steps: 10}\nmodel: {}\ntrain: {seed: 3}\n", "line 3 is not valid YAML: 'train' was given in line 1"),
    ("train:\n  steps: 10\n  steps: 20\n", "line 3 is not valid YAML: 'steps' was given in line 2 already"),
])  # fmt: skip
def test_a_key_that_comes_twice(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_config(path)
    assert line in str(caught.value)


@pytest.mark.parametrize("word", [
    "model.preset=[a]", "optimizer.lr=1" + 400 * "0", "train.seed=1" + 5000 * "0", "model.layers=1e300",
    "train.seed=1e19", "train.ramp=" + 3000 * "[",
])  # fmt: skip
def test_values_beyond_all_bounds(tmp_path: Path, word: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(to_yaml(config_from(SMALL)))
    with pytest.raises(UserError):
        load_config(path, [word])


def test_an_end_token_beyond_the_vocabulary() -> None:
    with pytest.raises(UserError, match="data.eod=100 is no token of model.vocab=100"):
        check(config_from(SMALL | {"data": {"prefixes": ["a"], "eod": 100}}), 1)


def test_a_least_loss_scale_above_the_first() -> None:
    with pytest.raises(UserError, match="loss_scale.min=10.0 must not be above loss_scale.initial=8.0"):
        config_from(SMALL | {"loss_scale": {"min": 10.0, "initial": 8.0}})


@pytest.mark.parametrize(("reduce", "sentence"), [
    ({"kind": "topk", "ratio": 0}, "comm.reduce.ratio=0.0 must be above 0 and at most 1, e.g. 0.01"),
    ({"kind": "threshold", "ratio": 1.5}, "comm.reduce.ratio=1.5 must be above 0 and at most 1"),
    ({"kind": "int8", "ratio": 0.1}, "ratio has no effect with comm.reduce.kind=int8: .* one of topk, threshold"),
    ({"kind": "int8", "block": 100}, "comm.reduce.block=100 must be a multiple of 16: try 112"),
    ({"kind": "powersgd", "rank": 0}, "comm.reduce.rank=0 must be greater than zero"),
    ({"rank": 8}, "rank has no effect with comm.reduce.kind=plain: leave it out, or set the kind to powersgd"),
    ({"error_feedback": True}, "error_feedback has no effect with comm.reduce.kind=plain"),
    ({"kind": "topk", "warmup_steps": -1}, "comm.reduce.warmup_steps=-1 must not be negative"),
    ({"kind": "int7"}, "comm.reduce.kind"),
])  # fmt: skip
def test_sums_that_make_no_sense(reduce: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        config_from(SMALL | {"comm": {"reduce": reduce}})


def test_algorithms_that_do_not_fit() -> None:
    with pytest.raises(UserError, match=r"compresses gradients, which comm.algorithm.dp=ring sums as they are: set"):
        check(config_from(SMALL | {"comm": {"algorithm": "ring", "reduce": {"kind": "int8"}}}), 2)
    halving = config_from(SMALL | {"comm": {"algorithm": "halving_doubling"}, "train": {"global_batch": 6}})
    with pytest.raises(UserError, match="needs a power of two of data-parallel ranks, and there are 6: use ring or"):
        check(halving, 6)
    for layout in ({"node_size": 2}, {}):
        named = config_from(SMALL | {"comm": {"switches": [0, 1, 0]}, "layout": layout})
        with pytest.raises(UserError, match="comm.switches names the switches of 3 nodes, and there are"):
            check(named, 4)


def test_algorithms_by_axis() -> None:
    """A single word sets the algorithm of every axis that has an algorithm of this name."""
    words = {"ring": ("ring", "torch"), "hierarchical": ("hierarchical", "hierarchical"), "auto": ("auto", "torch")}
    links = {"link_gb_s": 1.0}
    for word, expected in words.items():
        config = config_from(SMALL | {"comm": {"algorithm": word, "links": links}})
        assert (config.comm.algorithm.dp, config.comm.algorithm.ep) == expected
        assert config_from(to_mapping(config)) == config
    assert config_from(SMALL | {"comm": {"algorithm": {"ep": "hierarchical"}}}).comm.algorithm.dp == "torch"
    given = ["model.preset=gpt2-124m", "data.prefixes=x", "comm.algorithm=ring", "comm.algorithm.ep=hierarchical"]
    assert dataclasses.astuple(load_config(None, given).comm.algorithm) == ("ring", "hierarchical")
    for value, sentence in (
        (3, "comm.algorithm=3 is not one of torch, auto"),
        ("rings", r"comm.algorithm=rings is not one of torch, auto, .*did you mean"),
        ({"ep": "ring"}, "comm.algorithm.ep=ring is not one of torch, hierarchical"),
        (["ring"], r"comm.algorithm=\['ring'\] is not one of .*did you mean 'ring'"),
    ):
        with pytest.raises(UserError, match=sentence):
            config_from(SMALL | {"comm": {"algorithm": value}})


def test_a_batch_beyond_a_pipelines_table() -> None:
    config = config_from(SMALL | {"layout": {"pp": 2}, "train": {"global_batch": 100_000_000}})
    with pytest.raises(UserError, match="train.global_batch=100000000 needs too large a table"):
        check(config, 4)


def test_round_trip() -> None:
    config = config_from(SMALL | {"layout": {"tp": 2}, "train": {"ramp": [2, 2, 100]}})
    assert config_from(parse_yaml(to_yaml(config), "")) == config
    assert config_from(to_mapping(config)) == config


def test_derived_sizes() -> None:
    model = ModelConfig(layers=1, hidden=512, heads=8, vocab=10, seq=4, mlp="swiglu")
    assert (model.kv_heads, model.head_dim, model.ffn) == (8, 64, 1408)
    assert ModelConfig(layers=1, hidden=512, heads=8, vocab=10, seq=4).ffn == 2048


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config_from(SMALL).train.steps = 1  # type: ignore[misc]


def test_presets_build_and_can_be_changed() -> None:
    for name in PRESETS:
        config_from({"model": {"preset": name}, "data": {"prefixes": ["a"]}})
    config = config_from({"model": {"preset": "llama3-8b", "layers": 2}, "data": {"prefixes": ["a"]}})
    assert config.model.layers == 2 and config.model.kv_heads == 8
    # A key of a nested section can be changed without repeating the preset's other keys.
    changed = {"preset": "olmoe-7b", "experts": {"aux_loss": 0.01}}
    experts = config_from({"model": changed, "data": {"prefixes": ["a"]}}).model.experts
    assert (experts.count, experts.ffn, experts.aux_loss) == (64, 1024, 0.01)


PUBLISHED = {"mixtral-8x7b": 46.7e9, "qwen3-30b-a3b": 30.5e9, "olmoe-7b": 6.9e9, "deepseek-v3": 671e9}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_mixtures_have_as_many_parameters_as_published(name: str) -> None:
    model = config_from({"model": {"preset": name}, "data": {"prefixes": ["a"]}}).model
    count = sum(math.prod(record.shape) for record in describe(model).records(SINGLE_RANK).values())
    assert count == pytest.approx(PUBLISHED[name], rel=0.01)


def test_sections_of_ones_own() -> None:
    @dataclass(frozen=True)
    class Inner:
        deep: int = 1

    @dataclass(frozen=True)
    class Router:
        experts: int
        inner: Inner = dataclasses.field(default_factory=Inner)

    # get_type_hints resolves names at module level only, so the hints are given as types.
    Router.__annotations__ = {"experts": int, "inner": Inner}
    Inner.__annotations__ = {"deep": int}
    config = config_from(SMALL | {"router": {"experts": 4, "inner": {"deep": 3}}}, {"router": Router})
    assert config.extra["router"].experts == 4 and config.extra["router"].inner.deep == 3
    with pytest.raises(UserError, match="router.expert'.*did you mean 'router.experts'"):
        config_from(SMALL | {"router": {"expert": 4}}, {"router": Router})
    with pytest.raises(UserError, match="unknown section 'router'"):
        config_from(SMALL | {"router": {"experts": 4}})


def test_every_rule_is_small_and_passes_a_good_config() -> None:
    config = config_from(SMALL | {"layout": {"tp": 2, "pp": 2}, "train": {"global_batch": 8}})
    check(config, 8)
    assert len({rule.__name__ for rule in RULES}) == len(RULES)


def test_show_and_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "c.yaml")
    Path(path).write_text(to_yaml(config_from(SMALL)))
    assert main(["config", "show", path, "--json", "train.steps=5"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["train"]["steps"] == 5 and config_from(shown)
    assert main(["config", "check", path, "layout.tp=2", "--world", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "world": 4, "dp": 2, "tp": 2, "pp": 1}
    assert main(["config", "check", path, "layout.tp=3", "--world", "3"]) == 2


@pytest.mark.parametrize("command", ["train", "config", "layout", "schedule", "data"])
def test_help_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert "example" in capsys.readouterr().out


def test_a_batch_below_one_round_gets_one_suggestion() -> None:
    config = config_from(SMALL | {"train": {"global_batch": 3}})
    assert str(first_broken_rule(config, 4)).endswith("use at most 3 ranks, or train.global_batch=4")
    assert str(first_broken_rule(config, 2)).endswith("2 x 1 = 2: try 2 or 4")


@pytest.mark.parametrize(
    ("given", "steps", "seconds"),
    [("auto", 0, 900.0), (500, 500, 0.0), (0, 0, 0.0), ("30min", 0, 1800.0), ("1h30min", 0, 5400.0), ("0.5s", 0, 0.5)],
)
def test_how_often_to_save(given: str | int, steps: int, seconds: float) -> None:
    words = [f"checkpoint.every={given}", "data.prefixes=x", "model.preset=gpt2-124m"]
    checkpoint = load_config(None, words).checkpoint
    assert (checkpoint.every_steps, checkpoint.every_seconds) == (steps, seconds)


@pytest.mark.parametrize("word", ["checkpoint.every=often", "run.time_limit=5", "run.time_limit=h"])
def test_times_that_are_none(word: str) -> None:
    with pytest.raises(UserError, match="is not a time: give it as 90s, 30min or 1h30min"):
        load_config(None, [word, "data.prefixes=x", "model.preset=gpt2-124m"])


def test_dropouts_follow_the_first_one_unless_given() -> None:
    sizes = {"layers": 1, "hidden": 8, "heads": 2, "vocab": 9, "seq": 4}

    def model(**keys: float) -> tuple[float | None, ...]:
        section = config_from({"model": {**sizes, **keys}, "data": {"prefixes": ["x"]}}).model
        assert config_from({"model": {**sizes, **keys}, "data": {"prefixes": ["x"]}}).compiles != section.drops
        return section.dropout, section.attention_dropout, section.embedding_dropout

    assert model() == (0.0, 0.0, 0.0) and model(dropout=0.1) == (0.1, 0.1, 0.1)
    assert model(dropout=0.1, attention_dropout=0.0) == (0.1, 0.0, 0.1)
    assert model(embedding_dropout=0.2) == (0.0, 0.0, 0.2)
    with pytest.raises(UserError, match="model.attention_dropout=1.0 must be at least 0 and below 1"):
        model(attention_dropout=1.0)


def test_a_kind_fills_what_is_not_given() -> None:
    sizes = {"kind": "bert", "layers": 1, "hidden": 8, "heads": 2, "vocab": 9, "seq": 40}
    config = config_from({"model": {**sizes, "pooler": False}, "data": {"prefixes": ["x"]}})
    assert (config.model.norm_place, config.model.token_types, config.model.pooler) == ("post", 2, False)
    assert config.model.predictions == 6 and config.objective == "masked" and config.has_segments
    assert config_from(to_mapping(config)) == config
