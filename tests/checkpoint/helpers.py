"""What the checkpoints' tests share."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from fcoptim import FairCastOptimizer, load_checkpoint, save_checkpoint
from fcoptim.checkpoint.layout import MANIFEST
from tests.optimizer.helpers import ADAM, assert_same, assert_same_run, pair, train

ROOT = Path(__file__).resolve().parents[2]


class Mixed(nn.Module):
    """Tied, frozen, buffered, and with a parameter that no gradient reaches."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(8, 16)
        self.body = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.idle = nn.Parameter(torch.randn(3))
        self.head = nn.Linear(16, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.rand(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = self.frozen(self.body(x)) * self.scale.to(x.dtype)
        return self.head(self.norm(hidden.float()).to(x.dtype))


def mixed_loss(model: nn.Module, step: int) -> torch.Tensor:
    """A loss on noise that depends on the step alone."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, 16, generator=generator).to(model.body.weight.dtype)
    return (model(x).float() - 1).square().mean()


def mixed_pair(seed: int = 0, **options) -> tuple[Mixed, FairCastOptimizer]:
    """A ``Mixed`` whose norm is kept in fp32, and AdamW around it."""
    model = Mixed(seed)
    return model, FairCastOptimizer(model, torch.optim.AdamW, keep_fp32="norm.*", **{**ADAM, **options})


def saved_run(path: Path, steps: int = 3, rounding: str = "stochastic", **options) -> tuple:
    """A short run and its checkpoint."""
    model, opt = pair(rounding, **options)
    train(opt, model, range(steps))
    save_checkpoint(path, opt)
    return model, opt


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def names(folder: Path) -> list[str]:
    """What lies in a folder, hidden things included."""
    return sorted(os.listdir(folder))


def resumes(path: Path, model: nn.Module, opt: FairCastOptimizer, fresh: tuple, start: int, loss: Callable) -> None:
    """A fresh pair that loads a checkpoint is at the same point, and goes on the same way.

    Raises:
        AssertionError: It is not.
    """
    other_model, other = fresh
    load_checkpoint(path, other)
    assert_same(dict(model.state_dict()), dict(other_model.state_dict()), "model")
    assert_same_run(opt, other)
    train(opt, model, range(start, start + 4), loss)
    train(other, other_model, range(start, start + 4), loss)
    assert_same(dict(model.state_dict()), dict(other_model.state_dict()), "model")
    assert_same_run(opt, other)


def run_python(module: str, *arguments: object, **options) -> subprocess.CompletedProcess:
    """Run a module of the tests in a process of its own."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, **options)


def rewrite_manifest(path: Path, change: Callable[[dict], None]) -> None:
    """Edit a manifest and give it a digest that fits, as somebody who knows how could."""
    from fcoptim.checkpoint import layout

    content = json.loads((path / MANIFEST).read_text())
    content.pop("digest")
    change(content)
    (path / MANIFEST).write_bytes(layout.to_json({**content, "digest": layout._digest(content)}))
