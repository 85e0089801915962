"""Continues saved runs in a process of its own: ``python -m tests.optimizer.resume_worker FOLDER``."""

import sys
import warnings
from pathlib import Path

import torch

from .helpers import pair, train, weights


def resume(path: Path) -> None:
    """Load one file into a model of another seed and go on for five steps; write down where that leads."""
    file = torch.load(path, weights_only=True)
    model, opt = pair(seed=99, **file["options"])
    if file["with_model"]:
        model.load_state_dict(file["model"])
        opt.adopt_served_()
        warnings.simplefilter("error")  # nothing differs, so nothing may be said
    else:
        warnings.simplefilter("ignore")  # it says that the masters win
    opt.load_state_dict(file["optimizer"])
    served = {name: value.clone() for name, value in model.state_dict().items()}
    train(opt, model, range(file["step"], file["step"] + 5))
    torch.save({"served": served, "weights": weights(opt), "state": opt.state_dict()}, path.with_suffix(".out"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for found in sorted(Path(sys.argv[1]).glob("*.in")):
        resume(found)
