"""Line charts on logarithmic axes, as SVG or PNG, with nothing but the standard library and numpy. No torch."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

COLOURS = ("#3b6fb6", "#e08e3c", "#5aa9a3", "#c2618d", "#8c6bb1", "#7a7a7a")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 440, 80, 150, 44, 52

# Glyphs of 5 x 7 dots, a row a number, for the words of a chart.
_FONT = {
    "0": "0e11131519110e", "1": "040c040404040e", "2": "0e11010204081f", "3": "1f02040201110e", "4": "02060a121f0202",
    "5": "1f101e0101110e", "6": "0608101e11110e", "7": "1f010204080808", "8": "0e11110e11110e", "9": "0e11110f01020c",
    "a": "00000e010f110f", "b": "10101619111e00", "c": "00000e1010110e", "d": "01010d13110f00", "e": "00000e111f100e",
    "f": "0609081c080808", "g": "000f110f010e00", "h": "10101619111100", "i": "04000c0404040e", "j": "0200060202120c",
    "k": "10101214181412", "l": "0c04040404040e", "m": "00001a15151111", "n": "00001619111111", "o": "00000e1111110e",
    "p": "001e111e101000", "q": "000d130f010100", "r": "00001619101010", "s": "00000e100e010e", "t": "08081c08080906",
    "u": "0000111111130d", "v": "00001111110a04", "w": "0000111115150a", "x": "0000110a040a11", "y": "0011110f010e00",
    "z": "00001f0204081f", "-": "0000001f000000", "/": "00010204081000", ".": "00000000000c0c", "%": "18190204081303",
    ",": "0000000c040800", ":": "000c0c000c0c00", "(": "02040808080402", ")": "08040202020408", " ": "00000000000000",
    "B": "1e11111e11111e", "G": "0e11101711110f", "M": "111b1515111111", "T": "1f040404040404", "K": "11121418141211",
}  # fmt: skip


def short(value: float) -> str:
    for letter, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= 10 * factor or (value >= factor and factor > 1e3):
            return f"{value / factor:g}{letter}"
    return f"{value:g}"


@dataclass(frozen=True)
class Chart:
    """Lines by name, each a list of (x, y), both above zero, on logarithmic axes."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    tick: Callable[[float], str] = short  # how a value of x is written

    @property
    def box(self) -> tuple[float, float, float, float]:
        points = [point for line in self.lines.values() for point in line]
        xs, ys = [p[0] for p in points] or [1.0], [p[1] for p in points] or [1.0]
        return min(xs), max(max(xs), min(xs) * 1.01), min(ys) / 1.2, max(ys) * 1.2

    def at(self, x: float, y: float) -> tuple[float, float]:
        x0, x1, y0, y1 = self.box
        across = math.log(x / x0) / math.log(x1 / x0)
        up = math.log(y / y0) / math.log(y1 / y0)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    def ticks(self) -> tuple[list[float], list[float]]:
        x0, x1, y0, y1 = self.box
        xs = sorted({x for line in self.lines.values() for x, _ in line})
        step = max(1, -(-len(xs) // 8))
        ys = [10.0**n * f for n in range(-12, 15) for f in (1, 3) if y0 <= 10.0**n * f <= y1]
        return [x for x in xs[::step] if x0 <= x <= x1], ys


def svg(chart: Chart) -> str:
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(chart.title)}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(chart.x)}</text>',
        f'<text x="14" y="{TOP - 6}">{escape(chart.y)}</text>',
    ]  # fmt: skip
    x0, _, y0, _ = chart.box
    xs, ys = chart.ticks()
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for x in xs:
        px, _ = chart.at(x, y0)
        out.append(f'<path d="M{px:.1f} {TOP}V{bottom}" stroke="#e6eaee"/>')
        out.append(f'<text x="{px:.1f}" y="{bottom + 18}" text-anchor="middle">{chart.tick(x)}</text>')
    for y in ys:
        _, py = chart.at(x0, y)
        out.append(f'<path d="M{LEFT} {py:.1f}H{right}" stroke="#e6eaee"/>')
        out.append(f'<text x="{LEFT - 8}" y="{py + 4:.1f}" text-anchor="end">{short(y)}</text>')
    for number, (name, line) in enumerate(chart.lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = "L".join(f"{px:.1f} {py:.1f}" for px, py in (chart.at(*point) for point in line))
        if path:
            out.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for px, py in (chart.at(*point) for point in line):
            out.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>')
        out.append(f'<text x="{right + 12}" y="{TOP + 16 + 20 * number}" fill="{colour}">{escape(name)}</text>')
    return "".join([*out, "</svg>\n"])


class _Canvas:
    """A white picture of RGB bytes."""

    def __init__(self) -> None:
        self.pixels: NDArray[np.uint8] = np.full((HEIGHT, WIDTH, 3), 255, dtype=np.uint8)

    def line(self, start: tuple[float, float], end: tuple[float, float], colour: str, width: int = 1) -> None:
        steps = int(max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)) + 1
        columns = np.linspace(start[0], end[0], steps).round().astype(int)
        rows = np.linspace(start[1], end[1], steps).round().astype(int)
        for dx in range(width):
            for dy in range(width):
                keep = (rows + dy < HEIGHT) & (columns + dx < WIDTH) & (rows + dy >= 0) & (columns + dx >= 0)
                self.pixels[rows[keep] + dy, columns[keep] + dx] = _rgb(colour)

    def text(self, x: float, y: float, words: str, colour: str = "#1c2733") -> None:
        for number, letter in enumerate(words):
            glyph = _FONT.get(letter) or _FONT.get(letter.lower(), _FONT[" "])
            for row in range(7):
                bits = int(glyph[2 * row : 2 * row + 2], 16)
                for column in range(5):
                    px, py = int(x) + 6 * number + column, int(y) + row
                    if bits >> (4 - column) & 1 and 0 <= py < HEIGHT and 0 <= px < WIDTH:
                        self.pixels[py, px] = _rgb(colour)


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def png(chart: Chart) -> bytes:
    canvas = _Canvas()
    x0, _, y0, _ = chart.box
    xs, ys = chart.ticks()
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    canvas.text(LEFT, 18, chart.title)
    canvas.text((LEFT + right) / 2 - 3 * len(chart.x), HEIGHT - 16, chart.x)
    canvas.text(10, TOP - 12, chart.y)
    for x in xs:
        px, _ = chart.at(x, y0)
        canvas.line((px, TOP), (px, bottom), "#e6eaee")
        canvas.text(px - 3 * len(chart.tick(x)), bottom + 10, chart.tick(x))
    for y in ys:
        _, py = chart.at(x0, y)
        canvas.line((LEFT, py), (right, py), "#e6eaee")
        canvas.text(LEFT - 8 - 6 * len(short(y)), py - 3, short(y))
    for number, (name, line) in enumerate(chart.lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = [chart.at(*point) for point in line]
        for start, end in zip(points, points[1:], strict=False):
            canvas.line(start, end, colour, 2)
        for px, py in points:
            canvas.line((px - 2, py - 2), (px + 2, py - 2), colour, 5)
        canvas.text(right + 12, TOP + 10 + 16 * number, name, colour)
    rows = b"".join(b"\x00" + row.tobytes() for row in canvas.pixels)
    head = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(rows, 9)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
