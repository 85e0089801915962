"""Groups that are added later, copies that keep their link, and a global random state that nobody touches."""

import copy
import pickle

import pytest
import torch
from torch import nn

from fcoptim import Exporter, FairCastOptimizer

from .helpers import ADAM, UNBIASED, assert_same, assert_same_run, equal_bits, loss_on, mlp, pair, saved, train, weights


class Grown(nn.Module):
    """An ``mlp`` that has one more layer beside it, trained from some later step on."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        torch.manual_seed(9)
        self.late = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.late(self.body(x))


def grown(rounding: str) -> tuple[Grown, FairCastOptimizer]:
    """A model whose optimizer knows only the first part of it."""
    model = Grown()
    return model, FairCastOptimizer(model.body.named_parameters(), torch.optim.AdamW, rounding=rounding, **ADAM)


@pytest.mark.parametrize("when", ["before the first step", "after 3 steps", "right after a load"])
def test_groups_added_later(rounding, when):
    """Field report 10: a group that is added has masters, is cast, stepped and saved, whenever it is added."""
    model, opt = grown(rounding)
    model.late.to(torch.bfloat16)
    if when != "before the first step":
        train(opt, model, range(3))
    if when == "right after a load":
        opt.load_state_dict(saved(opt.state_dict()))
    before = model.late.weight.detach().clone()
    opt.add_param_group({"params": list(model.late.named_parameters()), "lr": 1e-2, "weight_decay": 0.0})
    masters = dict(opt.named_masters())
    added = [name for name in masters if not name[0].isdigit()]
    assert len(masters) == 6 and len(added) == 2
    assert equal_bits(masters[added[0]], before.float())
    assert equal_bits(model.late.weight, before), "what lies on the bf16 grid stays where it is"
    train(opt, model, range(3, 6))
    assert opt.param_groups[1]["lr"] == opt.wrapped.param_groups[1]["lr"] == 1e-2
    for param in model.late.parameters():
        entry = opt.state[param]
        assert int(entry["cast_count"]) == 3 and int(entry["step"]) == 3
        assert ("error_feedback" in entry) == (rounding == "error_feedback")
    assert not equal_bits(dict(opt.named_masters())[added[0]], before.float())
    other_model, other = grown(rounding)
    other_model.late.to(torch.bfloat16)
    other.add_param_group({"params": list(other_model.late.named_parameters())})
    other.load_state_dict(saved(opt.state_dict()))
    assert_same_run(opt, other)


def test_a_group_of_the_model_gets_its_names():
    """A frozen layer that is thawed is called by its name in the model, so its hash does not depend on the order."""
    model = Grown().requires_grad_(False)
    model.body.requires_grad_(True)
    opt = FairCastOptimizer(model, torch.optim.SGD, lr=0.1)
    model.late.requires_grad_(True)
    opt.add_param_group({"params": list(model.late.parameters()), "rounding": "dither", "seed": 5})
    assert opt.param_groups[1]["param_names"] == ["late.weight", "late.bias"]
    assert opt.param_groups[1]["rounding"] == "dither" and opt.param_groups[1]["seed"] == 5


def test_duplicates_are_refused(rounding):
    """Field report 10: a parameter that is trained already is refused, and nothing is changed by the attempt."""
    model, opt = pair(rounding)
    train(opt, model, range(2))
    before = weights(opt)
    with pytest.raises(ValueError, match=r"already|more than one|duplicate"):
        opt.add_param_group({"params": [model[0].weight]})
    assert len(opt.param_groups) == len(opt.wrapped.param_groups) == 1
    assert_same(before, weights(opt))
    train(opt, model, range(2, 4))


WAYS = {"pickle": lambda value: pickle.loads(pickle.dumps(value)), "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("steps", [0, 3])
def test_copies_move_the_copied_model_only(rounding, storage, way, steps):
    """Field report 16: a copy of (model, optimizer) is a pair of its own that goes on exactly as the original does."""
    model, opt = pair(rounding, storage=storage)
    train(opt, model, range(steps))
    other_model, other = WAYS[way]((model, opt))
    assert other.served_model is other_model
    before = weights(opt)
    train(other, other_model, range(steps, steps + 3))
    assert_same(before, weights(opt), "the original")
    train(opt, model, range(steps, steps + 3))
    assert_same_run(opt, other)
    assert all(a is not b for a, b in zip(model.parameters(), other_model.parameters()))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("steps", [0, 3])
def test_copies_of_the_optimizer_alone(rounding, way, steps):
    """Field report 16: a copied optimizer brings its own copy of the model, found as ``served_model``."""
    model, opt = pair(rounding)
    train(opt, model, range(steps))
    other = WAYS[way](opt)
    before = weights(opt)
    train(other, other.served_model, range(steps, steps + 2))
    assert_same(before, weights(opt), "the original")
    train(opt, model, range(steps, steps + 2))
    assert_same_run(opt, other)


def test_copies_accumulate_in_fp32():
    """Field reports 15 and 16: a copied parameter widens its gradient as the first one does."""
    _, opt = pair()
    other = copy.deepcopy(opt)
    for _ in range(2):
        loss_on(other.served_model, 0).backward()
    assert {p.grad.dtype for p in other.served_model.parameters()} == {torch.float32}


def test_the_global_random_state_is_not_touched(rounding):
    """Field report 28: building, stepping, saving and loading draw nothing from torch's generator."""
    model, x = mlp(), torch.ones(4, 8)
    state = torch.get_rng_state()
    opt = FairCastOptimizer(model, torch.optim.AdamW, rounding=rounding, seed=3, **ADAM)
    for _ in range(3):
        model(x.bfloat16()).square().sum().backward()
        opt.step()
        opt.zero_grad()
    opt.load_state_dict(saved(opt.state_dict()))
    opt.cast_stats()
    Exporter(rounding)(opt.master_state_dict())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("rounding", UNBIASED)
def test_the_global_seed_decides_nothing(rounding):
    """Field report 28's other half: equal seeds of ours give equal bits under different global seeds."""
    runs = []
    for seed in (1, 2):
        model, opt = pair(rounding)
        torch.manual_seed(seed)
        train(opt, model, range(3))
        runs.append(weights(opt))
    assert_same(*runs)
