"""The figure: a well-formed PNG with something in it."""

import importlib.util
import struct

import pytest

from fcoptim.demo.model import MissingExtra
from fcoptim.demo.plot import plot


def record(step: int, tracked: float | None = 1.0) -> dict:
    rules = ("nearest", "stochastic", "dither", "error_feedback")
    return {"step": step, "rules": {rule: {"changed": 0.001 * step, "tracked": tracked} for rule in rules}}


def png_size(path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[-8:-4] == b"IEND"
    return struct.unpack(">II", data[16:24])


@pytest.mark.parametrize(
    "records",
    [
        [record(1)],
        [record(1, None)],
        [record(step) for step in range(1, 31)],
        [{"step": 1, "rules": {"nearest": {"changed": 0.0, "tracked": None}}}],
        [record(1, None), record(2, -3.0), record(3, 7.0)],
    ],
)
def test_png(tmp_path, records):
    path = tmp_path / "figure.png"
    plot(records, path, title="a $title_ with {signs}")
    width, height = png_size(path)
    assert width > 1000 and height > 400


def test_the_curves_are_drawn(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    plot([record(step) for step in range(1, 9)], tmp_path / "a.png", title="")
    pixels = image.imread(tmp_path / "a.png")[..., :3]
    coloured = (pixels.max(-1) - pixels.min(-1)) > 0.3
    assert coloured.mean() > 0.002


def test_no_step_no_figure(tmp_path):
    with pytest.raises(ValueError, match="no step"):
        plot([], tmp_path / "a.png", title="")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else found(name, *a))
    with pytest.raises(MissingExtra, match=r'matplotlib: pip install "fcoptim\[demo\]"'):
        plot([record(1)], tmp_path / "a.png", title="")
