"""Muon against ``torch.optim.Muon`` and against the recurrence written by hand."""

import pytest
import torch

from fcoptim import Muon
from fcoptim.muon import orthogonalize

from .helpers import noise, relative_error

# A mixture that covers square, wide, tall, long, short, and shapes that go through the iteration as one batch.
SHAPES = [(16, 16), (8, 24), (24, 8), (8, 24), (16, 160), (3, 50), (50, 3), (200, 150)]
# Two bf16 iterations whose products round differently, as a share of the update's norm; measured up to 0.021.
BF16 = 0.03
RULES = {"spectral": "original", "match_rms_adamw": "match_rms_adamw"}


def parameters(dtype=torch.float32):
    return [torch.nn.Parameter(noise(*shape, seed=n, dtype=dtype)) for n, shape in enumerate(SHAPES)]


def step_both(ours, theirs, params, references, steps):
    for step in range(steps):
        for number, (param, reference) in enumerate(zip(params, references)):
            param.grad = noise(*param.shape, seed=100 * step + number, dtype=param.dtype)
            reference.grad = param.grad.clone()
        ours.step()
        theirs.step()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", RULES)
def test_equals_torch(scale, nesterov):
    """The updates of four steps at the same settings are torch's to the tolerance of bf16, under both adjust rules."""
    params, references = parameters(), parameters()
    starts = [param.detach().clone() for param in params]
    options = {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.9, "nesterov": nesterov}
    ours = Muon(params, scale=scale, orthogonalize="newton_schulz", dtype="bfloat16", **options)
    theirs = torch.optim.Muon(references, adjust_lr_fn=RULES[scale], **options)
    step_both(ours, theirs, params, references, 4)
    for param, reference, start in zip(params, references, starts):
        assert relative_error(param - start, reference - start) < BF16
        assert torch.equal(ours.state[param]["momentum_buffer"], theirs.state[reference]["momentum_buffer"])


def test_bf16_parameters_equal_torch():
    """On bf16 parameters too; from zero, so that the parameter's own rounding hides nothing."""
    params, references = parameters(torch.bfloat16), parameters(torch.bfloat16)
    for param in params + references:
        param.data.zero_()
    ours = Muon(params, lr=0.02, scale="spectral", orthogonalize="newton_schulz", dtype="bfloat16")
    step_both(ours, torch.optim.Muon(references, lr=0.02), params, references, 1)
    for param, reference in zip(params, references):
        assert relative_error(param, reference) < BF16


def test_torchs_own_settings(dtype):
    """Custom coefficients and steps mean what they mean in torch; fp32 stays within bf16's tolerance of it."""
    triple = (3.0, -3.2, 1.2)
    params, references = parameters(), parameters()
    starts = [param.detach().clone() for param in params]
    ours = Muon(params, lr=0.02, scale="spectral", coefficients=triple, steps=3, dtype=dtype)
    theirs = torch.optim.Muon(references, lr=0.02, ns_coefficients=triple, ns_steps=3)
    step_both(ours, theirs, params, references, 2)
    for param, reference, start in zip(params, references, starts):
        assert relative_error(param - start, reference - start) < BF16


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
def test_no_buffer_is_overwritten(given, nesterov, method):
    """Field report 31: momentum buffers follow the recurrence bit for bit, and gradients keep their bits."""
    params = parameters(given)
    opt = Muon(params, lr=0.1, nesterov=nesterov, orthogonalize=method, momentum=0.9, dtype="bfloat16")
    expected = [torch.zeros_like(param) for param in params]
    for step in range(3):
        grads = [noise(*param.shape, seed=10 * step + n, dtype=given) for n, param in enumerate(params)]
        for param, grad, buffer in zip(params, grads, expected):
            param.grad = grad.clone()
            buffer.lerp_(grad, 1 - 0.9)
        opt.step()
        for param, grad, buffer in zip(params, grads, expected):
            assert torch.equal(opt.state[param]["momentum_buffer"], buffer)
            assert torch.equal(param.grad, grad)


@pytest.mark.parametrize("maximize", [False, True])
def test_equals_the_formula(method, maximize):
    """Step by step: momentum, direction, decoupled decay, update; bit for bit where nothing is batched."""
    param = torch.nn.Parameter(noise(12, 30))
    expected, buffer = param.detach().clone(), torch.zeros(12, 30)
    opt = Muon([param], lr=0.05, weight_decay=0.2, momentum=0.8, orthogonalize=method, maximize=maximize)
    for step in range(3):
        param.grad = noise(12, 30, seed=step)
        opt.step()
        grad = -noise(12, 30, seed=step) if maximize else noise(12, 30, seed=step)
        buffer.lerp_(grad, 1 - 0.8)
        update = orthogonalize(grad.lerp(buffer, 0.8), method)
        expected.mul_(1 - 0.05 * 0.2).add_(update.float(), alpha=-0.05 * 0.2 * 30**0.5)
    assert torch.equal(param, expected)


def test_weight_decay_has_its_effect():
    """Field report 29: decay 10 against 0 differs by exactly the analytic factor, which no tolerance could hide."""
    outcomes = {}
    for decay in (0.0, 10.0):
        param = torch.nn.Parameter(noise(8, 12))
        param.grad = noise(8, 12, seed=1)
        Muon([param], lr=1e-3, weight_decay=decay).step()
        outcomes[decay] = param.detach()
    assert torch.allclose(outcomes[0.0] - outcomes[10.0], 1e-3 * 10.0 * noise(8, 12), rtol=1e-4, atol=1e-7)
    param = torch.nn.Parameter(torch.ones(8, 12))
    opt = Muon([param], lr=1e-3, weight_decay=10.0)
    for _ in range(100):
        param.grad = torch.zeros(8, 12)
        opt.step()
    assert torch.allclose(param, torch.full((8, 12), 0.99**100), rtol=1e-5)


def test_adamw_part_equals_torch():
    """Vectors and tables are trained by torch's AdamW bit for bit, with their own learning rate and decay."""
    params, references = ([torch.nn.Parameter(noise(*s)) for s in ((7,), (5, 6), ())] for _ in range(2))
    groups = [{"params": params, "algorithm": "adamw"}]
    ours = Muon(groups, lr=0.5, adamw_lr=0.01, adamw_weight_decay=0.4, betas=(0.8, 0.95), eps=1e-6)
    theirs = torch.optim.AdamW(references, lr=0.01, weight_decay=0.4, betas=(0.8, 0.95), eps=1e-6)
    step_both(ours, theirs, params, references, 4)
    assert all(torch.equal(param, reference) for param, reference in zip(params, references))


@pytest.mark.parametrize("shape", [(64, 16), (16, 64), (40, 40)], ids=str)
def test_default_update_is_as_large_as_adamws(shape):
    """match_rms_adamw: whatever the shape, an update's root mean square is 0.2 lr, within the method's accuracy."""
    param = torch.nn.Parameter(torch.zeros(shape))
    param.grad = noise(*shape)
    Muon([param], lr=1.0, weight_decay=0).step()
    assert float(param.detach().square().mean().sqrt()) == pytest.approx(0.2, rel=0.15)


@pytest.mark.parametrize("kind", ["zero", "zero row", "rank 1", "ones"])
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_degenerate_gradients(kind, weight, method, dtype):
    """Field report 17: degenerate gradients leave weights finite; a zero gradient gives a zero update."""
    grads = {"zero": torch.zeros(10, 14), "zero row": noise(10, 14), "ones": torch.ones(10, 14)}
    grads["rank 1"] = noise(10, 1) @ noise(1, 14)
    grads["zero row"][3] = 0
    param = torch.nn.Parameter(torch.full((10, 14), weight))
    opt = Muon([param], lr=0.1, weight_decay=0, orthogonalize=method, dtype=dtype)
    for _ in range(3):
        param.grad = grads[kind].clone()
        opt.step()
    assert torch.isfinite(param).all()
    untouched = {"zero": param, "zero row": param[3]}.get(kind, param[:0])
    assert (untouched == weight).all()
    assert kind == "zero" or (param != weight).any()


@pytest.mark.parametrize("exponent", [-20, -8, 6, 15])
def test_updates_do_not_depend_on_the_loss_scale(exponent):
    """Gradients times 1e-20 to 1e15 give the same training, momentum included."""
    outcomes = []
    for factor in (1.0, 10.0**exponent):
        param = torch.nn.Parameter(noise(20, 30))
        opt = Muon([param], lr=0.1)
        for step in range(3):
            param.grad = noise(20, 30, seed=step) * factor
            opt.step()
        outcomes.append(param.detach())
    assert relative_error(outcomes[1] - noise(20, 30), outcomes[0] - noise(20, 30)) < 0.01


def test_frozen_parameters_are_left_alone():
    """Field report 12: without a gradient neither decay nor momentum moves a weight, and it goes on from there."""
    params = [torch.nn.Parameter(noise(6, 9)), torch.nn.Parameter(noise(9))]
    opt = Muon(params, lr=0.1, weight_decay=0.1, momentum=0.9)

    def steps(numbers, frozen):
        for number in numbers:
            for param in params:
                param.grad = None if frozen else noise(*param.shape, seed=number)
            opt.step()

    steps(range(3), frozen=False)
    before = [param.detach().clone() for param in params]
    momentum = opt.state[params[0]]["momentum_buffer"].clone()
    steps(range(10), frozen=True)
    assert all(torch.equal(param, old) for param, old in zip(params, before))
    assert torch.equal(opt.state[params[0]]["momentum_buffer"], momentum)
    steps([3], frozen=False)
    assert all(not torch.equal(param, old) for param, old in zip(params, before))
    expected = momentum.lerp(noise(6, 9, seed=3), 1 - 0.9)
    assert torch.equal(opt.state[params[0]]["momentum_buffer"], expected)


def test_closure():
    """A closure runs with gradients on, and its loss is returned."""
    param = torch.nn.Parameter(noise(4, 5))
    opt = Muon([param], lr=0.1)

    def closure():
        opt.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    losses = [float(opt.step(closure).detach()) for _ in range(4)]
    assert losses == sorted(losses, reverse=True) and losses[0] == float(noise(4, 5).square().sum())
