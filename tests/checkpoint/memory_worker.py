"""Run in a process of its own: save or load under a limit on memory."""

import resource
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from fcoptim import FairCastOptimizer, load_checkpoint, save_checkpoint

ROWS, COLUMNS, LAYERS = 1024, 4096, 10
TENSOR = ROWS * COLUMNS * 4


def _writable() -> int:
    """Bytes of private writable memory that this process has mapped; the limit is on these."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmData"))
    return int(line.split()[1]) * 1024


def _pair(rounding: str, rows: int, layers: int = LAYERS, stepped: bool = True) -> FairCastOptimizer:
    weights = [nn.Parameter(torch.full((rows, COLUMNS), 0.5)) for _ in range(layers)]
    model = nn.ParameterList(weights)
    opt = FairCastOptimizer(model, torch.optim.AdamW, lr=1e-3, fused=True, rounding=rounding)
    for param in model if stepped else ():
        param.grad = torch.full(param.shape, 1e-3, dtype=torch.bfloat16)
    if stepped:
        opt.step()
        opt.zero_grad()
    return opt


@contextmanager
def limited(needed: int = 0) -> Iterator[None]:
    """Allow one tensor, some megabytes, and what is needed anyway, beyond what is there."""
    limit = _writable() + needed + TENSOR + (16 << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def main(folder: Path, rounding: str) -> None:
    """Warm everything up on a small model, then work on a large one under limits."""
    threading.stack_size(256 << 10)  # stacks are private memory, too
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    small = _pair(rounding, 2, 2)
    save_checkpoint(folder / "small", small)
    load_checkpoint(folder / "small", small)
    opt = _pair(rounding, ROWS)
    with limited():
        save_checkpoint(folder / "large", opt)
    print("saved", flush=True)
    # Mapped files count as private memory, though they are the page cache's.
    files = sum(path.stat().st_size for path in (folder / "large").rglob("*.safetensors"))
    with limited(files):
        load_checkpoint(folder / "large", opt)
    print("loaded", flush=True)
    try:
        with limited():
            save_checkpoint(folder / "copied", opt, background=True).wait()
    except RuntimeError as error:
        print("a copy does not fit" if "memory" in str(error) else error, flush=True)
    del opt
    opt = _pair(rounding, ROWS, stepped=False)
    with limited(files + 2 * LAYERS * TENSOR):  # the moments are new; accumulators are there from the start
        load_checkpoint(folder / "large", opt)
    print("loaded into a new one", flush=True)


main(Path(sys.argv[1]), sys.argv[2])
