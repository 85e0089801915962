"""fcoptim's own entries of an optimizer's state, and the conversion of parameters to served weights.

Beside what the wrapped optimizer keeps, ``state[p]`` holds ``"master"`` (float32), ``"cast_count"`` (a 0-d
int64 tensor on the CPU, like torch's ``step``), under error feedback ``"error_feedback"`` (int16) and, with a lag,
what ``lag.py`` lists. A parameter that is kept in fp32 has none of them: it is its own master.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from . import lag as lags
from .cast import Runs, cast_, get_rule, parameter_key, replay_, start_accumulator_
from .distributed.shards import LocalEntry, fits, is_sharded, local, place_of, placed_like

MASTER = "master"
COUNT = "cast_count"
ACCUMULATOR = "error_feedback"
GLOBAL = "wrapped_global"
OWN_KEYS = frozenset({MASTER, COUNT, ACCUMULATOR, GLOBAL}) | lags.LAG_KEYS
# What is shaped like the parameter, and sharded like it.
PLACED_KEYS = frozenset({MASTER, ACCUMULATOR, lags.LAG, lags.LAG_REST})

Entry = dict[str, Any]
# Names of parameters, and how many served values of each a cast changed.
Changes = list[tuple[list[str], torch.Tensor]]


class Member(NamedTuple):
    """One parameter of a group at this moment, with all that a cast of it needs.

    Attributes:
        name: Canonical name.
        param: The served parameter.
        entry: Its state entry, also while that is only captured.
        group: Its param group.
        place: Where ``param`` lies in the unsharded parameter, as ``cast_`` takes it under ``start``.
    """

    name: str
    param: torch.Tensor
    entry: Entry
    group: dict[str, Any]
    place: int | Runs = 0

    @property
    def local(self) -> Member:
        """The same of this rank's part, if the parameter is sharded: what casts and lags work on."""
        if not is_sharded(self.param):
            return self
        entry = LocalEntry(self.entry, self.param, PLACED_KEYS)
        return Member(self.name, local(self.param), entry, self.group, place_of(self.param))

    @property
    def kept(self) -> bool:
        """Whether the parameter is served in fp32, as its own master."""
        return MASTER not in self.entry

    @property
    def master(self) -> torch.Tensor:
        """What the wrapped optimizer steps on."""
        found: torch.Tensor = self.entry.get(MASTER, self.param)
        return found

    @property
    def target(self) -> torch.Tensor:
        """What the last cast was made from, in fp32: the master, or its lagged copy."""
        return lags.target(self.entry, self.master).to(torch.float32)

    @property
    def key(self) -> int:
        """The key of the parameter's hash."""
        return parameter_key(self.group["seed"], self.name)

    @property
    def casts(self) -> int:
        """How often the parameter was cast since its first serving."""
        return int(self.entry[COUNT])


def wrapped_part(entry: Entry) -> Entry:
    """The wrapped optimizer's share of a state entry, in a dict of its own."""
    return {key: value for key, value in entry.items() if key not in OWN_KEYS}


def check_convertible(name: str, param: torch.Tensor) -> None:
    """Refuse a parameter that has no fp32 master.

    Raises:
        TypeError: Its dtype is neither float32 nor bfloat16, or it is not a leaf.
        ValueError: It lies on the meta device.
    """
    if param.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(
            f"parameter {name!r} is {param.dtype}; masters are made from float32 or bfloat16. Convert the model "
            f"first (model.float()), or keep this parameter as it is with keep_fp32=({name!r},)"
        )
    if param.is_meta:
        raise ValueError(f"parameter {name!r} is on the meta device; materialise the model before wrapping it")
    if not param.is_leaf:
        raise ValueError(f"parameter {name!r} is not a leaf tensor: an optimizer can't train it")


def new_entry(name: str, param: torch.Tensor, rounding: str, seed: int) -> Entry:
    """Make a parameter's master and accumulator; the parameter itself is not touched.

    Args:
        name: Canonical name.
        param: float32 or bfloat16.
        rounding: The rule it will be served by.
        seed: The seed of its hash.

    Returns:
        A state entry with count 0.
    """
    entry: Entry = {
        MASTER: param.detach().to(torch.float32, copy=True),
        COUNT: torch.zeros((), dtype=torch.int64),
    }
    if get_rule(rounding).accumulates:
        accumulator_of(Member(name, param, entry, {"seed": seed}).local)
    return entry


def refit(entry: Entry, param: torch.Tensor) -> None:
    """Lay an entry out like its parameter, where a framework has sharded or moved that since the entry was made."""
    if MASTER in entry and not fits(entry[MASTER], param):
        for key in PLACED_KEYS & entry.keys():
            entry[key] = placed_like(entry[key], param)


@torch.no_grad()
def serve(members: Iterable[Member], storage: torch.dtype) -> None:
    """Give parameters the storage dtype and the first cast (count 0) of their masters.

    The Parameter object stays the same; a gradient it already has is kept, in fp32. A bfloat16 parameter that is
    to be kept in fp32 is widened.

    Args:
        members: Freshly made members.
        storage: bfloat16 or float32.
    """
    members = list(members)
    for member in members:
        param = member.param
        narrow = param.dtype is torch.bfloat16
        dtype = storage if not member.kept else torch.float32 if narrow else param.dtype
        if is_sharded(param):
            dtype = param.dtype  # the engine that shards it has settled that
        grad, param.grad = param.grad, None
        if param.dtype is not dtype:
            param.data = param.data.to(dtype)
        if grad is not None:
            widen_gradients(param)
            param.grad = grad.float() if narrow else grad
    cast_members(members, advance=False)


@torch.no_grad()
def freeze(param: torch.Tensor, storage: torch.dtype) -> None:
    """Round a parameter that is not trained to the served grid, once and to nearest."""
    rounded = param.detach().to(torch.bfloat16)
    if param.dtype is storage or is_sharded(param):
        if param.dtype is not torch.bfloat16:
            param.copy_(rounded)
    else:
        param.data = rounded.to(storage)


def cast_members(members: Iterable[Member], *, advance: bool, count_changes: bool = False) -> Changes:
    """Cast targets (masters, or their lagged copies) to served weights, one ``cast_`` call for each rule.

    Args:
        members: What to cast; those kept in fp32 are passed over.
        advance: Whether this is a new cast (counts go up by one) or the first one.
        count_changes: Whether to count the served values whose bits change.

    Returns:
        How many served values of each member changed on this rank; nothing if nobody asked.
    """
    by_rule: dict[str, list[Member]] = {}
    for member in members:
        if not member.kept:
            by_rule.setdefault(member.group["rounding"], []).append(member.local)
    changes: Changes = []
    for rounding, chosen in by_rule.items():
        if advance:
            for member in chosen:
                member.entry[COUNT].add_(1)
        accumulators = [accumulator_of(member) for member in chosen] if get_rule(rounding).accumulates else None
        device = chosen[0].param.device
        changed = torch.zeros(len(chosen), dtype=torch.int64, device=device) if count_changes else None
        cast_(
            [member.param for member in chosen],
            [member.target for member in chosen],
            rounding=rounding,
            key=[member.key for member in chosen],
            count=[member.casts for member in chosen],
            error_feedback=accumulators,
            start=[member.place for member in chosen],
            changed=changed,
        )
        if changed is not None:
            changes.append(([member.name for member in chosen], changed))
    return changes


def accumulator_of(member: Member) -> torch.Tensor:
    """The local member's accumulators; made now, at the dither's hash, if it has none yet."""
    found = member.entry.get(ACCUMULATOR)
    if found is None:
        found = torch.empty_like(member.master, dtype=torch.int16)
        start_accumulator_(found, key=member.key, start=member.place)
        member.entry[ACCUMULATOR] = found
    accumulator: torch.Tensor = found
    return accumulator


@torch.no_grad()
def replayed(member: Member) -> torch.Tensor:
    """What the last cast of a local member wrote, made anew from its state, in the parameter's dtype."""
    out = torch.empty_like(member.param)
    replay_(
        out,
        member.target,
        rounding=member.group["rounding"],
        key=member.key,
        count=member.casts,
        error_feedback=member.entry.get(ACCUMULATOR),
        start=member.place,
    )
    return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare two tensors of one dtype by their bits, so that NaNs and zeros' signs count."""
    bits = torch.int16 if a.element_size() == 2 else torch.int32
    return torch.equal(a.detach().view(bits), b.detach().view(bits))


def widen_gradients(param: torch.Tensor) -> None:
    """Let a bf16 parameter accumulate its gradient in fp32.

    ``grad_dtype = None`` lets ``.grad`` have any dtype; after a first bf16 gradient arrives it is widened, and
    later ones are added to it in fp32. Unlike ``grad_dtype = torch.float32`` this leaves code alone that
    assigns bf16 gradients by hand (distributed checkpoint's ``zeros_like``). Copies of a parameter lose both
    settings, so this is called again before each step; it does nothing where all is set.
    """
    if param.dtype is not torch.bfloat16 or not param.requires_grad or not hasattr(param, "grad_dtype"):
        return
    if param.grad_dtype is not None:
        param.grad_dtype = None
    hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    if _widen_hook not in hooks.values():
        param.register_post_accumulate_grad_hook(_widen_hook)  # type: ignore[no-untyped-call]


@torch._disable_dynamo  # type: ignore[attr-defined]
def _widen_hook(param: torch.Tensor) -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized() and not is_sharded(param):
        return  # DDP's reducer owns the gradient's dtype there
    if param.grad is not None and param.grad.dtype is torch.bfloat16:
        param.grad = param.grad.float()


def _has_fp32_statistics(module: nn.modules.batchnorm._NormBase) -> bool:
    return module.running_mean is not None and module.running_mean.dtype is torch.float32


def statistics_modules(model: nn.Module) -> Iterable[str]:
    """Names of parameters that share a kernel with fp32 running statistics and so must stay fp32 themselves.

    Batch norm's kernels take low-precision inputs with fp32 weights and fp32 statistics, or all in one dtype,
    but not bf16 weights with fp32 statistics.
    """
    for prefix, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and _has_fp32_statistics(module):
            for name, _ in module.named_parameters(recurse=False):
                yield f"{prefix}.{name}" if prefix else name
