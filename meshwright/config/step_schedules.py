"""The learning rate and the batch size over a run, as pure functions of the step and of the consumed samples. A resumed
run needs no other state for them. No torch."""

from __future__ import annotations

from meshwright.config.sections import Config


def learning_rate(config: Config, step: int) -> float:
    """Return the learning rate of step `step`, counted from 1."""
    c, peak, steps = config.lr, config.optimizer.lr, config.train.steps
    warmup = c.warmup_steps(steps)
    if step <= warmup:
        return peak * step / warmup
    # A decay to 0 at the end of a run ends one step after it: an update with a rate of 0 would change nothing.
    beyond = 0 if c.min else 1
    begin, length = warmup, c.decay or max(1, steps - warmup) + beyond
    if c.facts.decays_last:
        # A warm-up that reaches into the decay shortens it.
        begin = max(warmup, steps - (c.decay or max(1, steps // 10)))
        length = max(1, steps - begin) + beyond
    return c.facts.rate(peak, c.min, min(1.0, max(0.0, (step - begin) / length)))


def global_batch(config: Config, consumed: int) -> int:
    """Return the global batch of the step that begins when `consumed` samples have been seen."""
    if not config.train.ramp:
        return config.train.global_batch
    start, increment, samples = config.train.ramp
    rises = (config.train.global_batch - start) // increment
    if not rises:
        return config.train.global_batch
    return min(config.train.global_batch, start + increment * (consumed * rises // samples))


def consumed_after(config: Config, steps: int) -> int:
    """Return the samples that have been seen after the first `steps` steps."""
    consumed = done = 0
    # Each round of the loop takes all steps with the same batch at once, so its length does not depend on `steps`.
    while done < steps and (now := global_batch(config, consumed)) < config.train.global_batch:
        start, increment, samples = config.train.ramp
        rises, risen = (config.train.global_batch - start) // increment, (now - start) // increment
        # The samples before the batch grows again.
        until_next = -(-samples * (risen + 1) // rises) - consumed
        count = min(steps - done, -(-until_next // now))
        consumed = consumed + count * now
        done = done + count
    return consumed + (steps - done) * config.train.global_batch
