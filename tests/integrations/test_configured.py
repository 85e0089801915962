"""Optimizers named in a configuration, built by loaders that do what verl's and NeMo-RL's do."""

import copy
import importlib
import inspect
import io
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import fcoptim
from fcoptim import FairCastAdamW, FairCastMuon, FairCastOptimizer, FairCastSGD
from fcoptim.muon import Muon

from . import tiny
from .trainers import assert_same_bits, lies_on_grid, snapshot


def verl_builds(parameters: Any, config: Any) -> torch.optim.Optimizer:
    """As verl's ``build_optimizer``: a module and a class name; betas go along only if the name contains "adam"."""
    options = {"lr": config.lr, "weight_decay": config.weight_decay}
    if "adam" in config.optimizer.lower():
        options["betas"] = config.betas
    if config.override_optimizer_config is not None:
        options.update(config.override_optimizer_config)
    return getattr(importlib.import_module(config.optimizer_impl), config.optimizer)(parameters, **options)


def nemo_rl_builds(parameters: Any, config: Any) -> torch.optim.Optimizer:
    """As NeMo-RL's policy workers: one dotted name, and its keyword arguments."""
    module, name = config["name"].rsplit(".", 1)
    return getattr(importlib.import_module(module), name)(parameters, **config["kwargs"])


VERL = """
optimizer_impl: fcoptim
optimizer: FairCastAdamW
lr: 1.0e-3
weight_decay: 0.01
betas: [0.9, 0.99]
override_optimizer_config: {rounding: dither, seed: 1, lag: {kind: ema, steps: 10}, keep_fp32: []}
"""

NEMO_RL = """
name: fcoptim.FairCastAdamW
kwargs: {lr: 1.0e-3, weight_decay: 0.01, betas: [0.9, 0.999], eps: 1.0e-8, foreach: false, fused: false}
"""


def train(model: torch.nn.Module, opt: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        ids = torch.randint(3, 30, (4, 8), generator=torch.Generator().manual_seed(step))
        model(input_ids=ids, labels=ids).loss.backward()
        opt.step()
        opt.zero_grad()


def test_the_configurations_in_the_docs():
    """The YAML blocks of docs/integrations.md, as these frameworks would use them."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "integrations.md").read_text()
    verl, nemo = (OmegaConf.create(body) for body in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    defaults = {"weight_decay": 0.01, "betas": [0.9, 0.999], "override_optimizer_config": None}
    config = OmegaConf.merge(defaults, verl.actor_rollout_ref.actor.optim)
    for build, chosen in ((verl_builds, config), (nemo_rl_builds, nemo.policy.optimizer)):
        model = tiny.model()
        opt = build(model.parameters(), chosen)
        train(model, opt, range(2))
        assert type(opt) is FairCastAdamW and opt.param_groups[0]["rounding"] == "dither"


@pytest.mark.parametrize("plain", [True, False])
def test_verl(plain):
    """Trap 19: the class is found by name, betas arrive (its name contains "adam"), lists and nested options work."""
    config = OmegaConf.create(VERL)
    if plain:
        config = OmegaConf.create({**config, "betas": None})
        config.betas = (0.9, 0.99)
    model = tiny.model()
    opt = verl_builds(model.parameters(), config)
    group = opt.param_groups[0]
    assert isinstance(opt, FairCastOptimizer) and isinstance(opt.wrapped, torch.optim.AdamW)
    assert (group["betas"], group["rounding"], group["seed"]) == ((0.9, 0.99), "dither", 1)
    assert group["lag"]["steps"] == 10 and opt.lag.steps == 10
    train(model, opt, range(2))
    assert all(lies_on_grid(p) for p in model.parameters())
    assert torch.load(_file(opt.state_dict()), weights_only=True)["param_groups"][0]["betas"] == (0.9, 0.99)


def _file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("name", ["FairCastSGD", "FairCastMuon"])
def test_verl_passes_no_betas_to_the_others(name):
    """Trap 19: names without "adam" get no betas; they must not need them."""
    override = {"vocab_size": tiny.VOCABULARY} if name == "FairCastMuon" else {"momentum": 0.9}
    config = OmegaConf.create(
        {"optimizer_impl": "fcoptim", "optimizer": name, "lr": 1e-3, "weight_decay": 0.0, "betas": [0.9, 0.9]}
        | {"override_optimizer_config": override}
    )
    model = tiny.model()
    opt = verl_builds(model.parameters(), config)
    train(model, opt, range(2))
    assert opt.cast_stats().changed > 0


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "dither", "error_feedback"])
def test_nemo_rl(rounding):
    """The dotted name and its kwargs; a run resumed through ``state_dict`` goes on bit for bit, matched by position."""
    config = OmegaConf.to_container(OmegaConf.create(NEMO_RL))
    config["kwargs"]["rounding"] = rounding
    runs = []
    for cut in (None, 2):
        model = tiny.model()
        opt = nemo_rl_builds(model.parameters(), config)
        train(model, opt, range(cut or 4))
        if cut:
            weights, state = model.state_dict(), opt.state_dict()
            model = tiny.model(seed=1)
            opt = nemo_rl_builds(model.parameters(), config)
            model.load_state_dict(weights)
            opt.load_state_dict(torch.load(_file(state), weights_only=True))
            train(model, opt, range(cut, 4))
        runs.append(snapshot(opt))
    assert_same_bits(*runs)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(FairCastAdamW, torch.optim.AdamW), (FairCastSGD, torch.optim.SGD), (FairCastMuon, Muon)]
)
def test_signatures(ours, theirs):
    """Every parameter of the wrapped class comes first, in its order and with its default; then FairCastOptimizer's."""
    mine, other = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
    assert list(mine)[: len(other)] == list(other)
    assert all(mine[name].default == value.default and mine[name].kind == value.kind for name, value in other.items())
    own = inspect.signature(FairCastOptimizer).parameters
    assert {n for n, p in own.items() if p.kind is p.KEYWORD_ONLY} <= mine.keys()
    assert ours.__name__ in fcoptim.__all__


def test_positional_arguments():
    """``FairCastAdamW(params, 1e-4, (0.8, 0.9))``, as torch takes them."""
    opt = FairCastAdamW(tiny.model().parameters(), 1e-4, [0.8, 0.9])
    assert (opt.param_groups[0]["lr"], opt.param_groups[0]["betas"]) == (1e-4, (0.8, 0.9))
    assert FairCastSGD(tiny.model().parameters(), 0.5, 0.9).param_groups[0]["momentum"] == 0.9


def test_same_run_as_the_plain_form():
    """The named class on a model is ``FairCastOptimizer(model, torch.optim.AdamW)``, to the bit, and copies."""
    model, other = tiny.model(), tiny.model()
    opt = FairCastAdamW(model, lr=1e-3, weight_decay=0.1, rounding="error_feedback", seed=3)
    plain = FairCastOptimizer(
        other, torch.optim.AdamW, lr=1e-3, weight_decay=0.1, rounding="error_feedback", seed=3, storage="bfloat16"
    )
    assert opt.served_model is model
    train(model, opt, range(2))
    train(other, plain, range(2))
    assert_same_bits(snapshot(opt), snapshot(plain))
    for copied_model, copied in (copy.deepcopy((model, opt)), pickle.loads(pickle.dumps((model, opt)))):
        assert type(copied) is FairCastAdamW
        train(copied_model, copied, range(2, 3))
    train(model, opt, range(2, 3))
    assert_same_bits(snapshot(opt), snapshot(copied))


def test_unknown_option():
    with pytest.raises(TypeError, match="momentum"):
        FairCastAdamW(tiny.model().parameters(), momentum=0.9)
    with pytest.raises(ValueError, match="rounding"):
        FairCastAdamW(tiny.model().parameters(), rounding="up")


def sides(opt: FairCastOptimizer) -> dict[str, set[tuple[int, ...]]]:
    found: dict[str, set[tuple[int, ...]]] = {"muon": set(), "adamw": set()}
    for group in opt.param_groups:
        found[group["algorithm"]] |= {tuple(p.shape) for p in group["params"]}
    return found


@pytest.mark.parametrize("given", ["model", "names", "bare"])
def test_muon_finds_hidden_matrices(given):
    """The embedding (tied to the head) goes to AdamW: by its module, its name, or its rows."""
    model = tiny.model()
    opt = {
        "model": lambda: FairCastMuon(model, lr=1e-3),
        "names": lambda: FairCastMuon(model.named_parameters(), lr=1e-3, adamw="*embed*"),
        "bare": lambda: FairCastMuon(model.parameters(), lr=1e-3, vocab_size=tiny.VOCABULARY),
    }[given]()
    table = (tiny.VOCABULARY, 32)
    assert table in sides(opt)["adamw"] and table not in sides(opt)["muon"]
    assert all(len(shape) == 2 for shape in sides(opt)["muon"])
    assert sum(len(group["params"]) for group in opt.param_groups) == len(list(model.parameters()))
    before = snapshot(opt)
    train(model, opt, range(2))
    after = snapshot(opt)
    assert all(not torch.equal(before[k], after[k]) for k in before if k.startswith("master"))


def test_muon_without_names_is_warned_of():
    with pytest.warns(UserWarning, match="vocab_size="):
        opt = FairCastMuon(tiny.model().parameters())
    assert (tiny.VOCABULARY, 32) in sides(opt)["muon"]
    with pytest.raises(ValueError, match="vocab_size=1000"):
        FairCastMuon(tiny.model().parameters(), vocab_size=1000)
    with pytest.raises(ValueError, match="leave it out"):
        FairCastMuon(tiny.model(), vocab_size=64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = tiny.model()
        groups = [{"params": [p], "algorithm": "muon" if p.ndim == 2 else "adamw"} for p in model.parameters()]
        FairCastMuon(groups)


def test_muon_keeps_the_groups_own_options():
    """Rounding and rates that a group chooses stay with its matrices and its vectors."""
    model = tiny.model()
    groups = [
        {"params": list(model.model.layers[0].parameters()), "rounding": "stochastic", "lr": 1e-4},
        {"params": list(model.model.layers[1].parameters()), "seed": 5},
    ]
    with pytest.warns(UserWarning, match="vocab_size="):
        opt = FairCastMuon(groups, lr=1e-3)
    found = {(g["algorithm"], g["rounding"], g["seed"], g["lr"]) for g in opt.param_groups}
    assert found == {
        (side, *rest) for side in ("muon", "adamw") for rest in (("stochastic", 0, 1e-4), ("dither", 5, 1e-3))
    }
