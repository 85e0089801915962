"""Every optimizer of torch.optim and four other libraries against the same training written by hand, bit for bit."""

import pytest
import pytorch_optimizer
import torch
import torch_optimizer
from torch import nn

from fcoptim import FairCastOptimizer

from . import zoo
from .helpers import assert_same_run, equal_bits, saved

pytestmark = pytest.mark.filterwarnings("ignore:This overload of:UserWarning")

INNER = "Wrap the inner optimizer instead"
GRAPH = "needs gradients with a graph"
REFUSED = {
    ("torch_optimizer", "Adahessian"): GRAPH,
    ("torch_optimizer", "Lookahead"): INNER,
    **{
        ("pytorch_optimizer", name): reason
        for reason, names in {
            INNER: "FriendlySAM GSAM LookSAM Lookahead Magma OrthoGrad PCGrad SAM SafeFP16Optimizer "
            "ScheduleFreeWrapper TRAC WSAM",
            GRAPH: "AdaHessian SophiaH",
            "takes a model": "LOMO AdaLOMO AdamMini",
            "keeps total_step beside its state": "StableSPAM",
            "keeps warmup beside its state": "SPAM",
            "keeps current_lr, lookahead_step, starting_lr beside its state": "Ranger21",
        }.items()
        for name in names.split()
    },
    ("torchao.optim", "CPUOffloadOptimizer"): "keeps copies of the weights",
}
BASE = [
    zoo.base_case(library, cls)
    for library, cls in zoo.discover()
    if (library, cls.__name__) not in {**REFUSED, **zoo.BROKEN}
]
# Flags are varied where the code behind them is torch's or as old as torch_optimizer; elsewhere a class runs as it is.
VARIED = ("torch.optim", "torch_optimizer")
ALL = [variant for case in BASE for variant in (zoo.variants(case) if case.library in VARIED else [case])]


def test_all_libraries_are_searched():
    found = zoo.discover()
    assert {library for library, _ in found} == set(zoo.LIBRARIES)
    names = {cls.__name__ for _, cls in found}
    assert len(found) >= 190
    assert {"AdamW", "LBFGS", "Muon", "SparseAdam", "Lamb", "Shampoo", "AdamW8bit", "AdamWScheduleFree"} <= names
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

    Field report 27: the file loads with ``weights_only=True``, unless the class keeps Python objects in its state.
    """
    model = case.model()
    straight = case.wrap(model)
    files, served = {}, {}
    for step in range(5):
        if step in (0, 1, 3):
            files[step] = saved(straight.state_dict(), weights_only=case.cls.__name__ not in zoo.PICKLED)
            served[step] = {name: value.clone() for name, value in model.state_dict().items()}
        zoo.drive(case, straight, model, range(step, step + 1))
    for step, file in files.items():
        model = case.model().bfloat16()
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        model.load_state_dict(served[step])
        resumed = case.wrap(model)
        resumed.load_state_dict(file)
        zoo.drive(case, resumed, model, range(step, 5))
        if case.cls.__name__ in zoo.PICKLED:  # objects in the state don't compare
            assert all(equal_bits(a, b) for (_, a), (_, b) in zip(straight.named_masters(), resumed.named_masters()))
        else:
            assert_same_run(straight, resumed)


@pytest.mark.parametrize("name", REFUSED, ids=".".join)
def test_refused_with_the_reason(name):
    """Optimizers that can't be wrapped say so at construction, and leave the model alone."""
    cls = next(cls for library, cls in zoo.discover() if (library, cls.__name__) == name)
    model = nn.Linear(4, 4)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=REFUSED[name]):
        FairCastOptimizer(model, cls, **zoo.OPTIONS.get(name, {}))
    assert all(equal_bits(a, b) for a, b in zip(before, model.parameters()))


@pytest.mark.parametrize("name", zoo.BROKEN, ids=".".join)
def test_what_is_not_tried_fails_by_itself(name):
    """Without fcoptim."""
    model = zoo.mlp(bias=False)
    cls = next(cls for library, cls in zoo.discover() if (library, cls.__name__) == name)
    options = zoo.BROKEN[name][0]

    def closure():
        loss = zoo.loss_on(model, 0)
        loss.backward()
        return loss

    with pytest.raises((RuntimeError, KeyError, ValueError)):
        cls([{"params": list(model.parameters()), "use_muon": True}], **options).step(closure)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda params: torch_optimizer.Adahessian(params), GRAPH),
        (lambda params: torch_optimizer.Lookahead(torch.optim.SGD(params, lr=0.1)), INNER),
        (lambda params: pytorch_optimizer.SAM(params, torch.optim.SGD, lr=0.1), INNER),
        (lambda params: pytorch_optimizer.StableSPAM(params), "keeps total_step beside its state"),
    ],
)
@pytest.mark.parametrize("how", ["instance", "callable"])
def test_refused_however_it_is_built(build, reason, how):
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=reason):
        FairCastOptimizer(model, build(model.parameters()) if how == "instance" else build)
    assert model.weight.dtype is torch.float32


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
    said = zoo.versions_on_page()
    if said != zoo.versions():
        pytest.skip(f"the page was made with {said}, installed are {zoo.versions()}")
    assert zoo.table_on_page() == zoo.table(), "run python -m tests.optimizer.zoo"
