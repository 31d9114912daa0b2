"""The matrix of layouts: every way to cut 1, 2, 4 and 8 ranks into dp x tp x pp, the cases of every subject, and the
part of them that `make test` runs. No torch.
"""

from __future__ import annotations

from tests.parity.cases import FAMILIES, SCHEDULES, WORLDS, Case, layouts
from tests.parity.context_cases import CONTEXTS
from tests.parity.expert_cases import EXPERTS
from tests.parity.sharded_cases import SHARDED
from tests.parity.special_cases import SPECIAL
from tests.parity.split_cases import ZERO_BUBBLE

# Without a pipeline the schedules differ only in the order of micro-batches, so a single cut is tried with all of them.
MATRIX = [
    Case(dp, tp, pp, sp, schedule, family, tied)
    for world in WORLDS
    for dp, tp, pp, sp in layouts(world)
    for schedule in (SCHEDULES if pp > 1 or world == 1 else ("1f1b",))
    for family in FAMILIES
    for tied in (True, False)
]
CASES = MATRIX + SPECIAL + SHARDED + CONTEXTS + EXPERTS + ZERO_BUBBLE

# The part that `make test` runs; the rest is marked wide.
_QUICK_MATRIX = (
    "dp1-tp1-pp1-gpipe-llama-tied", "dp2-tp1-pp1-1f1b-gpt-tied", "dp1-tp2-pp1-1f1b-llama-tied",
    "dp1-tp2-pp1-sp-1f1b-gpt-tied", "dp1-tp1-pp2-gpipe-gpt-untied", "dp1-tp1-pp2-interleaved-llama-tied",
    "dp1-tp1-pp4-1f1b-gpt-tied", "dp2-tp2-pp1-sp-1f1b-gpt-untied", "dp1-tp2-pp2-1f1b-llama-untied",
    "dp1-tp2-pp2-sp-interleaved-gpt-tied",
    "dp2-tp2-pp2-sp-interleaved-llama-untied",
)  # fmt: skip
_QUICK_CONTEXTS = (
    "cp2-gather-zigzag", "cp2-ring-striped-documents", "cp4-one-kv-head", "cp4-hybrid-contiguous-documents",
    "cp2-ring-pp", "cp2-alibi-ring",
)  # fmt: skip
_QUICK_SHARDED = (
    "zero1-node", "zero3-ramp", "zero3-chunks-on-one-rank", "groups-zero2", "lion-zero3-disk", "muon-zero2",
    "muon-kv-copies", "adafactor-zero2", "soap-zero2",
)  # fmt: skip
_QUICK_LABELS = (
    "chunks-on-one-rank", "uneven-split", "micro-batch-2", "documents", "masked-rank", "ramp", "order",
    "rank-without-vocabulary", "kv-copies-with-bias", "split-ends-without-layers", "qk-norm", "qk-norm-over-all",
    "partial-rotary-parallel-residual", "alibi-embedding-norm", "pieces", "post-norm",
)  # fmt: skip
_QUICK_EXPERTS = (
    "dp2-tp1-pp1-1f1b-llama-tied-deepseek-ep2",  # ep across dp
    "dp1-tp2-pp1-sp-1f1b-llama-tied-olmoe-ep2-etp1",  # ep across tp
    "dp2-tp2-pp1-1f1b-llama-tied-olmoe-ep2-etp2-zero2",  # etp is tp, and every rank has all tokens
    "dp2-tp1-pp2-1f1b-llama-tied-olmoe-ep2-etp1-zero3",
    "dp1-tp2-pp2-sp-interleaved-llama-tied-mixtral-ep2-etp1",
    "dp2-tp2-pp1-sp-1f1b-llama-tied-deepseek-ep2-etp1-full",  # ep across tp while dp holds copies; recomputation
)
_QUICK_SPLIT = (
    "dp1-tp1-pp2-zb-v-gpt-tied-split", "dp1-tp1-pp4-zb-h2-llama-tied-split", "dp1-tp2-pp2-sp-v-half-llama-tied-split",
    "dp2-tp1-pp2-dualpipev-llama-tied-split-zero3",
)  # fmt: skip


def _quick() -> set[str]:
    """Return the names of the quick cases: the named ones, and for each chosen label its first case of at most four
    ranks.
    """
    names = {*_QUICK_MATRIX, *_QUICK_EXPERTS, *_QUICK_SPLIT}
    for label in _QUICK_LABELS:
        names.add(next(case.name for case in SPECIAL if case.label == label and case.world <= 4))
    names |= {next(case.name for case in CONTEXTS if case.label == label) for label in _QUICK_CONTEXTS}
    names |= {case.name for case in SHARDED if case.label in _QUICK_SHARDED}
    some = [case.name for case in SHARDED if case.dp == 4 and case.world == 4 and case.label.count("-") == 3]
    names |= set(some[::3])
    names.add(next(case.name for case in SHARDED if case.label.startswith("zero3") and case.dp == case.tp == case.pp))
    return names


QUICK = _quick()
_NAMES = {case.name for case in CASES}
assert len(_NAMES) == len(CASES) and not QUICK - _NAMES
