"""To plain torch and back."""

import pytest
import torch
from torch import nn

from fcoptim import CheckpointError, FairCastOptimizer, from_torch, save_checkpoint, to_torch
from tests.optimizer.helpers import ADAM, RULES, assert_same, assert_same_run, loss_on, mlp, pair, train, weights

from .helpers import Mixed, mixed_loss, mixed_pair, saved_run

OPTIMIZERS = [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor, torch.optim.LBFGS]


def plain_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, loss=loss_on) -> None:
    for step in steps:

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            value = loss(model, step)
            value.backward()
            return value

        optimizer.step(closure)


def plain_run(cls=torch.optim.AdamW, steps: int = 3, seed: int = 0) -> tuple:
    model = mlp(seed)
    optimizer = cls(model.parameters(), **(ADAM if cls is torch.optim.AdamW else {}))
    plain_steps(model, optimizer, range(steps))
    return model, optimizer


def wrapped_steps(model: nn.Module, opt: FairCastOptimizer, steps: range) -> None:
    for step in steps:

        def closure(step: int = step) -> torch.Tensor:
            opt.zero_grad()
            value = loss_on(model, step)
            value.backward()
            return value

        opt.step(closure)


@pytest.mark.parametrize("given", ["objects", "state dicts"])
@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_to_torch(tmp_path, cls, given):
    """A plain fp32 model and optimizer hold masters and moments, and go on from there."""
    model, opt = pair("dither", optimizer=cls)
    wrapped_steps(model, opt, range(3))
    save_checkpoint(tmp_path / "a", opt, step=17, note="x")
    plain_model = mlp(5)
    plain = cls(plain_model.parameters(), **(ADAM if cls is torch.optim.AdamW else {}))
    if given == "objects":
        found = to_torch(tmp_path / "a", plain_model, plain)
    else:
        found = to_torch(tmp_path / "a")
        plain_model.load_state_dict(found["model"])
        plain.load_state_dict(found["optimizer"])
    assert (found["step"], found["extra"]) == (17, {"note": "x"})
    for (name, master), param in zip(opt.named_masters(), plain_model.parameters()):
        assert torch.equal(master, param), name
    own = {"master", "cast_count", "error_feedback", "wrapped_global"}
    for param, served in zip(plain_model.parameters(), opt.param_groups[0]["params"]):
        expected = {key: value for key, value in opt.state[served].items() if key not in own}
        assert_same(expected, dict(plain.state[param]) if expected or param in plain.state else {})
    assert plain.param_groups[0]["lr"] == opt.param_groups[0]["lr"]
    assert not {"rounding", "seed", "lag"} & set(plain.param_groups[0])
    plain_steps(plain_model, plain, range(3, 5))


def test_to_torch_follows_names(tmp_path):
    """Field report 22: an optimizer over reordered and frozen parameters gets each one's own moments."""
    model, opt = mixed_pair()
    train(opt, model, range(2), mixed_loss)
    save_checkpoint(tmp_path / "a", opt)
    plain = Mixed(6)
    params = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(list(reversed(params)), **ADAM)
    to_torch(tmp_path / "a", plain, optimizer)
    for name, param in plain.named_parameters():
        if not param.requires_grad:
            continue
        served = model.get_parameter(name)
        for key in ("exp_avg", "exp_avg_sq"):
            assert (key in opt.state[served]) == (param in optimizer.state)
            if param in optimizer.state:
                assert torch.equal(opt.state[served][key], optimizer.state[param][key]), name
    assert plain.head.weight is plain.embed.weight
    with pytest.raises(CheckpointError, match=r"doesn't fit this optimizer: .*for example 'frozen\.bias'"):
        to_torch(tmp_path / "a", plain, torch.optim.AdamW(plain.parameters(), **ADAM))


def test_to_torch_checks(tmp_path):
    """A damaged checkpoint is refused by name; a folder with a model only has nothing to give."""
    saved_run(tmp_path / "a")
    path = tmp_path / "a" / "masters" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"masters/model\.safetensors has \d+ bytes instead of"):
        to_torch(tmp_path / "a")


@pytest.mark.parametrize("form", ["dict", "file", "state dict", "DDP", "safetensors"])
@pytest.mark.parametrize("rounding", RULES)
def test_from_torch(tmp_path, form, rounding):
    """Field report 20: fp32 weights become masters with every bit, moments are kept; as if wrapped from the start."""
    plain_model, plain = plain_run()
    expected_model, expected_plain = plain_run()
    expected = FairCastOptimizer(expected_model, expected_plain, rounding=rounding)
    model, opt = pair(rounding, seed=7)
    train(opt, model, range(2))
    source: object = {"model": plain_model.state_dict(), "optimizer": plain.state_dict()}
    if form == "file":
        torch.save({"state_dict": plain_model.state_dict(), "optimizer_state_dict": plain.state_dict()}, tmp_path / "f")
        source = tmp_path / "f"
    elif form == "DDP":
        source = {**source, "model": {f"module.{k}": v for k, v in plain_model.state_dict().items()}}
    elif form in ("state dict", "safetensors"):
        source = plain_model.state_dict()
        expected = FairCastOptimizer(plain_run()[0], torch.optim.AdamW, rounding=rounding, **ADAM)
    if form == "safetensors":
        from safetensors.torch import save_file

        save_file(source, tmp_path / "f.safetensors")
        source = tmp_path / "f.safetensors"
    from_torch(source, opt)
    assert_same(weights(expected), weights(opt))
    expected_model = expected.served_model
    train(expected, expected_model, range(3, 6))
    train(opt, model, range(3, 6))
    assert_same_run(expected, opt)


def test_round_trip(tmp_path):
    """Out to torch and in again: the same masters and moments."""
    model, opt = pair("stochastic")
    train(opt, model, range(3))
    save_checkpoint(tmp_path / "a", opt)
    found = to_torch(tmp_path / "a")
    _, other = pair("stochastic", seed=4)
    from_torch(found, other)
    for (name, a), (_, b) in zip(opt.named_masters(), other.named_masters()):
        assert torch.equal(a, b), name
    for a, b in zip(opt.state.values(), other.state.values()):
        assert_same(
            {k: a[k] for k in ("exp_avg", "exp_avg_sq", "step")}, {k: b[k] for k in a if k[:3] in ("exp", "ste")}
        )


class Evil:
    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lambda m, o: {"model": {**m, "x": torch.zeros(1)}}, r"the model has no 'x'"),
        (lambda m, o: {"model": {k: v for k, v in m.items() if k != "2.bias"}}, r"it has no '2\.bias'"),
        (lambda m, o: {**m, "0.bias": torch.zeros(3)}, r"'0\.bias' has shape \(3,\) in it, \(16,\) in the model"),
        (lambda m, o: {**m, "epoch": 3}, r"holds 'epoch', a int: pass a model's state dict"),
        (
            lambda m, o: {"model": m, "optimizer": {"state": {}}},
            r"state in .* doesn't fit: 'param_groups'",
        ),
        (lambda m, o: {"model": m, "optimizer": {**o, "param_groups": o["param_groups"] * 2}}, r"groups of \[4, 4\]"),
        (
            lambda m, o: {"model": m, "optimizer": {**o, "state": {3 - k: v for k, v in o["state"].items()}}},
            r"exp_avg of '0\.weight' has shape \(4,\), the parameter \(16, 8\); was it saved with .*another order\?",
        ),
    ],
)
@pytest.mark.parametrize("as_file", [False, True])
def test_from_torch_refuses(tmp_path, content, said, as_file):
    """What does not fit is named, and nothing is changed."""
    plain_model, plain = plain_run()
    source = content(plain_model.state_dict(), plain.state_dict())
    if as_file:
        torch.save(source, tmp_path / "f.pt")
        source = tmp_path / "f.pt"
    model, opt = pair()
    train(opt, model, range(1))
    before, state = weights(opt), opt.state_dict()
    with pytest.raises(CheckpointError, match=said):
        from_torch(source, opt)
    assert_same(before, weights(opt))
    assert_same(state, opt.state_dict())


def test_from_torch_runs_nothing(tmp_path, capsys):
    """Field report 27: a file that needs code to be read is refused, unrun."""
    _, opt = pair()
    torch.save({"model": Evil()}, tmp_path / "f.pt")
    with pytest.raises(CheckpointError, match="can't be read, or not without running code in it"):
        from_torch(tmp_path / "f.pt", opt)
    assert "run\n" not in capsys.readouterr().out
    (tmp_path / "g.pt").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match=r"g\.pt can't be read"):
        from_torch(tmp_path / "g.pt", opt)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        from_torch(tmp_path / "none.pt", opt)
    torch.save([1], tmp_path / "h.pt")
    with pytest.raises(CheckpointError, match="holds a list, not a state dict"):
        from_torch(tmp_path / "h.pt", opt)
