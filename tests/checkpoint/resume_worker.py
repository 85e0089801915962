"""Continues saved runs in a process of its own: ``python -m tests.checkpoint.resume_worker FOLDER``."""

import sys
import warnings
from pathlib import Path

import torch

from fcoptim import load_checkpoint
from tests.optimizer.helpers import pair, train, weights


def resume(path: Path) -> None:
    """Load into a model of another seed and go on for five steps."""
    model, opt = pair(seed=99)
    extra = load_checkpoint(path, opt)
    train(opt, model, range(extra["step"], extra["step"] + 5))
    found = {**weights(opt), **{f"model {name}": value for name, value in model.state_dict().items()}}
    torch.save(found, path.with_suffix(".out"))


if __name__ == "__main__":
    torch.set_num_threads(2)
    warnings.simplefilter("error")
    for folder in sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir()):
        resume(folder)
