"""Small models, batches and comparisons that the optimizer's tests share."""

import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fcoptim import FairCastOptimizer
from fcoptim.cast.rules import RULES as RULE_TABLE

RULES = tuple(RULE_TABLE)
UNBIASED = tuple(name for name, rule in RULE_TABLE.items() if rule.unbiased)
ADAM = {"lr": 1e-3, "weight_decay": 0.1}


def mlp(seed: int = 0, *, bias: bool = True) -> nn.Sequential:
    """A model of two linear layers, the same for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16, bias=bias), nn.Tanh(), nn.Linear(16, 4, bias=bias))


def normed(seed: int = 0) -> nn.Sequential:
    """An ``mlp`` with a layer norm in it, whose weights go by the pattern ``"1.*"`` and may be kept in fp32."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def batch(step: int, *shape: int) -> torch.Tensor:
    """fp32 noise that depends on the step alone; torch's global random state is not used."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 + step))


def loss_on(model: nn.Module, step: int) -> torch.Tensor:
    """A loss of an ``mlp`` on the batch of one step, computed in the dtype of its weights."""
    first = next(model.parameters())
    return (model(batch(step, 16, 8).to(first.dtype)).float() - batch(-step - 1, 16, 4)).square().mean()


def train(opt: FairCastOptimizer, model: nn.Module, steps: range, loss: Callable = loss_on) -> None:
    """Plain training: one backward and one step for each number in ``steps``."""
    for step in steps:
        opt.zero_grad()
        loss(model, step).backward()
        opt.step()


def pair(rounding: str = "stochastic", seed: int = 0, **options: Any) -> tuple[nn.Module, FairCastOptimizer]:
    """An ``mlp`` and AdamW around it, unless ``optimizer`` names another class."""
    model = mlp(seed)
    optimizer = options.pop("optimizer", torch.optim.AdamW)
    arguments = ADAM if optimizer is torch.optim.AdamW else {}
    return model, FairCastOptimizer(model, optimizer, rounding=rounding, **{**arguments, **options})


def saved(state: Any, weights_only: bool = True) -> Any:
    """What comes back from a file that is written by ``torch.save`` and read with ``weights_only=True``, or without."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bits, detached and copied, so that NaNs and zeros' signs compare."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return flat.clone().view(kinds[tensor.element_size()]) if tensor.is_floating_point() else flat.clone()


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same dtype, same shape, same bits."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def weights(opt: FairCastOptimizer) -> dict[str, torch.Tensor]:
    """A copy of all masters and served weights, by name."""
    served = {name: p for group in opt.param_groups for name, p in zip(group["param_names"], group["params"])}
    out = {f"master of {name}": master.clone() for name, master in opt.named_masters()}
    out.update({f"served {name}": param.detach().clone() for name, param in served.items()})
    return out


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """Compare nested containers of tensors and numbers, tensors by dtype and bits."""
    assert type(a) is type(b), f"{where}: {type(a).__name__} against {type(b).__name__}"
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape, f"{where}: {a.dtype} {a.shape} against {b.dtype} {b.shape}"
        assert equal_bits(a, b), f"{where}: bits differ, by at most {(a.double() - b.double()).abs().max()}"
    elif isinstance(a, Mapping):
        assert list(a) == list(b) or set(a) == set(b), f"{where}: keys {sorted(map(str, a))} and {sorted(map(str, b))}"
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), f"{where}: length {len(a)} against {len(b)}"
        for number, (left, right) in enumerate(zip(a, b)):
            assert_same(left, right, f"{where}/{number}")
    else:
        assert a == b, f"{where}: {a!r} against {b!r}"


def assert_same_run(a: FairCastOptimizer, b: FairCastOptimizer) -> None:
    """Two optimizers stand at the same point: masters, served weights, state and options."""
    assert_same(weights(a), weights(b), "weights")
    assert_same(a.state_dict(), b.state_dict(), "state_dict")
