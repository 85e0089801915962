"""FSDP2 as people run it: real forward and backward passes, mixed precision, clipping, swapped parameters."""

import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fcoptim import FairCastOptimizer
from fcoptim.distributed import shards

from ..optimizer.helpers import assert_same
from . import setups

BF16, FP32 = torch.bfloat16, torch.float32
ADAM = {"lr": 1e-3, "weight_decay": 0.1, "seed": 5}


def trained(how, rounding="stochastic", dtype=BF16, mp=False, steps=4):
    made, opt = setups.built(how, rounding, dtype, mp=mp)
    losses = setups.train(made, opt, range(steps), BF16)
    return losses, setups.everything(opt), [str(p.dtype) for p in made.parameters()]


@pytest.mark.parametrize("rounding", ["stochastic", "error_feedback"])
def test_real_training_equals_one_process(rounding, ranks):
    """All ranks see one batch, so gradients are equal: losses, masters and served bits are those of one process."""
    expected = ranks(1, trained, "whole", rounding)[0]
    for result in ranks(2, trained, "fsdp", rounding):
        assert_same(result[:2], expected[:2])


@pytest.mark.parametrize("rounding", ["stochastic", "error_feedback"])
def test_mixed_precision_equals_bf16_storage(rounding, ranks):
    """FSDP2 casts fp32 shards to bf16 at each all-gather: the cast is exact, so the run is that of bf16 storage."""
    expected = ranks(2, trained, "fsdp", rounding)[0]
    for losses, state, dtypes in ranks(2, trained, "fsdp", rounding, FP32, True):
        assert set(dtypes) == {"torch.float32"}
        assert losses == expected[0]
        assert_same(state, expected[1])


def said():
    """The warnings of construction around fp32 and bf16 shards, and the storage chosen."""
    out = []
    for dtype in (FP32, BF16):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made, opt = setups.built("fsdp", "stochastic", dtype)
        on_grid = all(torch.equal(p.to_local(), p.to_local().bfloat16().to(dtype)) for p in made.parameters())
        out.append(
            ([str(w.message) for w in caught if "storage" in str(w.message)], repr(opt).split("(Adam")[1][:30], on_grid)
        )
    return out


def test_fp32_shards_choose_fp32_storage_and_say_so(ranks):
    first, second = ranks(2, said)
    assert len(first[0][0]) == 1 and "storage='float32' is used" in first[0][0][0]
    assert second[0][0] == []  # said once, by rank 0
    for (_, storage, on_grid), (others, bf16_storage, _) in (first, second):
        assert "storage=float32" in storage and on_grid
        assert others == [] and "storage=bfloat16" in bf16_storage


def refused():
    out = []
    for options in ({"storage": "float32"}, {"keep_fp32": "0.weight"}):
        with pytest.raises(ValueError, match=r"call model\.float\(\) before it is sharded") as caught:
            setups.built("fsdp", "stochastic", BF16, **options)
        out.append(str(caught.value))
    return out


def test_bf16_shards_cannot_hold_fp32(ranks):
    """Both ways of asking for fp32 are refused, with the option and the first such parameter named."""
    storage, keep = ranks(2, refused)[0]
    assert "'0.weight'" in storage and "storage='float32'" in storage
    assert "'0.weight'" in keep and "keep_fp32" in keep


def accumulated(how, dtype, mp):
    """256 micro-batches whose gradients are 1.0 once and 2**-10 then, and the gradient that comes of it."""
    weight = nn.Linear(4, 3, bias=False).to(dtype)
    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16)} if mp else {}
    if how == "fsdp":
        fully_shard(weight, **policy)
    opt = FairCastOptimizer(weight, torch.optim.SGD, lr=1.0)
    before = {name: setups.full(master) for name, master in opt.named_masters()}
    for number in range(256):
        weight(torch.full((1, 4), 1.0 if number == 0 else 2.0**-10, dtype=BF16)).sum().backward()
    dtypes = {str(p.grad.dtype) for p in weight.parameters()}
    opt.step()
    return dtypes, {name: before[name] - setups.full(master) for name, master in opt.named_masters()}


@pytest.mark.parametrize(("dtype", "mp"), [(BF16, False), (FP32, True)])
def test_gradients_accumulate_in_fp32(dtype, mp, ranks):
    """Field report 15, under FSDP2: the master sees 1.249, whatever the storage."""
    for dtypes, moved in ranks(2, accumulated, "fsdp", dtype, mp):
        assert dtypes == {"torch.float32"}
        for step in moved.values():
            assert step == pytest.approx(1 + 255 * 2.0**-10, abs=1e-6)


def reduced():
    """Gradients that differ by rank, reduced in fp32, with fp32 storage."""
    weight = nn.Linear(4, 3, bias=False)
    fully_shard(weight, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32))
    FairCastOptimizer(weight, torch.optim.SGD, lr=1.0)
    weight(torch.full((1, 4), 1.0 if dist.get_rank() == 0 else 2.0**-10)).sum().backward()
    return setups.full(weight.weight.grad)


def test_gradients_are_reduced_in_fp32(ranks):
    """A mean of 1 and 2**-10, which bf16 can't hold, reaches the optimizer whole."""
    for gradient in ranks(2, reduced):
        assert gradient.dtype is FP32
        assert torch.equal(gradient, torch.full((3, 4), (1 + 2.0**-10) / 2))


def clipped(how):
    made, opt = setups.built(how, "dither", optimizer=torch.optim.SGD, lr=1.0, weight_decay=0.0)
    before = {name: setups.full(master) for name, master in opt.named_masters()}
    for group in opt.param_groups:
        for name, param in zip(group["param_names"], group["params"]):
            param.grad = shards.placed_like(100 * setups.gradient(name, param.shape, 0).float(), param)
    norm = setups.full(nn.utils.clip_grad_norm_(made.parameters(), 1.0)).item()
    opt.step()
    moved = torch.stack([(before[name] - setups.full(master)).square().sum() for name, master in opt.named_masters()])
    return norm, moved.sum().sqrt().item()


def test_clipping_is_global(ranks):
    """Field report 11 under FSDP2: the norm is that of all shards, and the masters move by norm 1."""
    expected, _ = ranks(1, clipped, "whole")[0]
    for norm, moved in ranks(2, clipped, "fsdp"):
        assert norm == pytest.approx(expected, rel=1e-5)
        assert moved == pytest.approx(1.0, rel=1e-4)


def nonfinite(mode):
    made, opt = setups.built("fsdp", "stochastic", on_nonfinite=mode)
    before = setups.everything(opt)
    for group in opt.param_groups:
        for name, param in zip(group["param_names"], group["params"]):
            param.grad = shards.placed_like(setups.gradient(name, param.shape, 0), param)
    if dist.get_rank() == 1:
        made[0].weight.grad.to_local()[0, 0] = float("nan")
    try:
        opt.step()
    except FloatingPointError as error:
        return str(error)
    assert_same(setups.everything(opt), before)
    return opt.cast_stats().skipped_steps


def test_nonfinite_gradient_of_one_rank(ranks):
    """What one rank finds in its shard, all ranks act upon."""
    assert ranks(2, nonfinite, "skip") == [1, 1]
    for message in ranks(2, nonfinite, "raise"):
        assert "'0.weight'" in message and "not finite" in message


def streamed(dtype, mp):
    made, opt = setups.built("fsdp", "stochastic", dtype, mp=mp)
    setups.train(made, opt, range(2), BF16)
    local = opt.served_state_dict()
    assert all(isinstance(value, DTensor) and value.dtype is BF16 for value in local.values())
    alive, out = [], {}
    for name, value in opt.served_state_dict(full=True):
        assert not isinstance(value, DTensor) and value.dtype is BF16
        assert sum(ref() is not None for ref in alive) <= 1, "gathered tensors pile up"
        alive.append(weakref.ref(value))
        out[name] = value.clone()
        del value
    return out, {name: setups.full(value) for name, value in local.items()}


@pytest.mark.parametrize(("dtype", "mp"), [(BF16, False), (FP32, True)])
def test_served_state_dict_streams_full_tensors(dtype, mp, ranks):
    """For weight sync: bf16 whatever the storage, the same on all ranks, one at a time."""
    one, two = ranks(2, streamed, dtype, mp)
    expected = ranks(1, trained, "whole", "stochastic", BF16, False, 2)[0][1]
    for full, gathered in (one, two):
        assert_same(full, gathered)
        assert list(full) == [name.removeprefix("served ") for name in expected if name.startswith("served")]
        assert_same(full, {name: expected[f"served {name}"] for name in full})


def masters_shown(how, dtype, mp, steps):
    """Train, look at the masters, train on, look again; the same without looking."""
    width = 12 if "tp" in how else 13  # torch's tensor parallelism computes with even shards only
    made, opt = setups.built(how, "stochastic", dtype, mp=mp, width=width)
    other, unseen = setups.built(how, "stochastic", dtype, mp=mp, width=width)
    made[4].bias.requires_grad_(False)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    plain = setups.model(FP32, width=width)
    for first in range(0, 2 * steps or 1, steps or 1):
        for step in range(first, first + steps):
            setups.step_with_gradients(opt, range(step, step + 1))
            setups.step_with_gradients(unseen, range(step, step + 1))
        plain.load_state_dict({name: setups.full(value) for name, value in opt.master_state_dict().items()})
        with torch.no_grad():
            served = made(x.to(BF16)) if dtype is BF16 or mp else made(x)
            with opt.masters_as_weights():
                seen = made(x)
                assert all(param.dtype is FP32 for param in made.parameters())
            assert torch.allclose(setups.full(seen), plain(x), rtol=1e-5, atol=1e-6), (seen, plain(x))
            again = made(x.to(BF16)) if dtype is BF16 or mp else made(x)
        assert torch.equal(setups.full(again), setups.full(served))
        assert all(param.dtype is dtype for param in made.parameters())
    if how == "fsdp":
        losses = [
            setups.train(*pair, range(2), FP32 if dtype is FP32 and not mp else BF16)
            for pair in ((made, opt), (other, unseen))
        ]
        assert losses[0][0] == losses[1][0]
    return True


@pytest.mark.parametrize("steps", [0, 2], ids=["before any step", "between steps"])
@pytest.mark.parametrize(
    ("how", "world", "dtype", "mp"),
    [
        ("fsdp", 2, BF16, False),
        ("fsdp", 2, FP32, True),
        ("fsdp", 4, FP32, False),
        ("tp", 2, BF16, False),
        ("fsdp_tp", 4, BF16, False),
    ],
)
def test_masters_as_weights(how, world, dtype, mp, steps, ranks):
    """The fp32 model, computed by all ranks together, without mixed precision; then the served one as before."""
    assert all(ranks(world, masters_shown, how, dtype, mp, steps))


def swapped():
    """What accelerate does: build on the plain model, upcast, shard, put the new parameters into the groups."""
    made = setups.model(FP32)
    opt = FairCastOptimizer(made, torch.optim.AdamW, rounding="stochastic", **ADAM)
    opt.load_state_dict(opt.state_dict())  # its prepare() does that too
    names = {id(param): name for name, param in made.named_parameters()}
    order = [[names[id(param)] for param in group["params"]] for group in opt.param_groups]
    for group in opt.param_groups:
        group["params"] = [torch.empty(1) for _ in group["params"]]
    made.float()
    setups.shard(made, "fsdp", mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    new = dict(made.named_parameters())
    for group, inside in zip(opt.param_groups, order):
        group["params"] = [new[name] for name in inside]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = setups.train(made, opt, range(4), BF16)
    state = setups.everything(opt)
    assert all(isinstance(master, DTensor) and master.dtype is FP32 for _, master in opt.named_masters())
    return losses, state, [str(w.message)[:30] for w in caught if "storage" in str(w.message)]


def test_parameters_swapped_after_construction(ranks):
    """As accelerate does, upcast, sharded, swapped in the groups: the run is that of bf16 storage, and it is said."""
    expected = ranks(1, trained, "whole")[0]
    first, second = ranks(2, swapped)
    assert len(first[2]) == 1 and not second[2]
    for losses, state, _ in (first, second):
        assert losses == expected[0]
        assert_same(state, expected[1])


def written():
    made, opt = setups.built("fsdp", "error_feedback")
    setups.train(made, opt, range(2))
    before = setups.everything(opt)
    with torch.no_grad():
        made[0].weight.copy_(made[0].weight)
    opt._check_served(opt._flat())  # the same bits are forgiven
    with torch.no_grad():
        made[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"served weights of '0\.weight' were written"):
        setups.train(made, opt, range(2, 3))
    opt.recast_()
    assert_same(setups.everything(opt), before)
    with torch.no_grad():
        made[0].weight.mul_(2)
    opt.adopt_served_()
    masters = dict(opt.named_masters())
    assert torch.equal(setups.full(masters["0.weight"]), 2 * before["served 0.weight"].float())
    return True


def test_weights_written_from_outside(ranks):
    assert all(ranks(2, written))
