"""Tests of all pairs of features, and of every kind of model with every feature.

Each pair either trains a step or is refused by the rule that is derived from the features' statements. The lists below
say of every key of a config whether it is a feature or a plain key.
"""

from __future__ import annotations

import re
from dataclasses import fields
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from meshwright.config.features import FEATURES, Feature, exclusions
from meshwright.config.kinds import MODEL_KINDS, ModelKind
from meshwright.config.load import config_from, config_keys, flat, merge_sections, nest
from meshwright.config.rules import check, first_broken_rule
from meshwright.config.sections import Config
from meshwright.device import Device
from meshwright.dryrun.run_rank import run_rank
from meshwright.errors import UserError
from meshwright.spec.layout.norms import NORMS, NormKind
from tests.support.advice import advised

Sections = dict[str, Any]
BASE: Sections = {
    "model": {"layers": 2, "hidden": 64, "heads": 4, "vocab": 64, "seq": 32},
    "train": {"global_batch": 32, "micro_batch": 2}, "data": {"prefixes": ["made"]},
}  # fmt: skip
EXPERTS = {"model": {"experts": {"count": 4, "ffn": 16, "every": 2}}}
LATENT = {"kv_rank": 16, "nope_dim": 8, "rope_dim": 8, "v_dim": 8}
LORA = {"kind": "lora", "rank": 4}
NODES = {"layout": {"node_size": 2}}

# The fewest keys that switch each feature on.
EXAMPLES: dict[str, Sections] = {
    "dropout": {"model": {"dropout": 0.1, "attention_dropout": 0.0, "embedding_dropout": 0.0}},
    "attention_dropout": {"model": {"attention_dropout": 0.1}},
    "embedding_dropout": {"model": {"embedding_dropout": 0.1}},
    "alibi": {"model": {"position": "alibi"}},
    "window": {"model": {"window": 8}},
    "latent": {"model": {"latent": LATENT, "position": "rope", "bias": False}},
    "experts": EXPERTS,
    "aux_loss": merge_sections(EXPERTS, {"model": {"experts": {"aux_loss": 0.01}}}),
    "z_loss": merge_sections(EXPERTS, {"model": {"experts": {"z_loss": 0.01}}}),
    "bias_balance": merge_sections(EXPERTS, {"model": {"experts": {"bias_balance": 0.001, "router": "sigmoid"}}}),
    "second_positions": {"model": {"kind": "glm", "position": "learned"}},
    "token_types": {"model": {"kind": "bert"}},
    "reset_attention": {"data": {"reset_attention": True}},
    "tp": {"layout": {"tp": 2}},
    "pp": {"layout": {"pp": 2}},
    "sequence_parallel": {"layout": {"tp": 2, "sequence_parallel": True}},
    "cp": {"layout": {"cp": 2}},
    "ep": merge_sections(EXPERTS, {"layout": {"ep": 2}}),
    "zero": {"zero": {"stage": 1}},
    "zero3": {"zero": {"stage": 3}},
    "node_shards": merge_sections(NODES, {"zero": {"stage": 3, "shard_group": "node"}}),
    "optimizer_offload": {"zero": {"offload": {"optimizer": "cpu"}}},
    "parameter_offload": {"zero": {"stage": 3, "offload": {"params": "cpu"}}},
    "fp16": {"train": {"precision": "fp16"}},
    "fp8": {"train": {"precision": "fp8"}},
    "compile": {"train": {"compile": "true"}},
    "pieces": {"recompute": {"pieces": 2}},
    "activation_offload": {"recompute": {"mode": "full", "offload": True}},
    "some_recomputed": {"recompute": {"mode": "selective"}},
    "tensor_overlap": {"layout": {"tp": 2}, "comm": {"overlap": {"tensor": True}}},
    "adapters": {"tune": LORA},
    "dora": {"tune": {**LORA, "kind": "dora"}},
    "adapter_dropout": {"tune": {**LORA, "dropout": 0.1}},
    "preferences": {"data": {"objective": "preference"}, "tune": {"loss": "orpo"}},
    "compression": {"comm": {"reduce": {"kind": "int8"}}},
    "adaptive": {"comm": {"reduce": {"adaptive": True}}},
    "algorithm": {"comm": {"algorithm": {"dp": "ring"}}},
    "node_copy": merge_sections(NODES, {"zero": {"stage": 3}, "comm": {"gather": {"node_copy": True}}}),
    "replicas": {"layout": {"replicas": 2}},
    "server": {"train": {"server": {"ranks": 1}}},
    "elastic": {"faults": {"elastic": True}},
    "grid": {"layout": {"tp": 4, "tp_grid": [2, 2]}},
    "ema": {"optimizer": {"ema": 0.9}},
    "noise_scale": {"run": {"noise_scale": True}},
    "compiled_together": {"train": {"compile_together": 2}},
}
# The plain keys by section: they work with every feature, or only rules about numbers check them.
PLAIN = """
model: layers hidden heads vocab seq kind preset hf kv_heads head_dim ffn norm norm_eps norm_place mlp
  position_offset rope_theta rotary_fraction window_pattern bias qkv_bias qk_norm qk_norm_over parallel_residual
  embedding_norm embedding_grad tied_embeddings init_std pooler predictions
model.experts: top_k ffn shared every first_dense router normalise scale groups groups_used aux_level capacity
model.latent: q_rank nope_dim rope_dim v_dim
model.rope_scaling: kind factor original low high beta_fast beta_slow truncate attention_factor mscale
  mscale_all_dim
model.t5: encoder_layers decoder_seq buckets distance scale_output start
data: prefixes weights split draw_split mask_eod reset_positions any_tokenizer eod
data.masked: share ngrams whole_words specials
data.spans: share mean sentinel
data.blanks: short share mean least instructions instruction_share specials
layout: etp order chunks node_size tp_kind tp_keep_gathered
pipeline: schedule split encoder_stages
train: steps global_batch micro_batch seed grad_dtype fp8_scale clip ramp gc_every
train.local: steps outer outer_lr momentum fragments delay shares
train.local.compress: kind ratio rank block error_feedback warmup_steps adaptive
train.server: staleness
zero.offload: path buffer_mib
optimizer: name lr betas eps weight_decay master_dtype state_dtype groups
optimizer.muon: momentum iterations coefficients scale precision per_head adamw_lr
optimizer.adafactor: decay clip eps
optimizer.soap: every max_side
loss_scale: initial window hysteresis min
lr: schedule warmup decay min
comm: backend timeout bucket_mib switches
comm.reduce: ratio rank block error_feedback warmup_steps
comm.gather: kind block
comm.overlap: gradients weights pipeline piece_gflop
comm.emulate: link_gb_s network_gb_s latency_us
comm.links: link_gb_s network_gb_s latency_us
comm.algorithm: ep
run: dir log_every eval_every eval_samples eval_first tensorboard loggers layers_every peak_tflops time_limit trace
  device plugins
checkpoint: every keep async busy dir memory_every
context: kind inner order
tune: base rank alpha rslora targets modules_to_save quantise loss reference beta margin
faults: nonfinite spike spike_factor window replay action max_skips max_faults locate check_every slow_factor
  slow_steps slow_seconds rest lost_after
"""
KINDS: dict[str, Sections] = {name: {"model": {"kind": name}} for name in ("gpt", "bert", "t5", "glm")}
ALL = {**KINDS, **EXAMPLES}


def combined(*sections: Sections) -> Config | None:
    """Return a config with all of these sections, or None if they give different values to a key or a section."""
    result, given = BASE, dict[str, Any]()
    for section in sections:
        keys = flat(section)
        if any(given.get(key, value) != value for key, value in keys.items()):
            return None
        given |= keys
        result = merge_sections(result, section)
    layout = result.get("layout", {})
    if "node_size" in layout:
        # Each node holds two data-parallel ranks.
        layout = {**layout, "node_size": 2 * layout.get("tp", 1) * layout.get("cp", 1)}
        result = {**result, "layout": layout}
    try:
        return config_from(result)
    except UserError as error:
        assert "comm.reduce.adaptive=true chooses how gradients are sent" in str(error)
        return None


def world_of(config: Config) -> int:
    """Return a number of ranks that the config can run on, with two nodes if it has nodes."""
    return config.layout.least_world * (4 if config.layout.node_size else 2)


def refusals(config: Config) -> list[str]:
    return list(exclusions(config))


def test_every_feature_has_an_example_that_uses_it_and_states_what_it_refuses() -> None:
    assert list(EXAMPLES) == list(FEATURES)
    names = list(FEATURES)
    for at, (name, feature) in enumerate(FEATURES.items()):
        config = combined(EXAMPLES[name])
        assert config is not None and feature.is_used(config), name
        assert feature.refuses.keys() <= set(names[:at]), f"{name} answers for the features above it"
        assert feature.key in {key.rstrip("=") for key in config_keys()}, name


def test_every_key_of_a_config_is_a_feature_or_plain() -> None:
    """A new key must be declared: as a feature that states which others it refuses, or in PLAIN."""
    plain: list[str] = []
    section = ""
    for word in PLAIN.split():
        if word.endswith(":"):
            section = word[:-1]
        else:
            plain.append(f"{section}.{word}")
    keys = {key.rstrip("=") for key in config_keys()}
    features = {feature.key for feature in FEATURES.values()}
    assert keys == features | set(plain) and not features & set(plain)


def test_nothing_can_be_added_without_a_statement() -> None:
    """The fields that state which features something refuses or supports have no default."""
    for cls, name in ((Feature, "refuses"), (ModelKind, "supports"), (NormKind, "supports")):
        field = next(each for each in fields(cls) if each.name == name)
        with pytest.raises(TypeError, match=name):
            cls(**{each.name: None for each in fields(cls) if each is not field})
    stated = [*(kind.supports for kind in MODEL_KINDS.values()), *(norm.supports for norm in NORMS.values())]
    assert all(supports <= FEATURES.keys() for supports in stated)


def test_every_pair_that_is_refused_says_so_with_a_fix_that_works() -> None:
    refused = 0
    for one, other in combinations(ALL, 2):
        config = combined(ALL[one], ALL[other])
        if config is None or not refusals(config):
            continue
        sentence, refused = refusals(config)[0], refused + 1
        assert first_broken_rule(config, world_of(config)) == sentence
        assert advised(sentence), sentence
        for keys in advised(sentence):
            assert all(f"{key}=" in sentence.rsplit(": ", 1)[0] for key in keys), sentence
            try:
                fixed = config_from(
                    merge_sections(merge_sections(merge_sections(BASE, ALL[one]), ALL[other]), nest(keys))
                )
            except UserError as error:
                # The fix may lead to another refusal that is right: balance losses need experts, a grid its ranks.
                assert re.search("needs experts, and there are none|4 ranks, and layout.tp=1: set", str(error))
            else:
                assert sentence not in refusals(fixed), sentence
    assert refused > 100


def quick(name: str) -> Any:
    return name if name in ("glm", "alibi") else pytest.param(name, marks=pytest.mark.wide)


@pytest.mark.parametrize("name", [quick(name) for name in ALL])
def test_every_pair_that_is_not_refused_takes_a_step(name: str) -> None:
    """A dry run of one rank builds the real model, buffers, optimizer and schedule, and makes an update."""
    names = list(ALL)
    for other in names[names.index(name) :]:
        config = combined(ALL[name], ALL[other])
        if config is None or refusals(config):
            continue
        world = world_of(config)
        try:
            check(config, world)
            assert run_rank(config, world, 0, Device("meta")).updated
        except Exception as error:
            raise AssertionError(f"{name} with {other} is not refused, and fails") from error


@pytest.mark.wide
@pytest.mark.parametrize("name", sorted(name for name in MODEL_KINDS["hf"].supports if "model" not in EXAMPLES[name]))
def test_a_model_of_transformers_takes_a_step_with_all_that_it_supports(name: str, tmp_path: Path) -> None:
    """It trains on a CPU, because the masks of transformers look at values, which the meta device lacks.

    Features of the model section are left out, because the folder describes the model.
    """
    from tests.models.planned_families import config_of, write_tiny

    sections = merge_sections({"data": {"reset_positions": name == "reset_attention"}}, EXAMPLES[name])
    config = config_of(write_tiny("granite", tmp_path), sections)
    assert run_rank(config, world_of(config), 0, Device("cpu")).updated
