"""To and from plain torch checkpoints: an fp32 model and the wrapped optimizer on its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import loading
from ..link import OWN_OPTIONS
from ..masters import GLOBAL, wrapped_part
from ..naming import canonical_name
from ..optimizer import FairCastOptimizer, unwrap
from . import naming
from .folder import resolve
from .layout import CheckpointError
from .opened import Opened, copied, open_weights
from .save import wait_for
from .start import start_from

_MODEL_KEYS = ("model", "state_dict", "model_state_dict")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict")

Weights = dict[str, Any]


def to_torch(
    path: str | os.PathLike[str], model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Read a checkpoint as what plain fp32 training saves, and load it if a model or optimizer is given.

    Args:
        path: A folder that ``save_checkpoint`` wrote. Its hashes are checked.
        model: An fp32 model; gets the masters.
        optimizer: The wrapped kind of optimizer, built on ``model``'s parameters; gets moments and options. Parameters
            are matched by name if ``model`` is given, else by position.

    Returns:
        ``"model"``: a state dict with fp32 masters; ``"optimizer"``: a state dict of the wrapped optimizer, parameters
        in the order of training, ``"param_names"`` in its groups; ``"step"``; ``"extra"``.

    Raises:
        CheckpointError: The checkpoint is damaged, holds only a model, or doesn't fit.
    """
    opened = Opened(resolve(path))
    damaged = opened.damaged()
    if damaged or not opened.has_state:
        raise CheckpointError(f"checkpoint {opened.folder}: {'; '.join(damaged[:5]) or 'it holds a model only'}")
    weights: Weights = {key: tensor.clone() for key, tensor in opened.masters.items()}
    weights.update({name: weights[kept] for name, kept in opened.state["tied"].items()})
    weights.update(opened.state_decoder.decode(opened.state["loose"]))
    state = _plain_state(opened)
    step = opened.manifest.step if opened.manifest is not None else 0
    if model is not None:
        plain = naming.bare(model)
        plain.load_state_dict({name: weights.get(naming.file_name(name)) for name in plain.state_dict()})
    if optimizer is not None:
        optimizer.load_state_dict(_ordered(state, optimizer, model))
    return {"model": weights, "optimizer": state, "step": step, "extra": opened.extra()}


def _plain_state(opened: Opened) -> dict[str, Any]:
    """The wrapped optimizer's state dict, without what is fcoptim's."""
    numbers: dict[str, int] = {}
    state: dict[Any, Any] = {}
    for saved in opened.parameters():
        number = numbers.setdefault(saved.name, len(numbers))
        part = {key: copied(value) for key, value in wrapped_part(saved.entry).items()}
        if part:
            state[number] = part
        state.update(saved.entry.get(GLOBAL, {}))
    groups = []
    for group in opened.groups:
        options = {key: value for key, value in group.items() if key not in OWN_OPTIONS}
        names = group["param_names"]
        groups.append({**options, "param_names": names, "params": [numbers[name] for name in names]})
    return {"state": state, "param_groups": groups}


def _ordered(state: dict[str, Any], optimizer: torch.optim.Optimizer, model: nn.Module | None) -> dict[str, Any]:
    """The state in the order of an optimizer's parameters, for torch's own loader, which goes by position."""
    if model is None:
        groups = [{k: v for k, v in group.items() if k != "param_names"} for group in state["param_groups"]]
        return {**state, "param_groups": groups}
    names = {id(param): canonical_name(name) for name, param in model.named_parameters()}
    wanted = [
        {"params": group["params"], "param_names": [names.get(id(param), "?") for param in group["params"]]}
        for group in optimizer.param_groups
    ]
    try:
        matched = loading.match_groups(wanted, state["param_groups"])
    except ValueError as error:
        raise CheckpointError(f"the checkpoint doesn't fit this optimizer: {error}") from error
    groups = []
    for group, (saved, ids) in zip(wanted, matched):
        options = {key: value for key, value in saved.items() if key != "param_names"}
        groups.append({**options, "params": [ids[name] for name in group["param_names"]]})
    return {"state": state["state"], "param_groups": groups}


def from_torch(source: str | os.PathLike[str] | Mapping[str, Any], opt: FairCastOptimizer) -> None:
    """Begin from a plain torch checkpoint: its weights become the masters, its moments are taken over.

    Masters keep every bit of fp32 weights. Counts, accumulators and lags begin as in a new optimizer.

    Args:
        source: A state dict of the model; a dict with ``"model"`` and, if there is one, ``"optimizer"`` state dicts;
            a file of either (read with ``weights_only=True``, so that nothing in it is run); or a safetensors file or
            folder of weights.
        opt: An optimizer of the kind that the state is of, on the same model.

    Raises:
        CheckpointError: It can't be read, or doesn't fit. Nothing was changed.
    """
    opt = unwrap(opt)
    wait_for(opt)
    name, content, tied = _read(source)
    weights, state = _halves(content, name)
    if state is not None:
        _check_state(opt, state, name)
    start_from(opt, weights, tied, name)
    if state is not None:
        opt.load_state_dict(dict(state))


def _read(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[str, Mapping[str, Any], Mapping[str, str]]:
    """What a source holds, with its name for messages and the ties it tells of."""
    if isinstance(source, Mapping):
        return "the checkpoint", source, {}
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {os.fspath(source)!r}")
    if path.is_dir() or path.suffix == ".safetensors":
        found = open_weights(resolve(path))
        return str(path), found, found.metadata
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what torch raises on files that are none of its own has many types
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{path} can't be read, or not without running code in it: {reason}. Save plain state dicts (of tensors, "
            "numbers, texts) with torch.save"
        ) from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a state dict")
    return str(path), content, {}


def _halves(content: Mapping[str, Any], name: str) -> tuple[dict[str, torch.Tensor], Mapping[str, Any] | None]:
    """Weights by the folder's names, and an optimizer's state dict or None."""
    model = next((content[key] for key in _MODEL_KEYS if isinstance(content.get(key), Mapping)), None)
    state = next((content[key] for key in _OPTIMIZER_KEYS if isinstance(content.get(key), Mapping)), None)
    model = content if model is None else model
    if all(key.startswith("module.") for key in model):  # saved from inside DistributedDataParallel
        model = {key.removeprefix("module."): value for key, value in model.items()}
    weights = {naming.file_name(key): value for key, value in model.items()}
    for key, value in weights.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{name} holds {key!r}, a {type(value).__name__}: pass a model's state dict, or a dict with 'model' "
                "and 'optimizer' state dicts"
            )
    return weights, state


def _check_state(opt: FairCastOptimizer, state: Mapping[str, Any], source: str) -> None:
    """Refuse an optimizer's state that doesn't fit, which may have been saved in another order of parameters."""
    try:
        matched = loading.match_groups(opt.param_groups, state["param_groups"])
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"the optimizer's state in {source} doesn't fit: {error}") from error
    for members, (_, ids) in zip(opt._members(), matched):
        for member in members:
            for key, value in dict(state["state"].get(ids[member.name], {})).items():
                if isinstance(value, torch.Tensor) and not _fits(value.shape, member.param.shape):
                    raise CheckpointError(
                        f"the optimizer's state in {source} doesn't fit: {key} of {member.name!r} has shape "
                        f"{tuple(value.shape)}, the parameter {tuple(member.param.shape)}; was it saved with "
                        "parameters in another order?"
                    )


def _fits(found: torch.Size, wanted: torch.Size) -> bool:
    """Whether state of one shape can belong to a parameter of another.

    Factored moments have ones in their shapes, or lack dimensions; LBFGS keeps flat vectors of all parameters.
    """
    if len(found) == len(wanted):
        return all(a in (b, 1) for a, b in zip(found, wanted))
    return all(a in (1, *wanted) for a in found) or (len(found) == 1 and found.numel() > wanted.numel())
