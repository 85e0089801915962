"""One step: gradients in fp32, casts that track the masters, and nothing that moves without a gradient."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from fcoptim import FairCastOptimizer

from . import zoo
from .helpers import (
    RULES,
    UNBIASED,
    assert_same,
    assert_same_run,
    batch,
    equal_bits,
    mlp,
    pair,
    train,
    weights,
)

pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.filterwarnings("ignore:Sparse invariant checks")]

MANY = 65_536


class Weight(nn.Module):
    """One parameter, ``weight``."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)


def ulp(values: torch.Tensor) -> torch.Tensor:
    """The spacing of the bf16 grid at normal fp32 values."""
    return torch.ldexp(torch.ones_like(values), torch.frexp(values).exponent - 8)


def within_one_ulp(served: torch.Tensor, master: torch.Tensor) -> bool:
    return bool(((served.float() - master).abs() < ulp(master)).all())


def test_weight_decay_in_small_steps(rounding):
    """Field report 2: 1000 steps of AdamW's decay alone take 1.0 to 0.9048; the served mean is there too."""
    model = Weight(torch.ones(MANY))
    opt = FairCastOptimizer(model, torch.optim.AdamW, lr=1e-3, weight_decay=0.1, rounding=rounding)
    model.weight.grad = torch.zeros_like(model.weight)
    for _ in range(1000):
        opt.step()
    master = next(opt.named_masters())[1]
    assert (master - 0.9048).abs().max() < 1e-4
    grid = 2.0**-8  # one ulp below 1
    error = float(model.weight.detach().double().mean() - master.double().mean())
    up = float(torch.remainder(master[0].double(), grid)) / grid
    assert 0.05 < up < 0.95
    sigma = grid * math.sqrt(up * (1 - up) / MANY)
    assert abs(error) < (grid / 2 if rounding == "nearest" else 5 * sigma)


def test_a_quarter_ulp_is_served_as_a_quarter(rounding):
    """Field report 3: masters a quarter ulp above the grid: a quarter is rounded up, at each cast of another set."""
    model = Weight(torch.full((MANY,), 1 + 2.0**-9))
    opt = FairCastOptimizer(model, torch.optim.SGD, lr=1.0, rounding=rounding)
    model.weight.grad = torch.zeros_like(model.weight)
    ups = []
    for _ in range(3):
        values = model.weight.detach().float()
        assert set(values.unique().tolist()) <= {1.0, 1 + 2.0**-7}
        ups.append(values > 1)
        opt.step()
    sigma = math.sqrt(0.25 * 0.75 / MANY)
    for up in ups:
        share = float(up.double().mean())
        assert share == 0 if rounding == "nearest" else abs(share - 0.25) < 5 * sigma
    both = float((ups[0] & ups[1]).double().mean())
    if rounding == "stochastic":
        assert abs(both - 1 / 16) < 5 * math.sqrt(1 / 16 * 15 / 16 / MANY)
    elif rounding == "dither":
        assert torch.equal(ups[0], ups[1])
    elif rounding == "error_feedback":
        assert both == 0.0
    assert len({tuple(up[:4096].tolist()) for up in ups}) == (3 if rounding in ("stochastic", "error_feedback") else 1)


def test_served_is_the_cast_of_the_masters(rounding, storage):
    """After each step every served weight is one of its master's two neighbours on the grid, and on the grid."""
    model, opt = pair(rounding, storage=storage)
    for step in range(5):
        train(opt, model, range(step, step + 1))
        for (name, master), param in zip(opt.named_masters(), model.parameters()):
            assert equal_bits(param.detach().bfloat16().float(), param.detach().float()), name
            assert within_one_ulp(param.detach(), master), name
            if rounding == "nearest":
                assert equal_bits(param.detach().bfloat16(), master.bfloat16()), name


@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_reaches_the_masters(rounding, storage, foreach):
    """Field report 11, trap 14: a gradient of norm 100, clipped to 1, moves the masters by norm 1."""
    model, opt = pair(rounding, storage=storage, optimizer=torch.optim.SGD, lr=1.0)
    count = sum(p.numel() for p in model.parameters())
    sum((p.float() * 100 / math.sqrt(count)).sum() for p in model.parameters()).backward()
    before = {name: master.clone() for name, master in opt.named_masters()}
    norm = clip_grad_norm_(opt.served_model.parameters(), 1.0, foreach=foreach)
    assert abs(float(norm) - 100) < 0.5
    opt.step()
    moved = sum(float((master - before[name]).double().square().sum()) for name, master in opt.named_masters())
    assert abs(math.sqrt(moved) - 1) < 1e-5


def test_clipping_by_value(rounding):
    """Field report 11: its whole kind; clipping by value too."""
    model, opt = pair(rounding, optimizer=torch.optim.SGD, lr=1.0)
    sum(3 * p.float().sum() for p in model.parameters()).backward()
    before = {name: master.clone() for name, master in opt.named_masters()}
    clip_grad_value_(model.parameters(), 0.5)
    opt.step()
    for name, master in opt.named_masters():
        assert equal_bits(master, before[name] - 0.5)


def test_frozen_for_a_while(rounding):
    """Field report 12: without a gradient neither decay nor momentum moves a weight, and no old gradient comes back."""
    model, opt = pair(rounding, optimizer=torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    twin_model, twin = pair(rounding, optimizer=torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    train(opt, model, range(3))
    train(twin, twin_model, range(3))
    first = {name: value for name, value in weights(opt).items() if "0." in name}
    entries = [dict(opt.state[p]) for p in model[0].parameters()]
    counts = [int(entry["cast_count"]) for entry in entries]
    model[0].requires_grad_(False)
    for step in range(10):
        opt.zero_grad()
        (model[2](batch(step, 4, 16).bfloat16()).float().square().sum()).backward()
        opt.step()
        assert_same(first, {name: value for name, value in weights(opt).items() if "0." in name})
        assert all(opt.state[p]["master"].grad is None for p in model.parameters())
    for entry, count, param in zip(entries, counts, model[0].parameters()):
        assert int(opt.state[param]["cast_count"]) == count == 3
        assert equal_bits(opt.state[param]["momentum_buffer"], entry["momentum_buffer"])
    assert int(opt.state[model[2].weight]["cast_count"]) == 13
    model[0].requires_grad_(True)
    # Back again, layer 0 goes on from where it was: like a twin that was never frozen and sees the same gradient.
    for each, each_model in ((opt, model), (twin, twin_model)):
        each.zero_grad()
        for param in each_model[0].parameters():
            param.grad = torch.ones_like(param)
        each.step()
    for param, other in zip(model[0].parameters(), twin_model[0].parameters()):
        assert equal_bits(opt.state[param]["master"], twin.state[other]["master"])
        assert equal_bits(param.detach(), other.detach())


def test_no_gradient_changes_nothing(rounding):
    """Without any gradient not even a count or a version moves."""
    model, opt = pair(rounding)
    for steps in (0, 2):
        train(opt, model, range(steps))
        opt.zero_grad()
        before, state = weights(opt), {k: dict(v) for k, v in opt.state_dict()["state"].items()}
        versions = [p._version for p in model.parameters()]
        opt.step()
        assert_same(before, weights(opt))
        assert_same(state, opt.state_dict()["state"])
        assert versions == [p._version for p in model.parameters()]
    assert len(opt.state) == 4


def test_a_learning_rate_of_zero_casts_nothing(rounding):
    """Trap 3: a step with every lr at 0 makes the wrapped optimizer's state, and no cast."""
    model, opt = pair(rounding, lr=0.0)
    before = weights(opt)
    versions = [p._version for p in model.parameters()]
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    opt.step(closure=None)
    assert_same(before, weights(opt))
    assert versions == [p._version for p in model.parameters()]
    for entry in opt.state.values():
        assert int(entry["cast_count"]) == 0 and {"exp_avg", "exp_avg_sq", "step"} <= set(entry)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"weight_decay": 0.1}], ids=str)
def test_sparse_sgd_equals_the_loop_by_hand(options):
    """Field report 13: repeated rows, and a batch that touches the padding row alone."""
    case = zoo.Case("torch.optim", torch.optim.SGD, {"lr": 0.1, **options}, "sparse gradients")
    if "weight_decay" in options:
        model = case.model()
        opt = FairCastOptimizer(model, case.cls, **case.options)
        before = weights(opt)
        with pytest.raises(RuntimeError, match=r"."):  # torch's own refusal of decay on sparse gradients
            zoo.drive(case, opt, model, range(1))
        assert_same(before, weights(opt))
    else:
        zoo.matches_by_hand(case)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad])
def test_sparse_gradients_stay_sparse(rounding, storage, optimizer):
    """Field report 13: the master's gradient is sparse, and rows that no batch touched keep their master's bits."""
    case = zoo.Case("torch.optim", optimizer, {"lr": 0.1}, "sparse gradients")
    model = case.model()
    opt = FairCastOptimizer(model, optimizer, lr=0.1, rounding=rounding, storage=storage)
    start = next(opt.named_masters())[1].clone()
    seen = []
    opt.wrapped.register_step_pre_hook(
        lambda wrapped, args, kwargs: seen.extend(p.grad.is_sparse for g in wrapped.param_groups for p in g["params"])
    )
    zoo.drive(case, opt, model, range(3))  # rows 1, 2, 3 and 7; the padding row 0
    assert seen == [True] * 3
    master = next(opt.named_masters())[1]
    untouched = [0, 4, 5, 6, 8, 9]
    assert equal_bits(master[untouched], start[untouched])
    assert not (master[[1, 2, 3, 7]] == start[[1, 2, 3, 7]]).any()


def test_sparse_micro_batches_add_up(storage):
    """Field report 13, 15: sparse micro-gradients accumulate in fp32 as well."""
    model = nn.Embedding(4, 2, sparse=True)
    opt = FairCastOptimizer(model, torch.optim.SGD, lr=1.0, storage=storage)
    start = next(opt.named_masters())[1].clone()
    for micro in range(256):
        (model(torch.tensor([1, 3])).float() * (1.0 if micro == 0 else 2.0**-10)).sum().backward()
    opt.step()
    moved = start - next(opt.named_masters())[1]
    assert torch.allclose(moved[[1, 3]], torch.tensor(1 + 255 / 1024), atol=1e-6)
    assert not moved[[0, 2]].any()


class Tied(nn.Module):
    """An embedding whose matrix is the output head's too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.emb(rows))


@pytest.mark.parametrize("given", ["model", "listed twice", "two groups"])
def test_tied_weights(rounding, storage, given):
    """Field report 14: one master, one update for each step, and the weights stay tied."""
    model, options = Tied(), {"lr": 0.5, "rounding": rounding, "storage": storage}
    twice = list(model.named_parameters(remove_duplicate=False))
    assert len(twice) == 2
    if given == "two groups":
        groups = [{"params": [twice[0][1]]}, {"params": [twice[1][1]]}]
        with pytest.raises(ValueError, match="more than one parameter group"):
            FairCastOptimizer(groups, torch.optim.SGD, **options)
        return
    opt = FairCastOptimizer(model if given == "model" else twice, torch.optim.SGD, **options)
    assert model.head.weight is model.emb.weight
    assert [name for name, _ in opt.named_masters()] == ["emb.weight"]
    start = next(opt.named_masters())[1].clone()
    model(torch.tensor([1, 2])).float().square().sum().backward()
    grad = model.emb.weight.grad.float().clone()
    opt.step()
    assert equal_bits(next(opt.named_masters())[1], start - 0.5 * grad)
    assert model.head.weight is model.emb.weight
    assert int(opt.state[model.emb.weight]["cast_count"]) == 1
    if given == "model":
        served = opt.served_state_dict()
        assert served["head.weight"].data_ptr() == served["emb.weight"].data_ptr()
        assert set(opt.master_state_dict()) == {"emb.weight", "head.weight"}


@pytest.mark.parametrize("first", ["none", "zeros"])
def test_micro_batches_add_up_in_fp32(rounding, storage, first):
    """Field report 15: 1.0 and then 255 times 2^-10 is 1.249; in bf16 it would stay 1.0. No cast on micro-steps."""
    model = Weight(torch.ones(64))
    opt = FairCastOptimizer(model, torch.optim.SGD, lr=1.0, rounding=rounding, storage=storage)
    if first == "zeros":
        model.weight.grad = torch.zeros_like(model.weight)
    before, version = model.weight.detach().clone(), model.weight._version
    for micro in range(256):
        (model.weight * (1.0 if micro == 0 else 2.0**-10)).sum().backward()
    assert model.weight._version == version and equal_bits(before, model.weight.detach())
    assert model.weight.grad.dtype is torch.float32
    opt.step()
    (master,) = (master for _, master in opt.named_masters())
    assert torch.equal(master, torch.full((64,), 1 - (1 + 255 / 1024)))
    opt.zero_grad()
    (model.weight * 2.0**-10).sum().backward()
    opt.step()
    assert torch.equal(master, torch.full((64,), -256 / 1024))


def test_gradients_from_before_wrapping_are_kept():
    """A gradient that is there when the model is wrapped is not lost, and later ones are added in fp32."""
    model = Weight(torch.ones(4))
    model.weight.sum().backward()
    opt = FairCastOptimizer(model, torch.optim.SGD, lr=1.0)
    for _ in range(255):
        (model.weight * 2.0**-10).sum().backward()
    opt.step()
    assert torch.equal(next(opt.named_masters())[1], torch.full((4,), -255 / 1024))


def test_masters_hold_no_gradient(rounding):
    """Trap 12: after a step, also one that failed, no master keeps a gradient; ``model.zero_grad()`` is enough."""
    model, opt = pair(rounding)
    for step in range(3):
        model.zero_grad()
        model(batch(step, 4, 8).bfloat16()).float().sum().backward()
        opt.step()
        assert all(master.grad is None for _, master in opt.named_masters())
        assert all(entry["master"].grad is None for entry in opt.state.values())

    def failing():
        raise KeyError("from the closure")

    before = weights(opt)
    with pytest.raises(KeyError, match="from the closure"):
        opt.step(failing)
    assert_same(before, weights(opt))
    assert all(entry["master"].grad is None for entry in opt.state.values())
    model.zero_grad()
    opt.step()
    assert_same(before, weights(opt))
    train(opt, model, range(2))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32-model", "bf16-model"])
def test_batch_norm(rounding, storage, affine, bf16):
    """Field report 25: the forward works, running statistics are right past 256 updates, the counter stays integer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=affine))
    if bf16:
        model.bfloat16()
    if bf16 and storage == "float32":
        with pytest.raises(ValueError, match=r"1 \(BatchNorm1d\) has bf16 buffers .*call model\.float\(\) first"):
            FairCastOptimizer(model, torch.optim.SGD, storage=storage)
        assert model[0].weight.dtype is torch.bfloat16
        model.float()
        bf16 = False
    opt = FairCastOptimizer(model, torch.optim.SGD, lr=1e-3, rounding=rounding, storage=storage)
    dtype = model[0].weight.dtype
    count = 0
    mean = torch.zeros(3, dtype=torch.float64)
    for step in range(300):
        x = batch(step, 8, 4).to(dtype)
        mean = 0.9 * mean + 0.1 * model[0](x).detach().double().mean(0)
        opt.zero_grad()
        model(x).float().square().mean().backward()
        opt.step()
        count += 1
    assert model[1].num_batches_tracked.dtype is torch.int64 and int(model[1].num_batches_tracked) == count
    stats = model[1].running_mean
    assert stats.dtype is (torch.bfloat16 if bf16 and storage == "bfloat16" else stats.dtype)
    assert (stats.double() - mean).abs().max() < (0.05 if stats.dtype is torch.bfloat16 else 5e-3)
    model.eval()
    assert torch.isfinite(model(batch(0, 8, 4).to(dtype)).float()).all()
    served = opt.served_state_dict()
    assert served["1.num_batches_tracked"].dtype is torch.int64
    if affine:
        assert not torch.equal(model[1].weight.float(), torch.ones(3))


@pytest.mark.parametrize("kind", ["old weight_norm", "weight_norm"])
def test_reparametrised_layers(rounding, kind):
    """Field report 26: old and new weight_norm train: the masters are those of its own parameters."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    if kind == "old weight_norm":
        with pytest.warns(FutureWarning):
            layer = nn.utils.weight_norm(layer)
    else:
        layer = nn.utils.parametrizations.weight_norm(layer)
    opt = FairCastOptimizer(layer, torch.optim.SGD, lr=0.1, rounding=rounding)
    assert len(list(opt.named_masters())) == 3
    start = weights(opt)
    losses = []
    for _ in range(5):
        opt.zero_grad()
        loss = (layer(torch.ones(2, 4).bfloat16()).float() - 1).square().mean()
        loss.backward()
        losses.append(loss.item())
        opt.step()
    assert losses[-1] < losses[0]
    assert all(not torch.equal(start[name], value) for name, value in weights(opt).items() if name.startswith("master"))


@pytest.mark.parametrize("old", [True, False], ids=["old", "parametrization"])
def test_spectral_norm(old):
    """Field report 26: spectral norm says why it can't be bf16 and what to do, and that works."""
    make = nn.utils.spectral_norm if old else nn.utils.parametrizations.spectral_norm
    layer = make(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"spectral_norm.*pass storage='float32'"):
        FairCastOptimizer(nn.Sequential(layer), torch.optim.SGD, lr=0.1)
    opt = FairCastOptimizer(layer, torch.optim.SGD, lr=0.1, storage="float32")
    start = weights(opt)
    layer(torch.ones(2, 4)).sum().backward()
    opt.step()
    assert any(not torch.equal(value, weights(opt)[name]) for name, value in start.items())
    narrow = make(nn.Linear(4, 4)).bfloat16()
    with pytest.raises(ValueError, match=r"has bf16 buffers .*call model\.float\(\) first"):
        FairCastOptimizer(narrow, torch.optim.SGD, storage="float32")
    opt = FairCastOptimizer(narrow, torch.optim.SGD, lr=0.1)
    start = weights(opt)
    narrow(torch.ones(2, 4).bfloat16()).sum().backward()
    opt.step()
    assert any(not torch.equal(value, weights(opt)[name]) for name, value in start.items())


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_odd_shapes(rounding, storage, optimizer):
    """Scalars, empty tensors, transposed, channels-last and one-element parameters are served like others."""
    torch.manual_seed(0)
    values = {
        "scalar": torch.tensor(1.7),
        "empty": torch.empty(0, 3),
        "one": torch.randn(1),
        "transposed": torch.randn(5, 3).t(),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "strided": torch.randn(6, 4)[::2],
    }
    model = nn.ParameterDict({name: nn.Parameter(value) for name, value in values.items()})
    flat = nn.ParameterDict({name: nn.Parameter(value.clone().contiguous()) for name, value in values.items()})
    opt = FairCastOptimizer(model, getattr(torch.optim, optimizer), lr=0.1, rounding=rounding, storage=storage)
    same = FairCastOptimizer(flat, getattr(torch.optim, optimizer), lr=0.1, rounding=rounding, storage=storage)
    for step in range(3):
        for each, group in ((opt, model), (same, flat)):
            each.zero_grad()
            sum((p.float() * batch(step, *p.shape)).sum() for p in group.values()).backward()
            each.step()
    assert_same(weights(same), weights(opt))
    assert "empty" in dict(opt.named_masters())


def test_groups_choose_their_own_rule_and_seed():
    """Rule and seed are group options, and each parameter is served by its own group's."""
    model = nn.ParameterDict({name: nn.Parameter(torch.full((4096,), 1 + 2.0**-9)) for name in RULES})
    groups = [{"params": [(name, model[name])], "rounding": name} for name in RULES]
    opt = FairCastOptimizer(groups, torch.optim.SGD, lr=1.0, rounding="nearest")
    singles = {}
    for name in RULES:
        alone = nn.ParameterDict({name: nn.Parameter(torch.full((4096,), 1 + 2.0**-9))})
        singles[name] = (alone, FairCastOptimizer(alone, torch.optim.SGD, lr=1.0, rounding=name))
    for _ in range(3):
        for name, (alone, single) in singles.items():
            for param in (model[name], alone[name]):
                param.grad = torch.full_like(param, 2.0**-12)
            single.step()
        opt.step()
        for name, (alone, _) in singles.items():
            assert equal_bits(model[name].detach(), alone[name].detach()), name
    seeds = [{"params": [(str(seed), nn.Parameter(torch.full((4096,), 1 + 2.0**-9)))], "seed": seed} for seed in (0, 1)]
    own = FairCastOptimizer(seeds, torch.optim.SGD, lr=1.0, rounding="dither", seed=9)
    first, second = (group["params"][0].detach() for group in own.param_groups)
    assert [group["seed"] for group in own.param_groups] == [0, 1]
    assert not torch.equal(first, second)


@pytest.mark.parametrize("after", UNBIASED)
def test_a_group_changes_its_rule_while_training(after):
    """``rounding`` is an option like others: it may be set on a group between steps, and is saved with it."""
    model, opt = pair("nearest")
    train(opt, model, range(2))
    opt.param_groups[0]["rounding"] = after
    train(opt, model, range(2, 5))
    for (name, master), param in zip(opt.named_masters(), model.parameters()):
        assert within_one_ulp(param.detach(), master), name
    other_model, other = pair("nearest")
    other.load_state_dict(opt.state_dict())
    other_model.load_state_dict(model.state_dict())
    train(opt, model, range(5, 7))
    train(other, other_model, range(5, 7))
    assert_same(weights(opt), weights(other))


def test_seeds_and_names_decide_the_dither():
    """Two layers of one shape and two seeds get dithers that agree on half the elements at most by chance."""
    torch.manual_seed(0)
    value = torch.full((4096,), 1 + 2.0**-8)
    served = []
    for seed, name in ((0, "a"), (0, "b"), (1, "a"), (0, "a")):
        model = nn.ParameterDict({name: nn.Parameter(value.clone())})
        FairCastOptimizer(model, torch.optim.SGD, lr=1.0, rounding="dither", seed=seed)
        served.append(model[name].detach().float() > 1)
    assert torch.equal(served[0], served[3])
    for a, b in ((0, 1), (0, 2), (1, 2)):
        agreement = float((served[a] == served[b]).double().mean())
        assert abs(agreement - 0.5) < 5 * 0.5 / math.sqrt(4096)


@pytest.mark.parametrize("mode", ["skip", "raise", "allow"])
@pytest.mark.parametrize("with_closure", [False, True], ids=["plain", "closure"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_gradients(mode, with_closure, bad):
    """``skip`` and ``raise`` change nothing at all, not even a count; ``allow`` does what torch does."""
    model, opt = pair(on_nonfinite=mode)
    train(opt, model, range(2))
    before, state = weights(opt), [dict(entry) for entry in opt.state.values()]
    copied = [{key: value.clone() for key, value in entry.items()} for entry in state]

    def poison():
        opt.zero_grad()
        loss = model(batch(0, 4, 8).bfloat16()).float().sum()
        loss.backward()
        model[2].weight.grad[1, 2] = bad
        return loss.detach()

    def step():
        if not with_closure:
            poison()
        return opt.step(poison if with_closure else None)

    if mode == "raise":
        with pytest.raises(
            FloatingPointError, match=r"gradient of '2\.weight' is not finite; the step changed nothing"
        ):
            step()
    else:
        loss = step()
        assert (loss is not None) == with_closure
    if mode == "allow":
        master = dict(opt.named_masters())["2.weight"]
        assert not torch.isfinite(master[1, 2]) and int(torch.isfinite(master).sum()) == master.numel() - 1
        assert opt.cast_stats().nonfinite == 1 and not torch.isfinite(model[2].weight[1, 2])
        return
    assert_same(before, weights(opt))
    assert_same(copied, [dict(entry) for entry in opt.state.values()])
    assert opt.cast_stats().skipped_steps == (1 if mode == "skip" else 0)
    train(opt, model, range(2, 4))
    assert {int(entry["cast_count"]) for entry in opt.state.values()} == {4}


def test_non_finite_sparse_gradients():
    model = nn.Embedding(6, 4, sparse=True)
    opt = FairCastOptimizer(model, torch.optim.SGD, lr=0.1, on_nonfinite="skip")
    before = weights(opt)
    (model(torch.tensor([1, 1])).float() * 3e38).sum().backward()  # finite each, infinite together
    opt.step()
    assert_same(before, weights(opt))
    assert opt.cast_stats().skipped_steps == 1


def test_non_finite_masters_are_served_as_they_are(rounding):
    """A NaN stays a NaN and an infinity keeps its sign; a huge finite master saturates, unless to nearest."""
    model = Weight(torch.tensor([1.0, 3.39e38, -3.4e38, 2.0]))
    opt = FairCastOptimizer(model, torch.optim.SGD, lr=1.0, rounding=rounding)
    model.weight.grad = torch.tensor([math.nan, 0.0, 0.0, math.inf])
    opt.step()
    served = model.weight.detach()
    assert torch.isnan(served[0]) and served[3] == -math.inf
    assert (served[2] == -math.inf) if rounding == "nearest" else torch.isfinite(served[1:3]).all()


def test_the_model_may_be_served_under_inference_mode():
    """Rollouts under ``inference_mode`` or ``no_grad`` don't disturb training."""
    model, opt = pair()
    twin_model, twin = pair()
    for step in range(3):
        with torch.inference_mode():
            model(batch(step, 2, 8).bfloat16())
        with torch.no_grad():
            model(batch(step, 2, 8).bfloat16())
        train(opt, model, range(step, step + 1))
        train(twin, twin_model, range(step, step + 1))
    assert_same(weights(opt), weights(twin))


def test_two_optimizers_on_one_model():
    """Two optimizers, each on some of the parameters, leave each other's alone."""
    model, reference = mlp(), mlp()
    first = FairCastOptimizer(list(model[0].named_parameters("0")), torch.optim.SGD, lr=0.1)
    second = FairCastOptimizer(list(model[2].named_parameters("2")), torch.optim.AdamW, lr=0.01)
    one = FairCastOptimizer(
        [{"params": list(reference[0].named_parameters("0"))}, {"params": list(reference[2].named_parameters("2"))}],
        torch.optim.SGD,
        lr=0.1,
    )
    for param, other in zip(model.parameters(), reference.parameters()):
        assert equal_bits(param.detach(), other.detach())
    for param in [*model.parameters(), *reference.parameters()]:
        param.grad = torch.ones_like(param)
    first.step()
    one.step()
    for param, other in zip(model[0].parameters(), reference[0].parameters()):
        assert equal_bits(param.detach(), other.detach())
    before = [p.detach().clone() for p in model[0].parameters()]
    second.step()
    assert all(equal_bits(a, b.detach()) for a, b in zip(before, model[0].parameters()))


def test_an_empty_param_group():
    """Trainers sort parameters into groups by weight decay, and one of them may stay empty (LoRA has no norms)."""
    model = mlp()
    groups = [{"params": list(model.parameters()), "weight_decay": 0.1}, {"params": [], "weight_decay": 0.0}]
    opt = FairCastOptimizer(model, torch.optim.AdamW(groups, lr=1e-3))
    train(opt, model, range(2))
    other = mlp(seed=1)
    groups = [{"params": list(other.parameters()), "weight_decay": 0.1}, {"params": [], "weight_decay": 0.0}]
    resumed = FairCastOptimizer(other, torch.optim.AdamW(groups, lr=1e-3))
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(opt.state_dict())
    train(opt, model, range(2, 4))
    train(resumed, other, range(2, 4))
    assert [len(group["params"]) for group in opt.param_groups] == [4, 0]
    assert_same_run(opt, resumed)
