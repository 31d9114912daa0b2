"""The small vectors that a step sums over all ranks: what is in them, for the step and for the planner. No torch."""

from __future__ import annotations

from meshwright.config.sections import Config

# What a loss is a mean over, by its name in metrics.jsonl: learned tokens, pairs of answers, or single answers.
LEARNED, PAIRS, ANSWERS = COUNTED = ("learned", "pairs", "answers")

# Where a step's time goes, and the phases that its ledger knows.
PHASES = ("data", "forward", "backward", "reduce", "optimizer")

# Summed over the world in int64 after the update: for each axis of the mesh these, then the microseconds that ranks
# waited for each axis, the microseconds of each phase, for each rank what RANK_COUNTS names (others add zero),
# and one number for what ranks ask for: 1 for each that was asked to stop, NEW_NAME for each that monitors a value
# under a name that the others don't know, SAVE if the rank that writes the run wants a checkpoint after this step.
COUNTS = ("calls", "payload_bytes", "wire_bytes")
RANK_COUNTS = ("busy_us", "waited_us", "data_us", "peak_bytes", "opened")
NEW_NAME = 1 << 32
SAVE = 1 << 56

WIDE = 8  # bytes of a float64 or an int64


def counted_as(config: Config) -> str:
    if not config.objective_facts.judges_answers:
        return LEARNED
    return ANSWERS if config.tune.judges_each else PAIRS


def sums_length(terms: int) -> int:
    """Numbers that are summed over the world in float64 before the update: each term's weighted sum and its count, the
    squared gradient norm and, where there are several terms, their plain sums."""
    return 2 * terms + 1 + (terms if terms > 1 else 0)


def sums_bytes(terms: int = 1) -> int:
    return WIDE * sums_length(terms)


def balance_length(experts: int) -> int:
    """Numbers per block with experts that are summed over the world in float64 after backward: the rows of each expert,
    the choices that were dropped, and the sum of the entropies."""
    return experts + 2


def counts_bytes(axes: int, world: int) -> int:
    return WIDE * ((len(COUNTS) + 1) * axes + len(PHASES) + len(RANK_COUNTS) * world + 1)


def checks_bytes(axes: int, world: int) -> int:
    """One checksum of each rank for each axis of the mesh, gathered over the world every `faults.check_every` steps."""
    return WIDE * axes * world
