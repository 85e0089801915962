"""Schedule-free optimizers, which have two modes and look for gradients elsewhere, and quantised state."""

import pytest
import schedulefree
import torch
import torchao.optim
from torch import nn

from fcoptim import CheckpointError, FairCastOptimizer, save_checkpoint

from . import zoo
from .helpers import equal_bits, loss_on, mlp, saved


@pytest.mark.parametrize("cls", [schedulefree.AdamWScheduleFree, schedulefree.SGDScheduleFree])
def test_eval_mode_serves_the_average(cls):
    """``opt.eval()`` and ``opt.train()`` move the masters as the plain optimizer moves its weights; served follows."""
    case = zoo.base_case("schedulefree", cls)
    opt, by_hand = case.wrap(case.model(), rounding="nearest"), zoo.ByHand(case, case.model())
    for step in range(4):
        zoo.drive(case, opt, opt.served_model, range(step, step + 1))
        by_hand.step(step)
    trained = [param.clone() for param in opt.served_model.parameters()]
    for mode in ("eval", "train"):
        getattr(opt, mode)()
        getattr(by_hand.optimizer, mode)()
        by_hand.copy_back()
        pairs = zip(opt.named_masters(), by_hand.masters, opt.served_model.parameters(), by_hand.model.parameters())
        for (_, master), theirs, served, expected in pairs:
            assert equal_bits(master, theirs) and equal_bits(served, expected)
        if mode == "eval":
            now = list(opt.served_model.parameters())
            assert any(not torch.equal(before, after) for before, after in zip(trained, now))
    zoo.drive(case, opt, opt.served_model, range(4, 5))


@pytest.mark.parametrize("mode", ["skip", "raise"])
def test_gradient_that_came_after_the_masters_moved_cannot_be_left_out(mode):
    """An optimizer that moves the masters before it asks for gradients: said, where "skip" would lose the place."""
    model = mlp()
    opt = FairCastOptimizer(model, schedulefree.SGDScheduleFreeClosure, lr=0.1, on_nonfinite=mode)

    def closure(factor):
        opt.zero_grad()
        loss = loss_on(model, 0) * factor
        loss.backward()
        return loss

    for _ in range(3):
        opt.step(lambda: closure(1.0))
    with pytest.raises(RuntimeError, match="moved the masters before it asked for them"):
        opt.step(lambda: closure(float("inf")))


def test_state_by_parameter_outside_the_state_is_refused():
    class Hiding(torch.optim.SGD):
        def __init__(self, params, lr=0.1):
            super().__init__(params, lr=lr)
            self.velocity = {p: torch.zeros_like(p) for p in self.param_groups[0]["params"]}

    with pytest.raises(ValueError, match="keeps velocity by parameter outside its state"):
        FairCastOptimizer(nn.Linear(2, 2), Hiding)


def test_quantised_state_resumes_and_is_refused_by_name_in_a_checkpoint(tmp_path):
    """torch.save keeps torchao's tensors, from 4,096 elements on; save_checkpoint, without pickle, can't."""

    def build():
        torch.manual_seed(0)
        return FairCastOptimizer(nn.Linear(64, 64), torchao.optim.AdamW8bit, lr=1e-2)

    def train(opt, steps):
        for step in steps:
            torch.manual_seed(step)
            opt.served_model(torch.randn(4, 64).bfloat16()).float().square().mean().backward()
            opt.step()
            opt.zero_grad()

    straight, resumed = build(), build()
    train(straight, range(2))
    assert type(straight.state_dict()["state"][0]["exp_avg"]) is not torch.Tensor
    with pytest.raises(CheckpointError, match=r"weight\.exp_avg \(a tensor of type OptimState8bit\)"):
        save_checkpoint(tmp_path / "at2", straight)
    assert not any(tmp_path.iterdir())
    resumed.served_model.load_state_dict(straight.served_model.state_dict())
    resumed.load_state_dict(saved(straight.state_dict()))
    for opt in (straight, resumed):
        train(opt, range(2, 4))
    assert all(equal_bits(a, b) for (_, a), (_, b) in zip(straight.named_masters(), resumed.named_masters()))
