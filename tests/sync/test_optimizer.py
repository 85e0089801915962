"""Through a FairCastOptimizer: every rule, both storages, and what happens to an optimizer while it trains."""

import copy

import pytest
import torch
from torch import nn

from fcoptim import FairCastOptimizer
from fcoptim.cast import RULES
from fcoptim.sync import Receiver, Sender, to_patches

from ..optimizer.helpers import train
from .helpers import BF16, assert_equal, bits


def tied(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 8, bias=False), nn.Linear(8, 4))
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize("rounding", RULES)
@pytest.mark.parametrize("storage", ["bfloat16", "float32"])
@pytest.mark.parametrize("encoding", ["int32", "zlib"])
def test_a_rollout_engine_follows(rounding, storage, encoding, tmp_path):
    model = tied()
    opt = FairCastOptimizer(
        model, torch.optim.AdamW, lr=1e-4, rounding=rounding, storage=storage, keep_fp32=("1.*",), seed=3
    )
    sender = Sender(opt, anchor_every=4, encoding=encoding)
    engine = tied(9).to(BF16)
    engine[1].float()
    follower, late = Receiver(engine), {}
    for step in range(9):
        train(opt, model, range(step, step + 1))
        sender.publish(tmp_path)
        follower.catch_up(tmp_path)
        assert_equal(engine.state_dict(), opt.served_state_dict())
        follower.verify()
    assert engine[2].weight is engine[0].weight
    Receiver(late).catch_up(tmp_path)
    assert_equal(late, opt.served_state_dict())
    assert sender.snapshot_bytes == 2 * (64 + 32 + 4), "what is kept in fp32 has no copy"


def test_changes_are_those_the_cast_counted():
    """Published after every step, a delta holds as many values as ``cast_stats`` says have changed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    opt = FairCastOptimizer(model, torch.optim.AdamW, lr=1e-4)
    sender = Sender(opt, dense=False)
    sender.publish()
    for step in range(5):
        train(opt, model, range(step, step + 1))
        stats = opt.cast_stats()
        assert sender.publish().delta.changed == round(stats.changed * stats.elements) > 0


def test_untouched_parameters_are_not_read(monkeypatch):
    from fcoptim.sync import difference

    model = tied()
    opt = FairCastOptimizer(model, torch.optim.SGD, lr=0.1)
    sender = Sender(opt)
    sender.publish()
    model[3].weight.grad = torch.ones_like(model[3].weight)
    opt.step()
    compared = []
    found = difference._changes
    monkeypatch.setattr(difference, "_changes", lambda row, old: compared.append(row.numel()) or found(row, old))
    assert [one.name for one in sender.publish().delta.tensors] == ["3.weight"]
    assert compared == [32]


def test_frozen_weights_cost_nothing():
    """An adapter on a frozen base: no copy of the base, and no bytes for it after the anchor."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    model[0].requires_grad_(False)
    opt = FairCastOptimizer(model, torch.optim.AdamW, lr=1e-3)
    sender = Sender(opt)
    sender.publish()
    assert sender.snapshot_bytes == 2 * (64 * 4 + 4)
    model(torch.ones(2, 64, dtype=BF16)).sum().backward()
    opt.step()
    assert {one.name for one in sender.publish().delta.tensors} <= {"2.weight", "2.bias"}


def test_unfreezing_later():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    opt = FairCastOptimizer(model, torch.optim.AdamW, lr=1e-3)
    sender, held = Sender(opt), {}
    follower = Receiver(held)
    for step in range(6):
        if step == 2:
            model[0].requires_grad_(True)
            opt.add_param_group({"params": list(model[0].parameters())})
        train(opt, model, range(step, step + 1), lambda model, _: model(torch.ones(2, 8, dtype=BF16)).sum())
        publication = sender.publish()
        follower.apply(publication)
        assert_equal(held, opt.served_state_dict())
    assert sender.snapshot_bytes == 2 * sum(p.numel() for p in model.parameters())


def test_new_modules():
    """Parameters that come into the model later: the next version is an anchor, and receivers have to have them."""
    model = tied()
    opt = FairCastOptimizer(model, torch.optim.AdamW, lr=1e-3)
    sender, held = Sender(opt, anchor_every=None), {}
    follower = Receiver(held)
    follower.apply(sender.publish())
    model.append(nn.Linear(4, 4))
    opt.add_param_group({"params": list(model[4].parameters())})
    publication = sender.publish()
    assert publication.delta is None
    follower.apply(publication)
    train(opt, model, range(3))
    follower.apply(sender.publish())
    assert_equal(held, opt.served_state_dict())


def test_weights_written_by_load_recast_and_adopt():
    model = tied()
    opt = FairCastOptimizer(model, torch.optim.AdamW, lr=1e-3, rounding="error_feedback")
    saved = copy.deepcopy(opt.state_dict())
    sender, held = Sender(opt), {}
    follower = Receiver(held)

    def follow():
        follower.apply(sender.publish())
        assert_equal(held, opt.served_state_dict())

    follow()
    train(opt, model, range(2))
    follow()
    opt.load_state_dict(saved)
    follow()
    with torch.no_grad():
        model[0].weight.add_(1)
    follow()
    opt.recast_()
    follow()
    with torch.no_grad():
        model[0].weight.mul_(2)
    opt.adopt_served_()
    follow()


def test_parameters_instead_of_a_model():
    model = tied()
    opt = FairCastOptimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-3)
    sender, held = Sender(opt), {}
    Receiver(held).apply(sender.publish())
    assert_equal(held, opt.served_state_dict())


def test_inside_a_framework_s_wrapper():
    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer = optimizer

    opt = FairCastOptimizer(tied(), torch.optim.AdamW, lr=1e-3)
    held = {}
    Receiver(held).apply(Sender(Wrapper(opt)).publish())
    assert_equal(held, opt.served_state_dict())


def test_not_while_masters_are_shown():
    opt = FairCastOptimizer(tied(), torch.optim.AdamW, lr=1e-3)
    sender = Sender(opt)
    with opt.masters_as_weights(), pytest.raises(RuntimeError, match="inside masters_as_weights"):
        sender.publish()
    assert sender.publish().version == 0


def test_publishing_changes_nothing():
    model = tied()
    opt = FairCastOptimizer(model, torch.optim.AdamW, lr=1e-3)
    train(opt, model, range(2))
    before = {name: bits(p).clone() for name, p in model.named_parameters()}
    versions = [p._version for p in model.parameters()]
    state = torch.get_rng_state()
    sender = Sender(opt)
    for _ in range(2):
        to_patches(sender.publish().update)
    assert all(torch.equal(bits(p), before[name]) for name, p in model.named_parameters())
    assert versions == [p._version for p in model.parameters()] and torch.equal(state, torch.get_rng_state())
