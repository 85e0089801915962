"""What ``fcoptim audit`` and ``fcoptim diff`` print, and their exit codes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..bench.table import print_table
from . import audit as audits
from .difference import Change, diff
from .layout import CheckpointError

_OFFENDERS = 5


def audit_checkpoint(path: Path) -> int:
    """Print the audit of a checkpoint; returns 0 if it is whole and its halves agree, else 1."""
    report = audits.audit(path)
    total = sum((row.fit for row in report.rows if row.fit is not None), audits.Fit())
    rows = [(row.name, row.rule, f"{row.elements:,}", f"{row.differing:,}", *_figures(row.fit)) for row in report.rows]
    rows.append(("all that were cast", "", f"{total.elements:,}", "", *_figures(total)))
    if report.rows:
        print_table(
            f"{report.folder}, step {report.step}",
            ("tensor", "rule", "elements", "not as cast", "= nearest", "mean ulps", "RMS ulps", "max ulps"),
            rows,
            texts=2,
        )
    for problem in report.problems:
        print(f"problem: {problem}")
    print("verdict: whole, and the served weights are the cast of the masters" if report.ok else "verdict: damaged")
    return 0 if report.ok else 1


def audit_pair(served: Path, masters: Path, start: Path | None) -> int:
    """Print how one set of weights serves another; returns 0."""
    fits = audits.compare(served, masters, start)
    total = sum(fits.values(), audits.Fit())
    headings = ["tensor", "elements", "= nearest", "mean ulps", "RMS ulps", "max ulps", "not finite"]
    if start is not None:
        headings.append("movement served")

    def row(name: str, fit: audits.Fit) -> Sequence[str]:
        cells = [name, f"{fit.elements:,}", *_figures(fit), f"{fit.nonfinite:,}"]
        return cells if start is None else [*cells, f"{fit.tracked:.3f}"]

    rows = [row(name, fit) for name, fit in fits.items()]
    print_table(f"{served} against {masters}", headings, [*rows, row("all", total)])
    worst = sorted(fits, key=lambda name: fits[name].rms, reverse=True)[:_OFFENDERS]
    print("largest RMS errors: " + ", ".join(f"{name} ({fits[name].rms:.3f} ulps)" for name in worst))
    others = audits.left_out(served, masters)
    if others:
        print(f"not compared, as only one side has them: {', '.join(others[:5])}{' ...' if len(others) > 5 else ''}")
    if total.nearest == total.elements:
        print("verdict: rounded to nearest; updates below half an ulp are not served")
    elif total.largest < 1:
        print("verdict: within one ulp everywhere, not rounded to nearest")
    else:
        print("verdict: further than one ulp away; not a cast of these masters")
    return 0


def _figures(fit: audits.Fit | None) -> tuple[str, str, str, str]:
    if fit is None:
        return ("", "", "", "")
    return (f"{fit.nearest_share:.2%}", f"{fit.mean:+.4f}", f"{fit.rms:.4f}", f"{fit.largest:.3f}")


def print_difference(a: Path, b: Path) -> int:
    """Print which bits differ between two sets of weights; returns 0 if none do, else 1."""
    found = diff(a, b)

    def row(name: str, change: Change) -> Sequence[str]:
        sizes = (change.dense, change.sparse, change.packed)
        return (name, f"{change.elements:,}", f"{change.changed:,}", f"{change.share:.4%}", *map(_size, sizes))

    rows = [row(name, change) for name, change in found.tensors.items()]
    print_table(
        f"{a} and {b}",
        ("tensor", "elements", "differ", "share", "dense", "sparse patch", "packed patch"),
        [*rows, row("all", found.total)],
    )
    for names, side in ((found.only_a, a), (found.only_b, b)):
        if names:
            print(f"only in {side}: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}")
    if not found.tensors:
        raise CheckpointError(f"{a} and {b} have no tensor in common")
    return 0 if found.equal else 1


def _size(count: int) -> str:
    power = min(max(len(str(count)) - 1, 0) // 3, 3)
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"
