"""Run in a process of its own: a few steps under a limit on memory of what has to be there and an allowance."""

import resource
import sys

import torch
from torch import nn

from fcoptim import FairCastOptimizer

ROWS, COLUMNS, LAYERS = 2048, 2048, 6
CLASSES = {"SGD": (torch.optim.SGD, {"lr": 1e-3}), "AdamW": (torch.optim.AdamW, {"lr": 1e-3, "fused": True})}


def _writable() -> int:
    """Bytes of private writable memory that this process has mapped; the limit is on these."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmData"))
    return int(line.split()[1]) * 1024


def _model(rows: int, layers: int) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.full((rows, COLUMNS), 0.5, dtype=torch.bfloat16)) for _ in range(layers))


def _step(opt: FairCastOptimizer) -> None:
    for param in opt.param_groups[0]["params"]:
        param.grad = torch.full(param.shape, 1e-3)
    opt.step()
    for param in opt.param_groups[0]["params"]:
        param.grad = None


def main(rounding: str, optimizer: str, allowance: str) -> None:
    """Warm everything up on a small model, then step a large one under the limit."""
    torch.set_num_threads(1)
    cls, options = CLASSES[optimizer]
    _step(FairCastOptimizer(_model(2, 2), cls, rounding=rounding, **options))
    per_weight = 2 + 4 + 4 + (2 if rounding == "error_feedback" else 0) + (8 if optimizer == "AdamW" else 0)
    limit = _writable() + ROWS * COLUMNS * LAYERS * per_weight + int(allowance)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    opt = FairCastOptimizer(_model(ROWS, LAYERS), cls, rounding=rounding, **options)
    for _ in range(2):
        _step(opt)
    print("fits")


main(*sys.argv[1:])
