"""The contents of the small vectors that a step sums over all ranks. The step and the planner read them. No torch."""

from __future__ import annotations

from meshwright.config.sections import Config

# The units over which a loss is a mean, by their names in metrics.jsonl: learned tokens, pairs of answers, or answers.
LEARNED, PAIRS, ANSWERS = COUNTED = ("learned", "pairs", "answers")

# The phases of a step, by which its time and its ledger are divided.
PHASES = ("data", "forward", "backward", "reduce", "optimizer")

# One int64 vector is summed over the world after the update. It holds COUNTS for each axis of the mesh, the
# microseconds that ranks waited for each axis, the microseconds of each phase, and RANK_COUNTS for each rank (a rank
# adds zeros for the others). Its last number encodes requests: each rank that was asked to stop adds 1, each rank that
# monitors a value under a name that the others don't know adds NEW_NAME, and the rank that writes the run adds SAVE if
# it wants a checkpoint after this step.
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
    """Return the length of the float64 vector that is summed over the world before the update.

    It holds each term's weighted sum and its count, the squared gradient norm and, if there are several terms, their
    unweighted sums.
    """
    return 2 * terms + 1 + (terms if terms > 1 else 0)


def sums_bytes(terms: int = 1) -> int:
    return WIDE * sums_length(terms)


def balance_length(experts: int) -> int:
    """Return the length per block with experts of the float64 vector that is summed over the world after backward.

    It holds the number of rows of each expert, the number of dropped choices, and the sum of the router's entropies.
    """
    return experts + 2


def counts_bytes(axes: int, world: int) -> int:
    return WIDE * ((len(COUNTS) + 1) * axes + len(PHASES) + len(RANK_COUNTS) * world + 1)


def checks_bytes(axes: int, world: int) -> int:
    """Return the bytes of the checksums that are gathered over the world every `faults.check_every` steps: one per rank
    and axis of the mesh."""
    return WIDE * axes * world
