"""Every optimizer of torch.optim and torch_optimizer against the same training written by hand, bit for bit."""

import importlib.metadata

import pytest
import torch
from torch import nn

from fcoptim import FairCastOptimizer

from . import zoo
from .helpers import assert_same_run, equal_bits, saved

pytestmark = pytest.mark.filterwarnings("ignore:This overload of:UserWarning")

REFUSED = {"Adahessian": "Adahessian can't be wrapped", "Lookahead": "Wrap the inner optimizer instead"}
BASE = [zoo.base_case(*found) for found in zoo.discover() if found[1].__name__ not in REFUSED]
ALL = [variant for case in BASE for variant in zoo.variants(case)]


def test_both_libraries_are_searched():
    found = [cls.__name__ for _, cls in zoo.discover()]
    assert len(found) >= 45
    assert {"AdamW", "LBFGS", "Muon", "SparseAdam", "Lamb", "Shampoo"} <= set(found)
    assert sum("fused=True" in str(case) for case in ALL) >= 4
    assert sum("foreach=True" in str(case) for case in ALL) >= 12


@pytest.mark.parametrize("case", ALL, ids=str)
def test_equals_the_loop_by_hand(case):
    """With "nearest", masters and served weights are those of fp32 copies stepped and copied back by hand.

    Field report 13 (SparseAdam: repeated rows, and a batch that touches the padding row alone).
    Field report 30 (LBFGS: each evaluation sees its trial masters).
    """
    if case in BASE:
        assert not zoo.verdict(case.library, case.cls).startswith("refused")
    else:
        zoo.matches_by_hand(case)


@pytest.mark.parametrize("case", BASE, ids=str)
def test_resume_is_exact(case):
    """Saved at step 0, 1 or 3 and loaded into a fresh model and optimizer, a run ends as the straight run does.

    Field report 27: the file loads with ``weights_only=True``.
    """
    model = case.model()
    straight = FairCastOptimizer(model, case.cls, **case.options)
    files, served = {}, {}
    for step in range(5):
        if step in (0, 1, 3):
            files[step] = saved(straight.state_dict())
            served[step] = {name: value.clone() for name, value in model.state_dict().items()}
        zoo.drive(case, straight, model, range(step, step + 1))
    for step, file in files.items():
        model = case.model().bfloat16()
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        model.load_state_dict(served[step])
        resumed = FairCastOptimizer(model, case.cls, **case.options)
        resumed.load_state_dict(file)
        zoo.drive(case, resumed, model, range(step, 5))
        assert_same_run(straight, resumed)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name):
    """Optimizers that can't be wrapped say so at construction, as a class and as an instance."""
    cls = next(cls for _, cls in zoo.discover() if cls.__name__ == name)
    model = nn.Linear(4, 4)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=REFUSED[name]):
        FairCastOptimizer(model, cls)
    inner = torch.optim.SGD(model.parameters(), lr=0.1) if name == "Lookahead" else model.parameters()
    with pytest.raises(ValueError, match=REFUSED[name]):
        FairCastOptimizer(model, cls(inner))
    assert all(equal_bits(a, b) for a, b in zip(before, model.parameters())), "a refusal must leave the model alone"


def test_differentiable_is_refused():
    with pytest.raises(ValueError, match="differentiable=True"):
        FairCastOptimizer(nn.Linear(4, 4), torch.optim.SGD, lr=0.1, differentiable=True)


def test_muon_refuses_vectors():
    """torch.optim.Muon's own refusal of vectors reaches the caller, and the model stays as it was."""
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="2D"):
        FairCastOptimizer(model, torch.optim.Muon)
    assert model.weight.dtype is torch.float32


def test_sparse_adam_refuses_dense_gradients():
    """Field report 13: a refusal, never silently dense; nothing is changed by it."""
    model = nn.Linear(4, 4)
    opt = FairCastOptimizer(model, torch.optim.SparseAdam)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(1, 4).bfloat16()).sum().backward()
    with pytest.raises(RuntimeError, match="does not support dense gradients"):
        opt.step()
    assert all(equal_bits(a, b) for a, b in zip(before, model.parameters()))


def test_page_lists_what_is_found():
    """docs/optimizers.md has one line for each optimizer found, with the verdict of a run."""
    installed = [importlib.metadata.version(name).split("+")[0] for name in ("torch", "torch-optimizer")]
    said = zoo.versions_on_page()
    if said != "torch {} and torch-optimizer {}".format(*installed):
        pytest.skip(f"the page was made with {said}, installed are {installed}")
    assert zoo.table_on_page() == zoo.table(), "run python -m tests.optimizer.zoo"
