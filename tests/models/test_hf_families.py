"""Adapters of Hugging Face families, without transformers: which models fit which family, and how the rows of a file
map to Meshwright's.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.config.blocks import RopeScalingConfig
from meshwright.config.sections import ModelConfig
from meshwright.errors import UserError
from meshwright.spec.model.hf import FAMILIES, family_for, family_of_name
from meshwright.spec.model.hf.family import model_section, same_function
from meshwright.spec.model.hf.rows import SourceRows

SIZES: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 61, "seq": 64}
SLIDING = {"use_sliding_window": True, "sliding_window": 32}
LLAMA: dict[str, Any] = {
    **SIZES, "norm": "rmsnorm", "mlp": "swiglu", "position": "rope", "bias": False, "kv_heads": 2, "ffn": 48,
}  # fmt: skip
DEEPSEEK_ROPE = {"kind": "yarn", "factor": 40.0, "original": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
SECTIONS: dict[str, dict[str, Any]] = {
    "gpt2": {**SIZES, "mlp": "gelu_tanh"},
    "llama": {**LLAMA, "rope_scaling": {"kind": "llama3", "factor": 8.0, "original": 8192}, "tied_embeddings": False},
    "qwen2": {
        **LLAMA, "qkv_bias": True,
        "rope_scaling": {"kind": "yarn", "factor": 4.0, "original": 16, "beta_fast": 8.0, "truncate": False},
    },
    "qwen3": {**LLAMA, "qk_norm": True, "head_dim": 16},
    "glm4": {**LLAMA, "qkv_bias": True, "rotary_fraction": 0.5, "norm_place": "sandwich"},
    "glm": {**LLAMA, "qkv_bias": True, "rotary_fraction": 0.5},
    "gpt_neox": {**SIZES, "position": "rope", "rotary_fraction": 0.25, "parallel_residual": True},
    "opt": {**SIZES, "position_offset": 2, "mlp": "relu"},
    "bloom": {**SIZES, "position": "alibi", "embedding_norm": True, "mlp": "gelu_tanh"},
    "mistral": {**LLAMA, "rope_theta": 1e6},
    "bert": {**SIZES, "kind": "bert", "pooler": False, "mlp": "gelu_tanh", "token_types": 3},
    "t5": {
        **SIZES, "kind": "t5", "layers": 5, "head_dim": 6, "ffn": 48, "mlp": "tanh_geglu", "tied_embeddings": False,
        "t5": {"encoder_layers": 2, "buckets": 8, "start": 3},
    },
    "mixtral": {**LLAMA, "rope_theta": 1e6, "experts": {"count": 4}},
    "qwen3_moe": {
        **LLAMA, "layers": 4, "qk_norm": True, "head_dim": 16,
        "experts": {"count": 8, "top_k": 3, "ffn": 24, "every": 2, "first_dense": 2, "normalise": False},
    },
    "olmoe": {
        **LLAMA, "qk_norm": True, "qk_norm_over": "all", "experts": {"count": 8, "top_k": 3, "normalise": False},
    },
    "deepseek_v3": {
        **LLAMA, "norm_eps": 1e-6, "rope_scaling": DEEPSEEK_ROPE | {"mscale": 0.7},
        "latent": {"kv_rank": 16, "q_rank": 24, "nope_dim": 12, "rope_dim": 8, "v_dim": 10},
        "experts": {
            "count": 8, "top_k": 3, "ffn": 24, "shared": 2, "first_dense": 1, "router": "sigmoid", "scale": 2.5,
            "groups": 4, "groups_used": 2, "bias_balance": 0.1,
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_model_section_survives_config_json(name: str) -> None:
    model = model_section(SECTIONS[name])
    family = family_for(model, name)
    config = family.config_of(model)
    assert config["model_type"] == name
    assert same_function(family.model_of(config), model)
    assert family_for(model).model_type == ("llama" if name == "mistral" else name)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_row_has_its_place(name: str) -> None:
    """The runs cover each of Meshwright's rows once, and each of the file's rows once."""
    model = model_section(SECTIONS[name])
    for ours, mapped in FAMILIES[name].tensors(model).items():
        rows = [run.start + n for run in mapped.runs for n in range(run.count)]
        assert rows == list(range(mapped.rows)), ours
        for source, shape in mapped.source_shapes().items():
            found = [run.theirs for run in mapped.sources()[source]]
            theirs = [row for each in found for row in range(each.start, each.stop, each.step)]
            assert sorted(theirs) == list(range(shape[-1] if mapped.transposed else shape[0])), source


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"norm": "rmsnorm"}, "gpt2, has no model.norm=rmsnorm"),
        ({"position": "none"}, "no model.position=none"),
        ({"bias": False}, "no model.bias=False"),
        ({"kv_heads": 2}, "no model.kv_heads=2"),
        ({"mlp": "swiglu"}, "no model.mlp=swiglu"),
        ({"position": "alibi", "embedding_norm": True, "mlp": "gelu_tanh", "ffn": 96}, "bloom, has no model.ffn=96"),
    ],
    ids=str,
)
def test_a_model_of_no_family_is_told_what_does_not_fit(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        family_for(ModelConfig(**SIZES | change))


def test_a_family_that_was_asked_for_must_fit() -> None:
    with pytest.raises(UserError, match="a bloom can't have .*model.norm=rmsnorm"):
        family_for(model_section(LLAMA), "bloom")
    with pytest.raises(UserError, match="did you mean 'llama'"):
        family_of_name("lama")


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("qwen2", {**SLIDING, "layer_types": ["full_attention"]}, "layer_types .* each of 2 layers"),
        ("qwen2", {**SLIDING, "max_window_layers": "x"}, "max_window_layers='x'"),
        ("opt", {"word_embed_proj_dim": 16}, "embedding is projected"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm=True"),
        ("gpt_neox", {"attention_bias": False}, "attention_bias=False"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope' .* linear, dynamic"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn' .* lacks original_max_position"),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, "lacks factor"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("gpt2", {"activation_function": "swish"}, "activation_function=swish"),
        ("qwen3_moe", {"mlp_only_layers": [3], "decoder_sparse_step": 1}, "mlp_only_layers=.3. .* only the first"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "must be a list of layers' numbers"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "model.experts.every=0 must be greater than zero"),
        ("qwen3_moe", {"num_experts": 0}, "model.experts.count=0, which no qwen3_moe has"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "top_k=9 is more than model.experts.count=8"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "fewer key-value heads than heads"),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func=softmax"),
        ("deepseek_v3", {"n_shared_experts": 0}, "model.experts.shared=0, which no deepseek_v3 has"),
        ("deepseek_v3", {"n_group": 3}, "groups=3 does not divide"),
    ],
)
def test_what_cannot_be_represented_is_refused(name: str, change: dict[str, Any], words: str) -> None:
    family = FAMILIES[name]
    config = family.config_of(model_section(SECTIONS[name])) | change
    with pytest.raises(UserError, match=words):
        family.model_of(config)


@pytest.mark.parametrize(
    ("listed", "every", "first"),
    [([], 1, 0), ([0], 1, 1), ([1, 0], 1, 2), ([0, 2], 2, 0), ([1], 2, 2), ([0, 1, 2, 3], 1, 4), (None, 2, 0)],
)
def test_blocks_without_experts(listed: list[int] | None, every: int, first: int) -> None:
    """The config may list such blocks. Listed blocks that have no experts in any case mean nothing."""
    family = FAMILIES["qwen3_moe"]
    config = family.config_of(model_section(SECTIONS["qwen3_moe"]))
    found = family.model_of(config | {"mlp_only_layers": listed, "decoder_sparse_step": every})
    assert (found.experts.every, found.experts.first_dense) == (every, first)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("mixtral", {"normalise": False}, "mixtral, has no model.experts.normalise=False"),
        ("mixtral", {"shared": 1}, "mixtral, has no model.experts.shared=1"),
        ("mixtral", {"bias_balance": 0.1}, "mixtral, has no model.experts.bias_balance=0.1"),
        ("deepseek_v3", {"router": "softmax"}, "deepseek_v3, has no model.experts.router=softmax"),
        ("deepseek_v3", {"shared": 0}, "deepseek_v3, has no model.experts.shared=0"),
    ],
)
def test_mixtures_of_no_family(name: str, change: dict[str, Any], words: str) -> None:
    section = SECTIONS[name] | {"experts": SECTIONS[name]["experts"] | change}
    with pytest.raises(UserError, match=words):
        family_for(model_section(section))


ORIGINAL = "original_max_position_embeddings"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("llama", {"rope_parameters": "linear"}, "rope_parameters='linear' .* must hold keys and values"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling='linear' .* must hold keys and values"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": "x"}}, "factor='x' .* must be a finite number"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": None}}, "'linear' .* lacks factor"),
        ("llama", {"rope_scaling": {"rope_type": ["a"]}}, r"rope_type '\['a'\]' .* can't be imported"),
        ("llama", {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": None}}, "lacks original_max_posi"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2, ORIGINAL: 8.5}}, "must be a whole number"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2, ORIGINAL: 8, "truncate": "x"}}, "true or false"),
        ("llama", {"rope_theta": "abc"}, "rope_theta='abc' .* must be a finite number"),
        ("llama", {"rope_theta": True}, "rope_theta=True .* must be a finite number"),
        ("llama", {"rope_theta": float("nan")}, "rope_theta=nan .* must be a finite number"),
        ("llama", {"rope_theta": 0}, "rope_theta=0.0 must be"),
        ("llama", {"partial_rotary_factor": "x"}, "partial_rotary_factor='x' .* must be a finite number"),
        ("gpt_neox", {"rotary_pct": "x"}, "rotary_pct='x' .* must be a finite number"),
        ("gpt_neox", {"rotary_emb_base": []}, r"rotary_emb_base=\[\] .* must be a finite number"),
        ("mistral", {"sliding_window": "4"}, "sliding_window='4' .* must be a finite number"),
        ("mistral", {"sliding_window": 0}, "sliding_window=0 .* must be a whole number above zero"),
        ("mistral", {"sliding_window": 2.5}, "sliding_window=2.5 .* must be a whole number above zero"),
        ("qwen2", {"sliding_window": "4", "use_sliding_window": True}, "sliding_window='4' .* must be a finite number"),
        ("mistral", {"sliding_window": 4, "max_position_embeddings": "x"}, "seq=x must be a whole number"),
    ],
    ids=str,
)
def test_damaged_fields_are_named(name: str, change: dict[str, Any], words: str) -> None:
    config = FAMILIES[name].config_of(model_section(SECTIONS[name])) | change
    with pytest.raises(UserError, match=words):
        FAMILIES[name].model_of(config)


def test_rotary_fields_that_are_null_or_given_twice() -> None:
    """Null means the same as missing. A value that config.json has twice is read from where transformers reads it."""
    llama, neox = FAMILIES["llama"], FAMILIES["gpt_neox"]
    config = llama.config_of(model_section(LLAMA)) | {"rope_theta": None, "partial_rotary_factor": None}
    assert llama.model_of(config).rope_theta == 10000.0
    twice = {"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 3.0}}
    model = llama.model_of(config | twice)
    assert (model.rope_theta, model.rope_scaling) == (7.0, RopeScalingConfig("linear", 2.0))
    config = neox.config_of(model_section(SECTIONS["gpt_neox"]))
    model = neox.model_of(config | {"rotary_emb_base": 5.0, "rotary_pct": 0.5})
    assert (model.rope_theta, model.rotary_fraction) == (5.0, 0.5)


def test_a_shorter_context() -> None:
    mistral, gpt2 = FAMILIES["mistral"], FAMILIES["gpt2"]
    config = mistral.config_of(model_section(SECTIONS["mistral"])) | {"sliding_window": 32}
    assert mistral.model_of(config, seq=32).seq == 32
    assert mistral.model_of(config | {"sliding_window": None}).seq == 64
    config |= {"max_position_embeddings": 8192}
    assert mistral.model_of(config | {"sliding_window": None}).seq == 8192
    del config["sliding_window"]
    assert mistral.model_of(config).window == 4096  # transformers has this default.
    with pytest.raises(UserError, match="table of 64 learned positions"):
        gpt2.model_of(gpt2.config_of(model_section(SECTIONS["gpt2"])), seq=32)


def test_windows_and_the_blocks_that_have_them() -> None:
    qwen2, mistral = FAMILIES["qwen2"], FAMILIES["mistral"]
    section = SECTIONS["qwen2"] | {"layers": 6, "window": 32}
    config = qwen2.config_of(model_section(section | {"window_pattern": [1, 1, 0]}))
    assert config["layer_types"] == (["sliding_attention"] * 2 + ["full_attention"]) * 2
    assert (config["use_sliding_window"], config["sliding_window"], config["max_window_layers"]) == (True, 32, 0)
    found = qwen2.model_of(config)
    assert (found.window, found.window_pattern) == (32, (1, 1, 0))
    assert [found.window_of(layer) for layer in range(6)] == [32, 32, 0, 32, 32, 0]
    del config["layer_types"]
    model = qwen2.model_of(config | {"max_window_layers": 4})
    assert model.window_pattern == (0, 0, 0, 0, 1, 1) and qwen2.model_of(config).window_pattern == ()
    assert qwen2.model_of(config | {"max_window_layers": 6}).window == 0
    assert qwen2.model_of(config | {"use_sliding_window": False}).window == 0
    assert not qwen2.model_of(config, seq=32).has_window  # The window holds a whole sample.
    plain = qwen2.config_of(model_section(SECTIONS["qwen2"] | {"layers": 6}), config)
    assert plain["use_sliding_window"] is False and "layer_types" not in plain
    model = model_section(SECTIONS["mistral"] | {"window": 32})
    assert family_for(model).model_type == "mistral" and mistral.config_of(model)["sliding_window"] == 32
    with pytest.raises(UserError, match="a mistral can't have .*model.window_pattern"):
        family_for(model_section(SECTIONS["mistral"] | {"window": 32, "window_pattern": [1, 0]}), "mistral")


def test_configs_of_transformers_5() -> None:
    family = FAMILIES["gpt_neox"]
    config = family.config_of(model_section(SECTIONS["gpt_neox"]))
    for key in ("rotary_pct", "partial_rotary_factor", "rotary_emb_base", "rope_theta", "rope_scaling"):
        del config[key]
    config["rope_parameters"] = {"partial_rotary_factor": 0.5, "rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}
    model = family.model_of(config)
    assert (model.rotary_fraction, model.rope_theta, model.rope_scaling) == (0.5, 5e5, RopeScalingConfig("linear", 2.0))
    assert family.config_of(model, config) == config


YARN = {"rope_scaling": {"kind": "yarn", "factor": 2.0, "original": 16}}
DYNAMIC = {"rope_scaling": {"kind": "dynamic", "factor": 2.0, "original": 16}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rotary_fraction": 0.0}, "above 0 and at most 1"),
        ({"position": "rope", "rotary_fraction": 0.1}, "less than one pair"),
        ({"position": "rope", "rotary_fraction": 0.4}, "must be even"),
        ({"position": "rope", "position_offset": 2}, "position_offset has no effect"),
        ({"rope_scaling": {"kind": "linear", "factor": 8}}, "rope_scaling has no effect"),
        ({"rope_scaling": [8.0, 1.0]}, "must hold keys and values, e.g"),
        ({"rope_scaling": [8.0, 4.0, 1.0, 64.0]}, "rope_scaling.low=4 must be below model.rope_scaling.high=1"),
        ({"rope_scaling": {"kind": "yarn", "factor": 8}}, "rope_scaling.original=0 must be greater"),
        ({"rope_scaling": {"kind": "linear", "original": 8}}, "original=8 has no effect with .*kind=linear"),
        ({"rope_scaling": {"factor": 8}}, "factor=8.0 has no effect with .*kind=none"),
        ({"rope_scaling": {"kind": "ntk"}}, "rope_scaling.kind=ntk is not one of none, linear"),
        ({**YARN, "position": "rope", "rope_theta": 1.0}, "rope_theta=1 must be above 1"),
        ({**DYNAMIC, "position": "rope", "head_dim": 2}, "more than one pair"),
        ({"position_offset": -1}, "must not be negative"),
    ],
    ids=str,
)
def test_parts_that_contradict_each_other(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        model_section(SIZES | change)


def test_rotary_scaling_as_older_configs_hold_it() -> None:
    """They hold numbers: none, one factor, or Llama 3.1's four."""
    found = [model_section(LLAMA | {"rope_scaling": each}).rope_scaling for each in ([], [2.0], [8.0, 1.0, 4.0, 64.0])]
    assert found == [RopeScalingConfig(), RopeScalingConfig("linear", 2.0), RopeScalingConfig("llama3", 8.0, 64)]


def test_deepseek_v3_as_it_was_published() -> None:
    """The rotary settings of its config.json multiply scores by (0.1 ln 40 + 1)^2, and cosines and sines by 1."""
    family = FAMILIES["deepseek_v3"]
    settings = {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, ORIGINAL: 4096,
        "type": "yarn",
    }  # fmt: skip
    model = family.model_of(family.config_of(model_section(SECTIONS["deepseek_v3"])) | {"rope_scaling": settings})
    assert model.rope_scaling == RopeScalingConfig(**DEEPSEEK_ROPE)
    assert model.rope_scaling.attention_factors(latent=True) == (1.0, pytest.approx((0.1 * math.log(40) + 1) ** 2))


def test_dynamic_scaling_keeps_the_length_it_begins_at() -> None:
    """transformers stores it under the key that is the longest sequence in other models."""
    family, section = FAMILIES["llama"], model_section(LLAMA | DYNAMIC)
    config = family.config_of(section)
    assert (config["max_position_embeddings"], config["rope_scaling"]["factor"]) == (16, 2.0)
    assert family.model_of(config).seq == 16 and same_function(family.model_of(config, seq=64), section)


def test_bloom_as_it_was_published() -> None:
    """bigscience's own config.json has keys that transformers has renamed since."""
    config = {
        "model_type": "bloom", "n_embed": 64, "n_layer": 2, "num_attention_heads": 4, "vocab_size": 100,
        "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "seq_length": 32,
    }  # fmt: skip
    model = FAMILIES["bloom"].model_of(config)
    assert (model.hidden, model.heads, model.layers) == (64, 4, 2)
    del config["n_embed"]
    assert FAMILIES["bloom"].model_of(config | {"hidden_size": 64, "n_embed": None}).hidden == 64


def test_an_expert_s_number_is_the_second_in_a_name() -> None:
    """Meshwright's tensor holds all experts, with the gate before the rest. The last # of a name is the number of an
    expert.
    """
    tensors = FAMILIES["qwen3_moe"].tensors(model_section(SECTIONS["qwen3_moe"]))
    mapped = tensors["layers.3.experts.gate_up.weight"]
    assert mapped.shape == (8, 48, 32) and len(mapped.runs) == 16
    at = "model.layers.3.mlp.experts"
    assert mapped.runs[3] == SourceRows(72, 24, f"{at}.1.up_proj.weight", 0)
    assert mapped.source_shapes()[f"{at}.7.gate_proj.weight"] == (24, 32)
    assert mapped.corner(72) == (1, 24, 0)
    assert list(mapped.row_ranges((2, 5, 0), (2, 3, 32))) == [(101, 104), (149, 152)]


@given(st.integers(0, 30), st.integers(1, 12), st.integers(0, 9), st.integers(1, 3), st.integers(0, 40), st.data())
def test_a_part_of_a_run(start: int, count: int, theirs: int, step: int, low: int, data: st.DataObject) -> None:
    """The part is right whichever of the two tensors it is cut by."""
    run, high = SourceRows(start, count, "x", theirs, step), low + data.draw(st.integers(1, 20))
    pairs = [(start + n, theirs + n * step) for n in range(count)]
    for side, cut in enumerate((run.of_ours(low, high), run.of_theirs(low, high))):
        wanted = [pair for pair in pairs if low <= pair[side] < high]
        assert (cut is None) == (not wanted)
        if cut is not None:
            rows = range(cut.theirs.start, cut.theirs.stop, cut.theirs.step)
            assert list(zip(range(cut.start, cut.start + cut.count), rows, strict=True)) == wanted
