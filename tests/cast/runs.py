"""Shards made of several runs of a parameter, for the tests of every back end."""

import numpy as np
import torch

from fcoptim.cast import Runs
from fcoptim.cast.rules import Job

SHAPE = (7, 600)
# Columns that a shard holds of each row, one of them the whole rest of it.
SHARDS = {"half": (0, 300), "one column": (599, 600), "uneven": (37, 511)}


def master(special: bool = False) -> torch.Tensor:
    """fp32 noise, with special values where asked for."""
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    if special:
        values[2, 40], values[3, 599], values[4, 100], values[5, 50] = float("nan"), -3.4e38, float("inf"), 0.0
    return values


def check(cast_jobs, code: int, shard: str, wide: bool, device: str = "cpu") -> None:
    """A shard cast by its runs is that part of the whole, and as many values are counted as changed.

    Args:
        cast_jobs: The back end.
        code: The rule.
        shard: A key of ``SHARDS``.
        wide: Whether served values have fp32 storage.
        device: Where to cast.
    """
    first, last = SHARDS[shard]
    dtype, kind = (torch.float32, torch.int32) if wide else (torch.bfloat16, torch.int16)
    keys = (0x12345678, 0x9ABCDEF0)
    whole = torch.zeros(SHAPE, dtype=dtype, device=device)
    values = master(special=True).to(device)
    cast_jobs([Job(whole, values, keys, 2040, None)], code, None)
    runs = Runs(2040 + np.arange(SHAPE[0]) * SHAPE[1] + first, np.full(SHAPE[0], last - first))
    part = torch.zeros(SHAPE[0], last - first, dtype=dtype, device=device)
    other, changed = torch.zeros(5, dtype=dtype, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    plain = Job(other, torch.ones(5, device=device), keys, 0, None)
    cast_jobs([plain, Job(part, values[:, first:last].contiguous(), keys, runs, None), plain], code, changed)
    expected = whole[:, first:last].contiguous()
    assert torch.equal(part.view(kind), expected.view(kind))
    assert changed[1].item() == (expected.view(kind) != 0).sum().item()
