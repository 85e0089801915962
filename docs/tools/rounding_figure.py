"""Draw docs/rounding.svg: four casts of one master by each rule. Run: python docs/tools/rounding_figure.py.

Every number in it is computed by fcoptim; a test holds the file against this script.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

import fcoptim
from fcoptim.cast import RULES, Rule
from fcoptim.cast.bits import dither_bits, stream_keys
from fcoptim.cast.reference import split_word

MASTER = 0.01229
CASTS = 4
MEAN_OF = 1000
KEY = fcoptim.parameter_key(0, "layers.0.mlp.up_proj.weight")

WIDTH, LEFT, SCALE = 760, 150, 300 / 65536  # of the picture, of the bars, pixels for one of the lower half's units
LO, D, RULE = "#3f6fb5", "#e0a03c", "#444"
MONO = 'font-family="monospace"'
_TEXT = '<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" {more}>{text}</text>'


def text(x: float, y: float, words: str, size: int = 12, fill: str = "#222", more: str = "") -> str:
    """One line of text."""
    return _TEXT.format(x=x, y=y, text=words, size=size, fill=fill, more=more)


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    """One filled rectangle."""
    return f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}" fill="{fill}"/>'


def addends(rule: Rule, hi: int, lo: int) -> list[int]:
    """What the rule adds to the lower half at the first casts of element 0."""
    if rule.accumulates:
        first = int(dither_bits(stream_keys(KEY, 0), torch.tensor(0)))
        return [(first + n * lo) % 65536 for n in range(CASTS)]
    if rule.name == "nearest":
        return [0x7FFF + (hi & 1)] * CASTS
    counts = range(CASTS) if rule.counts else [0] * CASTS
    return [int(dither_bits(stream_keys(KEY, count), torch.tensor(0))) for count in counts]


def served(rule: Rule, casts: int) -> torch.Tensor:
    """The upper half served by ``fcoptim.cast_`` at each of so many casts of element 0."""
    master, target = torch.tensor([MASTER]), torch.empty(1, dtype=torch.bfloat16)
    accumulator = fcoptim.start_accumulator_(torch.empty(1, dtype=torch.int16), key=KEY) if rule.accumulates else None
    found = torch.empty(casts, dtype=torch.int64)
    for count in range(casts):
        fcoptim.cast_(target, master, rounding=rule.name, key=KEY, count=count, error_feedback=accumulator)
        found[count] = int(target.view(torch.int16)) & 0xFFFF
    return found


def mean(rule: Rule, hi: int) -> str:
    """How far the served value lies above ``hi``, in ulps, on average over casts, or over weights for the dither."""
    if rule.name != "dither":
        return f"{(served(rule, MEAN_OF) - hi).double().mean():.2f} over {MEAN_OF:,} casts"
    target = torch.empty(MEAN_OF, dtype=torch.bfloat16)
    fcoptim.cast_(target, torch.full((MEAN_OF,), MASTER), rounding=rule.name, key=KEY, count=0)
    return f"{(target.view(torch.int16).long() - hi).double().mean():.2f} over {MEAN_OF:,} weights"


def bars(rule: Rule, top: float, hi: int, lo: int) -> Iterator[str]:
    """The casts of one rule."""
    yield text(12, top + 14, rule.name, 13, more='font-weight="bold"')
    yield text(12, top + 32, "mean above hi, in ulps:", 10, "#555")
    yield text(12, top + 46, mean(rule, hi), 10, "#555")
    outcome = served(rule, CASTS)
    for n, d in enumerate(addends(rule, hi, lo)):
        y, carry = top + 15 * n, lo + d >= 65536
        assert int(outcome[n]) == hi + carry
        yield box(LEFT, y, lo * SCALE, 11, LO)
        yield box(LEFT + lo * SCALE, y, d * SCALE, 11, D)
        yield text(580, y + 10, f"d = {d}", 11, more=MONO)
        yield text(680, y + 10, "hi + 1" if carry else "hi", 11, more=MONO)


def figure() -> str:
    """The whole picture, as SVG."""
    word = torch.tensor([MASTER])
    hi, lo = (int(half) for half in split_word(word))
    below, above = (torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16).item() for bits in (hi, hi + 1))
    carry_at, mono = LEFT + 65536 * SCALE, f'{MONO} letter-spacing="1"'
    parts = [
        text(12, 24, f"a master, fp32: {word.item():.8f}", 13, more='font-weight="bold"'),
        text(12, 50, f"{hi:016b}", 15, RULE, mono),
        text(190, 50, f"{lo:016b}", 15, LO, mono),
        text(12, 68, f"hi, bf16: {below:.8f}", 11, RULE),
        text(190, 68, f"lo = {lo} = {lo / 65536:.3f} ulp", 11, LO),
        text(390, 50, "served = hi + carry(lo + d)", 14, more=MONO),
        text(390, 68, f"hi, or hi + 1 = {above:.8f} where lo + d reaches 65536", 11),
        box(LEFT, 84, 11, 11, LO) + text(LEFT + 16, 94, "lo") + box(LEFT + 44, 84, 11, 11, D),
        text(LEFT + 60, 94, "d, four casts of the same master"),
        text(carry_at + 5, 94, "2**16: carry", 11, "#a22") + text(680, 94, "served", 11),
    ]
    for n, rule in enumerate(RULES.values()):
        parts += bars(rule, 106 + 74 * n, hi, lo)
    height = 106 + 74 * len(RULES)
    line = f'<line x1="{carry_at:g}" y1="84" x2="{carry_at:g}" y2="{height - 12}" stroke="#a22" stroke-dasharray="4"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">'
    title = "<title>Four casts of one master by each rounding rule</title>"
    return "\n".join([head, title, box(0, 0, WIDTH, height, "#fff"), *parts, line, "</svg>\n"])


if __name__ == "__main__":
    Path(__file__).resolve().parent.parent.joinpath("rounding.svg").write_text(figure())
