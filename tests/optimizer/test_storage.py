"""float32 storage: the same served values in fp32 parameters, so that every later cast is exact."""

import pytest
import torch

from fcoptim import FairCastOptimizer

from .helpers import ADAM, assert_same, batch, equal_bits, mlp, pair, saved, weights


def feed(opt: FairCastOptimizer, steps: range) -> None:
    """Step with gradients that do not depend on the weights' dtype."""
    for step in steps:
        for number, param in enumerate(p for group in opt.param_groups for p in group["params"]):
            param.grad = batch(100 * step + number, *param.shape)
        opt.step()


def test_both_storages_serve_the_same_values(rounding):
    """Equal gradients give equal masters and equal served values, whichever dtype holds them."""
    runs = {storage: pair(rounding, storage=storage) for storage in ("bfloat16", "float32")}
    for _, opt in runs.values():
        feed(opt, range(5))
    (narrow, a), (wide, b) = runs["bfloat16"], runs["float32"]
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    for (name, left), (_, right) in zip(narrow.named_parameters(), wide.named_parameters()):
        assert equal_bits(left, right.bfloat16()) and equal_bits(left.float(), right), name
    assert_same(dict(a.named_masters()), dict(b.named_masters()))
    assert_same(a.served_state_dict(), {k: v.detach() for k, v in b.served_state_dict().items()})
    assert a.cast_stats() == b.cast_stats()


@pytest.mark.parametrize("after", [0, 4])
def test_state_moves_between_storages(rounding, after):
    """A state saved under one storage goes on under the other, bit for bit."""
    _, one = pair(rounding, storage="bfloat16")
    feed(one, range(after))
    other_model, other = pair(rounding, storage="float32")
    other.load_state_dict(saved(one.state_dict()))
    other_model.load_state_dict(one.served_state_dict())
    feed(one, range(after, after + 3))
    feed(other, range(after, after + 3))
    assert_same(dict(one.named_masters()), dict(other.named_masters()))
    for left, right in zip(one.served_model.parameters(), other.served_model.parameters()):
        assert equal_bits(left.detach(), right.detach().bfloat16())


def test_autocast_over_fp32_storage_is_exact(rounding):
    """Trap 17: autocast's own round-to-nearest finds values on the bf16 grid, so it changes none of them."""
    narrow, a = pair(rounding)
    wide, b = pair(rounding, storage="float32")
    feed(a, range(3))
    feed(b, range(3))
    x = batch(7, 16, 8)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = wide(x)
    assert equal_bits(under_autocast.detach(), narrow(x.bfloat16()).detach())
    assert equal_bits(wide[0].weight.detach().bfloat16().float(), wide[0].weight.detach())


def test_autocast_that_stays_open_sees_new_weights(rounding):
    """Trap 15: autocast keeps bf16 copies of fp32 weights while it is open; a step makes them stale."""
    model, opt = pair(rounding, storage="float32", optimizer=torch.optim.SGD, lr=1.0)
    x = batch(7, 16, 8)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().sum()
        loss.backward()
        opt.step()
        inside = model(x).detach()
    with torch.autocast("cpu", torch.bfloat16):
        outside = model(x).detach()
    assert equal_bits(inside, outside)


def test_frozen_parameters_are_rounded_once(storage):
    """What is not trained is served rounded to nearest in the storage's dtype, and never written again."""
    model = mlp()
    model[0].requires_grad_(False)
    frozen = model[0].weight.detach().clone()
    opt = FairCastOptimizer(model, torch.optim.AdamW, storage=storage, **ADAM)
    feed(opt, range(3))
    assert equal_bits(model[0].weight.detach().bfloat16(), frozen.bfloat16())
    assert model[0].weight.dtype is getattr(torch, storage)
    assert opt.served_state_dict()["0.weight"].dtype is torch.bfloat16


def test_masters_as_weights(rounding, storage):
    """Inside the with block the model is the fp32 one; afterwards, also after an error, the served one is back."""
    model, opt = pair(rounding, storage=storage)
    feed(opt, range(2))
    before = weights(opt)
    twin = mlp()
    twin.load_state_dict(opt.master_state_dict())
    x = batch(3, 16, 8)
    with opt.masters_as_weights():
        assert equal_bits(model(x).detach(), twin(x).detach())
        with pytest.raises(RuntimeError, match="masters_as_weights"):
            opt.step()
    assert_same(before, weights(opt))
    with pytest.raises(ZeroDivisionError), opt.masters_as_weights():
        raise ZeroDivisionError
    assert_same(before, weights(opt))
    feed(opt, range(2, 4))


def test_outside_writes_are_noticed(rounding, storage):
    """New weights written into the model stop the next step; adopt and recast each resolve it as they say."""
    model, opt = pair(rounding, storage=storage)
    feed(opt, range(2))
    served = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight.clone())  # the same bits: forgiven
    feed(opt, range(2, 3))
    served = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        model[0].weight.add_(0.5)
    with pytest.raises(RuntimeError, match=r"adopt_served_.*recast_"):
        feed(opt, range(3, 4))
    opt.recast_()
    assert all(equal_bits(a.detach(), b) for a, b in zip(model.parameters(), served))
    feed(opt, range(3, 4))
    new = torch.full_like(model[0].weight, 0.3).bfloat16()
    model.load_state_dict({**model.state_dict(), "0.weight": new})
    opt.adopt_served_()
    assert equal_bits(dict(opt.named_masters())["0.weight"], new.float())
    assert equal_bits(model[0].weight.detach().bfloat16(), new)
    feed(opt, range(4, 5))
