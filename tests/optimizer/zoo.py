"""Every optimizer of torch.optim and of four other libraries, how each is driven, and the page that lists them.

``python -m tests.optimizer.zoo`` writes the table into docs/optimizers.md anew.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import random
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_optimizer
import schedulefree
import torch
import torch_optimizer
import torchao.optim
from torch import nn

from fcoptim import FairCastOptimizer

from .helpers import batch, equal_bits, loss_on, mlp

PAGE = Path(__file__).resolve().parents[2] / "docs" / "optimizers.md"
MARKS = ("<!-- table: begin -->\n", "<!-- table: end -->\n")
LIBRARIES = {
    "torch.optim": torch.optim,
    "torch_optimizer": torch_optimizer,
    "pytorch_optimizer": pytorch_optimizer,
    "schedulefree": schedulefree,
    "torchao.optim": torchao.optim,
}
PACKAGES = ("torch", "torch-optimizer", "pytorch-optimizer", "schedulefree", "torchao")
FLAGS = ("foreach", "fused", "maximize", "amsgrad", "amsbound", "nesterov", "centered", "decoupled_weight_decay")
CHECKED = {"foreach": (True, False), "fused": (True,)}

# What some classes need beside a learning rate, or to move anything within a few steps.
OPTIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("torch.optim", "LBFGS"): {"lr": 0.1, "max_iter": 4},
    ("pytorch_optimizer", "AdaShift"): {"keep_num": 2},
    ("pytorch_optimizer", "DAdaptSGD"): {"lr": 1.0, "d0": 1e-3},
    ("pytorch_optimizer", "RAdam"): {"degenerated_to_sgd": True},
    ("pytorch_optimizer", "Ranger21"): {"num_iterations": 100},
    ("pytorch_optimizer", "SaRA"): {"threshold": 10.0},
}
NEEDS = {
    ("torch.optim", "LBFGS"): "closure",
    ("torch.optim", "SparseAdam"): "sparse gradients",
    ("torch.optim", "Muon"): "matrices only",
    ("pytorch_optimizer", "AliG"): "closure",
    ("pytorch_optimizer", "LBFGS"): "closure",
    ("pytorch_optimizer", "SpectralSphere"): "matrices only",
}
# Their own state holds Python objects, which torch.load reads with weights_only=False alone.
PICKLED = {"AdaShift", "Conda", "SCION", "SCIONLight", "ScalableShampoo"}
# What does not run by itself either: in one process, or at all.
BROKEN: dict[tuple[str, str], tuple[dict[str, Any], str]] = {
    ("pytorch_optimizer", "BSAM"): (
        {"num_data": 100},
        "its `step(closure)` fails without an earlier backward pass",
    ),
    ("pytorch_optimizer", "DistributedMuon"): ({}, "not tried: it runs under torch.distributed only"),
    ("pytorch_optimizer", "DeMo"): ({}, "not tried: it runs under torch.distributed only"),
}

Optimizer = torch.optim.Optimizer


@dataclass(frozen=True)
class Case:
    """One optimizer class with one choice of options.

    Attributes:
        library: The module it is taken from.
        cls: The class.
        options: What it is constructed with.
        needs: How it differs from "any loss, then step": "closure", "sparse gradients", "matrices only", "groups".
    """

    library: str
    cls: type[Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    needs: str = ""

    def __str__(self) -> str:
        flags = [f"{key}={value}" for key, value in self.options.items() if key in FLAGS]
        return "-".join([self.library, self.cls.__name__, *flags])

    @property
    def with_closure(self) -> bool:
        return self.needs == "closure"

    def model(self) -> nn.Module:
        """A small fp32 model that the optimizer can train."""
        if self.needs == "sparse gradients":
            torch.manual_seed(0)
            return nn.Embedding(10, 4, padding_idx=0, sparse=True)
        return mlp(bias=self.needs not in ("matrices only", "groups"))

    def params(self, model: nn.Module) -> Any:
        """What the wrapper is given: the model, or param groups that say which parameters are matrices."""
        return model if self.needs != "groups" else [{"params": list(model.parameters()), "use_muon": True}]

    def wrap(self, model: nn.Module, **options: Any) -> FairCastOptimizer:
        """The class wrapped around the model, ready to train."""
        seed(0)
        opt = FairCastOptimizer(self.params(model), self.cls, **options, **self.options)
        return ready(opt)

    def loss(self, model: nn.Module, step: int) -> torch.Tensor:
        """The loss of one step; with sparse gradients rows repeat, and step 2 touches the padding row alone."""
        if self.needs != "sparse gradients":
            return loss_on(model, step)
        rows = torch.tensor([[1, 3, 3, 7], [2, 2, 2, 0], [0, 0, 0, 0], [9, 1, 5, 5], [3, 0, 9, 9]][step % 5])
        return (model(rows).float() - batch(step, 4, 4)).square().mean()


def seed(number: int) -> None:
    """Seed everything that optimizers draw from."""
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def ready(optimizer: Any) -> Any:
    """Switch an optimizer with two modes, as schedule-free ones are, to training."""
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer


def discover() -> list[tuple[str, type[Optimizer]]]:
    """All optimizer classes of the libraries, with the library's name."""
    return [
        (library, cls)
        for library, module in LIBRARIES.items()
        for cls in vars(module).values()
        if inspect.isclass(cls) and issubclass(cls, Optimizer) and cls is not Optimizer
    ]


def needs_of(library: str, cls: type[Optimizer]) -> str:
    """How a class wants to be driven."""
    if library == "schedulefree" and cls.__name__.endswith("Closure"):
        return "closure"
    if library == "pytorch_optimizer" and "use_muon" in (cls.__doc__ or ""):
        return "groups"
    return NEEDS.get((library, cls.__name__), "")


def base_case(library: str, cls: type[Optimizer]) -> Case:
    """A class with a learning rate that moves something, weight decay and momentum where it has them."""
    known = inspect.signature(cls).parameters
    wanted = {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9}
    options = {key: value for key, value in wanted.items() if key in known}
    options.update(OPTIONS.get((library, cls.__name__), {}))
    return Case(library, cls, options, needs_of(library, cls))


def variants(case: Case) -> Iterator[Case]:
    """The case itself, and one more for each flag of the class's signature."""
    yield case
    known = inspect.signature(case.cls).parameters
    for flag in FLAGS:
        for value in CHECKED.get(flag, (True,)) if flag in known else ():
            if known[flag].default is not value:
                yield Case(case.library, case.cls, {**case.options, flag: value}, case.needs)


def drive(case: Case, opt: FairCastOptimizer, model: nn.Module, steps: range) -> None:
    """Train with whatever the optimizer needs."""

    def evaluate(step: int) -> torch.Tensor:
        opt.zero_grad()
        loss = case.loss(model, step)
        loss.backward()
        return loss

    for step in steps:
        seed(step)
        if case.with_closure:
            opt.step(lambda step=step: evaluate(step))
        else:
            evaluate(step)
            opt.step()


class ByHand:
    """Mixed precision as one writes it by hand: fp32 copies, a plain optimizer, ``.bfloat16()`` copies back."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        self.case = case
        self.masters = [p.detach().clone() for p in model.parameters()]
        self.model = model.bfloat16()
        groups = [{"params": self.masters, "use_muon": True}] if case.needs == "groups" else self.masters
        seed(0)
        self.optimizer = ready(case.cls(groups, **case.options))

    def evaluate(self, step: int) -> torch.Tensor:
        self.copy_back()
        self.model.zero_grad()
        with torch.enable_grad():
            loss = self.case.loss(self.model, step)
            loss.backward()
        for param, master in zip(self.model.parameters(), self.masters):
            master.grad = None if param.grad is None else param.grad.float()
        return loss

    @torch.no_grad()
    def copy_back(self) -> None:
        for param, master in zip(self.model.parameters(), self.masters):
            param.copy_(master.bfloat16())

    def step(self, step: int) -> None:
        seed(step)
        if self.case.with_closure:
            self.optimizer.step(lambda: self.evaluate(step))
        else:
            self.evaluate(step)
            self.optimizer.step()
        self.copy_back()


def matches_by_hand(case: Case, steps: int = 5) -> None:
    """Hold a wrapped optimizer with ``rounding="nearest"`` against the loop by hand, bit for bit.

    Raises:
        AssertionError: A master or a served weight differs, or nothing moved.
    """
    model = case.model()
    start = [p.detach().clone() for p in model.parameters()]
    opt = case.wrap(model, rounding="nearest")
    by_hand = ByHand(case, case.model())
    for step in range(steps):
        drive(case, opt, model, range(step, step + 1))
        by_hand.step(step)
        for (name, master), expected in zip(opt.named_masters(), by_hand.masters):
            assert equal_bits(master, expected), f"{case}: the master of {name} differs at step {step}"
        for served, expected in zip(model.parameters(), by_hand.model.parameters()):
            assert equal_bits(served, expected), f"{case}: served weights differ at step {step}"
    for before, (name, after) in zip(start, opt.named_masters()):
        assert not torch.equal(before, after), f"{case}: {name} did not move"


@cache
def verdict(library: str, cls: type[Optimizer]) -> str:
    """How a class fares: what it needs, or why it is refused at construction. Runs it."""
    if (library, cls.__name__) in BROKEN:
        return f"refused: {BROKEN[library, cls.__name__][1]}"
    case = base_case(library, cls)
    try:
        case.wrap(case.model())
    except ValueError as refusal:
        return f"refused: {refusal}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch_optimizer calls deprecated overloads
        matches_by_hand(case)
    needs = {"groups": "groups with `use_muon`, as it asks for", "": "any loss"}.get(case.needs, case.needs)
    return needs + ("; its state needs `weights_only=False`" if cls.__name__ in PICKLED else "")


def table() -> str:
    """The table of docs/optimizers.md."""
    lines = ["| optimizer | from | works | how it is driven, or why not |", "|---|---|---|---|"]
    for library, cls in sorted(discover(), key=lambda found: (found[0], found[1].__name__.lower())):
        said = verdict(library, cls)
        works = not said.startswith("refused: ")
        lines.append(
            f"| `{cls.__name__}` | {library} | {'yes' if works else 'no'} | {said.removeprefix('refused: ')} |"
        )
    return "\n".join(lines) + "\n"


def table_on_page() -> str:
    """The table as the page has it."""
    return PAGE.read_text().split(MARKS[0])[1].split(MARKS[1])[0]


def versions() -> str:
    """What is installed, as the page says it."""
    *most, last = (f"{name} {importlib.metadata.version(name).split('+')[0]}" for name in PACKAGES)
    return f"{', '.join(most)} and {last}"


def versions_on_page() -> str:
    """The versions the page says it was made with."""
    found = re.search(r"torch [\d.]+, [^:]+? and torchao [\d.]*\d", PAGE.read_text())
    assert found, f"{PAGE} does not say which versions it was made with"
    return found.group().replace("\n", " ")


if __name__ == "__main__":
    before, rest = PAGE.read_text().split(MARKS[0])
    PAGE.write_text(before + MARKS[0] + table() + MARKS[1] + rest.split(MARKS[1])[1])
