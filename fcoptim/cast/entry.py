"""The one entry to the rounding rules: checks its input and hands it to the back end of each device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import reference
from .bits import stream_keys
from .rules import HASHED, Job, Rule, Runs, get_rule

_T = TypeVar("_T")


def cast_(
    served: torch.Tensor | Sequence[torch.Tensor],
    master: torch.Tensor | Sequence[torch.Tensor],
    *,
    rounding: str,
    key: int | Sequence[int],
    count: int | Sequence[int],
    error_feedback: torch.Tensor | Sequence[torch.Tensor] | None = None,
    start: int | Runs | Sequence[int | Runs] = 0,
    changed: torch.Tensor | None = None,
) -> None:
    """Write the bf16 rounding of fp32 masters into served tensors, in place.

    Takes one tensor or a list of them. A list costs one kernel launch per GPU and one pass over a pool of
    ``torch.get_num_threads()`` threads on the CPU, however many tensors there are. Any shape and stride goes;
    the result depends on logical element order only.

    Args:
        served: bfloat16, or float32 that is to hold bfloat16 values. Written.
        master: float32, of the same shape and device as ``served``. Read.
        rounding: ``"nearest"``, ``"stochastic"``, ``"dither"`` or ``"error_feedback"``.
        key: The parameter's 64-bit key, see ``parameter_key``; one for each tensor of a list.
        count: Which cast of the parameter this is, from 0. Only ``"stochastic"`` draws new bits by it.
        error_feedback: int16 accumulators of the same shape, needed (and updated) by ``"error_feedback"``
            alone; start them with ``start_accumulator_``.
        start: Index, in the unsharded parameter, of the first element; a shard that is not one run of the parameter
            gives its ``Runs``. Default 0.
        changed: int64 of shape ``(number of tensors,)`` on the same device, overwritten with how many served
            values changed bits. Costs one read of ``served``. Default None: not counted.

    Raises:
        ValueError: The rule is unknown; lists differ in length; shapes or devices differ; accumulators are
            missing; tensors overlap; a key or count is out of range.
        TypeError: A dtype is not one of those above.
    """
    rule = get_rule(rounding)
    jobs = _make_jobs(rule, served, master, key, count, error_feedback, start)
    if changed is not None:
        _check_changed(changed, len(jobs))
    for device, numbers in _by_device(jobs).items():
        chosen = [jobs[n] for n in numbers]
        counts = None if changed is None else torch.zeros(len(chosen), dtype=torch.int64, device=device)
        _run(device, chosen, rule.code, counts)
        if changed is not None and counts is not None:
            changed[numbers] = counts.to(changed.device)
        torch.autograd.graph.increment_version([job.served for job in chosen])


def start_accumulator_(error_feedback: torch.Tensor, *, key: int, start: int | Runs = 0) -> torch.Tensor:
    """Fill an accumulator with the dither's hash, so that the elements of a tensor are out of phase.

    Accumulators that start equal make all weights cross the grid together: late first, then too far.

    Args:
        error_feedback: int16, any shape and stride. Written.
        key: The parameter's 64-bit key.
        start: As in ``cast_``. Default 0.

    Returns:
        ``error_feedback``.
    """
    if error_feedback.dtype is not torch.int16:
        raise TypeError(f"error_feedback must be int16, got {error_feedback.dtype}")
    if isinstance(start, Runs) and start.numel != error_feedback.numel():
        raise ValueError(f"start has runs of {start.numel} elements, error_feedback {error_feedback.numel()} elements")
    keys = stream_keys(key, 0)
    plain = type(error_feedback) is torch.Tensor and error_feedback.is_cpu and error_feedback.is_contiguous()
    if plain and isinstance(start, int):
        from . import cpu

        cpu.fill_dither_(error_feedback, keys, start)
    else:
        reference.fill_dither_(error_feedback, keys, start)
    return error_feedback


def replay_(
    served: torch.Tensor,
    master: torch.Tensor,
    *,
    rounding: str,
    key: int,
    count: int,
    error_feedback: torch.Tensor | None = None,
    start: int | Runs = 0,
) -> None:
    """Write the served values of the *last* cast again, from what a checkpoint holds, changing no state.

    An accumulator that ended at ``a`` was at ``a - lo`` before the cast, modulo 2**16, so the last cast is a
    cast from there.

    Args:
        served: Written; see ``cast_``.
        master: The masters that were cast last.
        rounding: The rule of that cast.
        key: The parameter's 64-bit key.
        count: The count of that cast.
        error_feedback: The accumulators as that cast left them. Not written.
        start: As in ``cast_``. Default 0.
    """
    if not get_rule(rounding).accumulates:
        cast_(served, master, rounding=rounding, key=key, count=count, start=start)
        return
    if error_feedback is None:
        raise ValueError("rounding='error_feedback' needs its accumulators to replay a cast; got None")
    before = reference.rewind(error_feedback, master)
    cast_(served, master, rounding=rounding, key=key, count=count, error_feedback=before)


def _as_list(value: _T | Sequence[_T], length: int, name: str) -> list[_T]:
    """Spread a scalar over ``length`` entries, or check a sequence's length."""
    if isinstance(value, torch.Tensor) or not isinstance(value, Sequence):
        return [value] * length
    if len(value) != length:
        raise ValueError(f"got {length} served tensors but {len(value)} values of {name}")
    return list(value)


def _make_jobs(
    rule: Rule,
    served: torch.Tensor | Sequence[torch.Tensor],
    master: torch.Tensor | Sequence[torch.Tensor],
    key: int | Sequence[int],
    count: int | Sequence[int],
    error_feedback: torch.Tensor | Sequence[torch.Tensor] | None,
    start: int | Runs | Sequence[int | Runs],
) -> list[Job]:
    targets = [served] if isinstance(served, torch.Tensor) else list(served)
    if isinstance(master, torch.Tensor) != isinstance(served, torch.Tensor):
        raise ValueError("served and master must both be tensors or both be lists of tensors")
    masters = _as_list(master, len(targets), "master")
    keys = _as_list(key, len(targets), "key")
    counts = _as_list(count, len(targets), "count")
    starts = _as_list(start, len(targets), "start")
    if rule.accumulates and error_feedback is None:
        raise ValueError("rounding='error_feedback' needs error_feedback=, int16 accumulators shaped as master")
    accumulators: list[torch.Tensor | None] = [None] * len(targets)
    if rule.accumulates and error_feedback is not None:
        accumulators = list(_as_list(error_feedback, len(targets), "error_feedback"))
    jobs = []
    for target, source, k, c, s, accumulator in zip(targets, masters, keys, counts, starts, accumulators):
        if isinstance(s, Runs):
            s = _check_runs(s, rule, target, source)
        if any(isinstance(number, bool) or not isinstance(number, int | Runs) for number in (k, c, s)):
            raise TypeError(f"key, count and start must be integers; got {k!r}, {c!r}, {s!r}")
        if not (0 <= k < 1 << 64 and c >= 0 and (isinstance(s, Runs) or 0 <= s < 1 << 61)):
            raise ValueError(f"key must lie in [0, 2**64), count be >= 0, start in [0, 2**61); got {k}, {c}, {s}")
        _check_tensors(target, source, accumulator)
        keys_of_cast = stream_keys(k, c if rule.counts else 0)
        jobs.append(Job(target.detach(), source.detach(), keys_of_cast, s, accumulator))
    return jobs


def _check_runs(runs: Runs, rule: Rule, served: torch.Tensor, master: torch.Tensor) -> int | Runs:
    """Return what ``start`` comes to: runs only where the rule looks at indices and there are several."""
    if runs.numel != master.numel():
        raise ValueError(f"start has runs of {runs.numel} elements, master {master.numel()} elements")
    if rule.code != HASHED or len(runs.starts) < 2:
        return int(runs.starts[0]) if len(runs.starts) else 0
    if runs.end > 1 << 61:
        raise ValueError(f"runs must end below element 2**61, got {runs.end}")
    if not (served.is_contiguous() and master.is_contiguous()):
        raise ValueError("a shard of several runs must be contiguous, served and master; call contiguous() on them")
    return runs


def _check_tensors(served: torch.Tensor, master: torch.Tensor, accumulator: torch.Tensor | None) -> None:
    for name, tensor in (("served", served), ("master", master), ("error_feedback", accumulator)):
        if tensor is not None and is_traceable_wrapper_subclass(tensor):
            kind = type(tensor).__name__
            raise TypeError(f"{name} is a {kind}; pass its local part, and where that lies in the whole as start=")
    if served.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"served must be bfloat16 or float32, got {served.dtype}")
    if master.dtype is not torch.float32:
        raise TypeError(f"master must be float32, got {master.dtype}")
    others = [("master", master)]
    if accumulator is not None:
        if accumulator.dtype is not torch.int16:
            raise TypeError(f"error_feedback must be int16, got {accumulator.dtype}")
        others.append(("error_feedback", accumulator))
    for name, other in others:
        if other.shape != served.shape:
            raise ValueError(f"{name} has shape {tuple(other.shape)}, served {tuple(served.shape)}")
        if other.device != served.device:
            raise ValueError(f"{name} is on {other.device}, served on {served.device}")
    for name, tensor in [("served", served), *others[1:]]:
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride())):
            raise ValueError(f"{name} is an expanded tensor, whose elements share memory; pass a copy of it")
    same_memory = served.untyped_storage().data_ptr() == master.untyped_storage().data_ptr()
    if same_memory and served.numel() > 0 and served.device.type != "meta":
        raise ValueError("served and master share their memory; the masters would be lost")


def _check_changed(changed: torch.Tensor, length: int) -> None:
    if changed.dtype is not torch.int64 or changed.shape != (length,):
        found = f"{changed.dtype} of shape {tuple(changed.shape)}"
        raise ValueError(f"changed must be int64 of shape ({length},), got {found}")


def _by_device(jobs: Sequence[Job]) -> dict[torch.device, list[int]]:
    groups: dict[torch.device, list[int]] = {}
    for number, job in enumerate(jobs):
        groups.setdefault(job.served.device, []).append(number)
    return groups


def _run(device: torch.device, jobs: Sequence[Job], code: int, changed: torch.Tensor | None) -> None:
    """Hand the jobs to the device's back end; the imports are late as each brings a compiler along."""
    if device.type == "cpu":
        from . import cpu

        cpu.cast_jobs(jobs, code, changed)
    elif device.type == "cuda":
        from . import gpu

        gpu.cast_jobs(jobs, code, changed)
    elif device.type != "meta":
        reference.cast_jobs(jobs, code, changed)
