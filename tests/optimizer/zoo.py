"""Every optimizer that torch.optim and torch_optimizer offer, how each is driven, and the page that lists them.

``python -m tests.optimizer.zoo`` writes the table into docs/optimizers.md anew.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch_optimizer
from torch import nn

from fcoptim import FairCastOptimizer

from .helpers import batch, equal_bits, loss_on, mlp

PAGE = Path(__file__).resolve().parents[2] / "docs" / "optimizers.md"
MARKS = ("<!-- table: begin -->\n", "<!-- table: end -->\n")
LIBRARIES = {"torch.optim": torch.optim, "torch_optimizer": torch_optimizer}
FLAGS = ("foreach", "fused", "maximize", "amsgrad", "amsbound", "nesterov", "centered", "decoupled_weight_decay")
CHECKED = {"foreach": (True, False), "fused": (True,)}

Optimizer = torch.optim.Optimizer


@dataclass(frozen=True)
class Case:
    """One optimizer class with one choice of options.

    Attributes:
        library: The module it is taken from.
        cls: The class.
        options: What it is constructed with.
        needs: How it differs from "any loss, then step": "closure", "sparse gradients", "matrices only".
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
        return mlp(bias=self.needs != "matrices only")

    def loss(self, model: nn.Module, step: int) -> torch.Tensor:
        """The loss of one step; with sparse gradients rows repeat, and step 2 touches the padding row alone."""
        if self.needs != "sparse gradients":
            return loss_on(model, step)
        rows = torch.tensor([[1, 3, 3, 7], [2, 2, 2, 0], [0, 0, 0, 0], [9, 1, 5, 5], [3, 0, 9, 9]][step % 5])
        return (model(rows).float() - batch(step, 4, 4)).square().mean()


def discover() -> list[tuple[str, type[Optimizer]]]:
    """All optimizer classes of both libraries, with the library's name."""
    return [
        (library, cls)
        for library, module in LIBRARIES.items()
        for cls in vars(module).values()
        if inspect.isclass(cls) and issubclass(cls, Optimizer) and cls is not Optimizer
    ]


def needs_of(cls: type[Optimizer]) -> str:
    """How a class wants to be driven."""
    return {
        torch.optim.LBFGS: "closure",
        torch.optim.SparseAdam: "sparse gradients",
        torch.optim.Muon: "matrices only",
    }.get(cls, "")


def base_case(library: str, cls: type[Optimizer]) -> Case:
    """A class with a learning rate that moves something, weight decay and momentum where it has them."""
    known = inspect.signature(cls).parameters
    wanted = {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9}
    options = {key: value for key, value in wanted.items() if key in known}
    needs = needs_of(cls)
    if needs == "closure":
        options.update(lr=0.1, max_iter=4)
    return Case(library, cls, options, needs)


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
        self.optimizer = case.cls(self.masters, **case.options)

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
    opt = FairCastOptimizer(model, case.cls, rounding="nearest", **case.options)
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
    case = base_case(library, cls)
    try:
        FairCastOptimizer(case.model(), cls, **case.options)
    except (TypeError, ValueError) as refusal:
        return f"refused: {refusal}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch_optimizer calls deprecated overloads
        matches_by_hand(case)
    return case.needs or "any loss"


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


def versions_on_page() -> str:
    """The versions the page says it was made with."""
    found = re.search(r"torch [\d.]+ and torch-optimizer [\d.]+", PAGE.read_text())
    assert found, f"{PAGE} does not say which versions it was made with"
    return found.group()


if __name__ == "__main__":
    before, rest = PAGE.read_text().split(MARKS[0])
    PAGE.write_text(before + MARKS[0] + table() + MARKS[1] + rest.split(MARKS[1])[1])
