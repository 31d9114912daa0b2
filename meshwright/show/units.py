"""Format numbers for people: bytes, counts, rates, durations, percentages, losses and axis ticks. No torch."""

from __future__ import annotations

import math


def _three_digits(value: float) -> str:
    """Format a number with three significant digits, or more if there are more before the decimal point."""
    decimals = (abs(value) < 9.995) + (abs(value) < 99.95)
    return f"{value:.{decimals}f}"


def size(value: float) -> str:
    """Format a number of bytes: `512 B`, `1.50 MiB`."""
    # 0.9995 of a unit already rounds to 1.00 of it.
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if value >= 0.9995 * 2**power:
            return f"{_three_digits(value / 2**power)} {unit}"
    return f"{value:.0f} B"


def count(value: float) -> str:
    """Format a count: `950`, `12.3k`, `1.24M`, `8.03B`."""
    if not math.isfinite(value):
        return str(value)
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * factor:
            return _three_digits(value / factor) + unit
    return f"{value:.0f}" if value == int(value) or value >= 100 else f"{value:.1f}"


def flops(tera: float) -> str:
    """Format a rate that is given in TFLOP/s: `23.4 GFLOP/s`, `412 TFLOP/s`."""
    factor, unit = (1.0, "T") if tera >= 0.9995 or not math.isfinite(tera) else (1e3, "G")
    return f"{_three_digits(tera * factor)} {unit}FLOP/s"


def seconds(value: float) -> str:
    """Format a duration, with two decimals for numbers below 100: `18.07 s`, `333 ms`, `3.21 ms`, `12.30 us`."""
    factor, unit = (1e3, "ms") if value >= 0.9995e-3 else (1e6, "us")
    if value >= 0.9995:
        factor, unit = 1.0, "s"
    return f"{factor * value:.{2 if factor * value < 99.995 else 0}f} {unit}"


def clock(value: float) -> str:
    """Format a long duration, given in seconds: `0:42`, `1:02:03`, `2d 03:04:05`."""
    if not math.isfinite(value):
        return "?"
    minutes, second = divmod(max(0, round(value)), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02d}:{minute:02d}:{second:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def percent(share: float, digits: int = 1) -> str:
    """Format a share of 1 as a percentage: `12.3 %`."""
    return f"{100 * share:.{digits}f} %"


def decimals(value: float, digits: int) -> str:
    """Format a loss or a norm with a fixed number of decimals; `nan` and `inf` stay as they are."""
    return f"{value:.{digits}f}" if math.isfinite(value) else str(value)


def ticks(low: float, high: float, most: float) -> list[float]:
    """Return round numbers (1, 2 or 5 times a power of ten apart) from `low` to `high`, about `most` of them."""
    if low == high:
        return [low]
    # The tolerance of 1e-9 keeps rounding errors from dropping the first or the last tick.
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
