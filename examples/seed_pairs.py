"""Matched seed-pairs: the same weights, prompts, order and sampling seeds; only the rounding rule differs.

    python examples/seed_pairs.py run --preset cpu --out runs/pairs --workers 2
    python examples/seed_pairs.py report --out runs/pairs

``run`` trains every cell of the preset's grid that is not finished yet, so it can be stopped and started again.
``report`` makes summaries, tables and plots from the logs; see ``examples/pairs_report.py``. ``--preset paper`` is the
protocol at full size, for GPUs.
"""

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import small
import torch
from grpo import Config, train
from pairs_tables import ARMS
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

LAGGED = ("nearest+ema:40", "nearest+delay:40", "nearest+dead_zone:1")
# Fixed before any run: two ends of a pair whose held-out rewards differ by no more than this are tied.
TIE = 0.01


@dataclasses.dataclass(frozen=True)
class Setting:
    """A block of the grid: every arm at every learning rate with every seed.

    Attributes:
        name: Of the block, and of the folder its runs lie in.
        options: Of ``grpo.Config``, the same in all of its runs.
        lrs: Learning rates.
        arms: Rounding rules, with a lag behind a plus: ``"nearest+ema:40"``.
        seeds: How many seeds, counted from 0.
        bases: Models. A pair's seed chooses one, in turn. Names that start with ``small/`` are trained by
            ``examples/small.py`` when the grid is first run: ``small/addition/0/width=96``.
    """

    name: str
    options: dict[str, Any]
    lrs: tuple[float, ...]
    arms: tuple[str, ...] = ARMS
    seeds: int = 10
    bases: tuple[str, ...] = ("smollm2",)

    def cells(self, seed: int) -> Iterator["Cell"]:
        """The block's runs with one seed."""
        for lr, arm in itertools.product(self.lrs, self.arms):
            yield Cell(self.name, arm, lr, seed, self.bases[seed % len(self.bases)])


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    setting: str
    arm: str
    lr: float
    seed: int
    base: str

    def folder(self, out: Path) -> Path:
        """Where its log lies."""
        return out / self.setting / f"{self.arm.replace(':', '')}_lr{self.lr:g}_seed{self.seed}"

    def config(self, out: Path, options: dict[str, Any]) -> Config:
        """What ``examples/grpo.py`` is told."""
        rounding, _, lag = self.arm.partition("+")
        model = str(out / self.base) if self.base.startswith("small/") else self.base
        folder = str(self.folder(out))
        return Config(model=model, rounding=rounding, lag=lag, lr=self.lr, seed=self.seed, out=folder, **options)


def _bases(task: str) -> tuple[str, ...]:
    return tuple(f"small/{task}/{seed}/width=96" for seed in range(3))


_SMALL: dict[str, Any] = {"prompts": 16, "group": 8, "max_new_tokens": 5, "eval_prompts": 1024, "steps": 150}
_TASKS: dict[str, dict[str, Any]] = {name: {**_SMALL, "task": name} for name in small.TASKS}
_LRS = (1e-6, 4e-6, 1.6e-5)
_NEAREST_AND_TWO = ("nearest", "stochastic", "dither")
_LM: dict[str, Any] = {"prompts": 4, "group": 8, "max_new_tokens": 8, "eval_prompts": 16, "steps": 12}
_LM_TASKS: dict[str, dict[str, Any]] = {
    "spell_backward": {"shots": 1, "task_options": '{"max_word_len": 4}'},
    "coin_flip": {"shots": 2},
}


def _cpu() -> Iterator[Setting]:
    """Small transformers on two tasks; an hour and a half on two cores with AVX-512."""
    for task, options in _TASKS.items():
        yield Setting(f"{task}-adamw", options, _LRS, seeds=10, bases=_bases(task))
        muon = {**options, "optimizer": "muon", "prompts": 8}
        yield Setting(f"{task}-muon", muon, _LRS, seeds=5, bases=_bases(task))
        yield Setting(f"{task}-lags", options, (4e-6,), arms=("nearest", *LAGGED), seeds=5, bases=_bases(task))


def _map() -> Iterator[Setting]:
    """Where on bf16 the gap might be large: longer lags and runs, stale and reused rollouts, a larger model's rates."""
    addition, zebra = _TASKS["addition"], _TASKS["zebra"]
    common: dict[str, Any] = {"arms": _NEAREST_AND_TWO, "seeds": 2}
    yield Setting("map-long-lag", {**addition, "steps": 600}, (5e-7,), bases=_bases("addition"), **common)
    yield Setting("map-stale", {**addition, "stale": 16, "steps": 240}, (2e-6,), bases=_bases("addition"), **common)
    yield Setting("map-reuse", {**addition, "epochs": 4, "steps": 240}, (2e-6,), bases=_bases("addition"), **common)
    yield Setting("map-zebra-long", {**zebra, "steps": 400}, (4e-6,), bases=_bases("zebra"), **common)
    coins: dict[str, Any] = {**_LM, **_LM_TASKS["coin_flip"], "task": "coin_flip"}
    two = ("nearest", "dither")
    yield Setting("map-coin-rates", coins, (8e-6, 3.2e-5), two, seeds=2)
    yield Setting("map-coin-long", {**coins, "steps": 36}, (2e-6,), two, seeds=1)


def _smollm2() -> Iterator[Setting]:
    """SmolLM2-135M on two tasks that it starts at a reward of 0.1 to 0.2 on."""
    for task, options in _LM_TASKS.items():
        yield Setting(f"smollm2-{task}", {**_LM, **options, "task": task}, (2e-6,), _NEAREST_AND_TWO, seeds=4)


def _paper() -> Iterator[Setting]:
    """The published protocol's size: Qwen3 from 0.6B to 4B, AdamW and Muon, 25 seed-pairs. Needs GPUs."""
    options = {
        "task": "zebra_puzzles",
        "prompts": 32,
        "group": 8,
        "max_new_tokens": 1024,
        "shots": 0,
        "steps": 300,
        "eval_prompts": 512,
        "eval_every": 50,
        "save_every": 50,
    }
    for name, seeds in (("0.6B", 7), ("1.7B", 4), ("4B", 2)):
        for optimizer, lr in (("adamw", 1e-6), ("muon", 1e-6)):
            chosen = {**options, "optimizer": optimizer}
            count = seeds - 1 if (name, optimizer) == ("0.6B", "muon") else seeds
            yield Setting(f"qwen3-{name}-{optimizer}", chosen, (lr,), ARMS, count, (f"Qwen/Qwen3-{name}",))


PRESETS = {"cpu": _cpu, "map": _map, "smollm2": _smollm2, "paper": _paper}


def make_base(base: str, out: Path) -> None:
    """Train a base model of ``examples/small.py`` unless it is there."""
    _, task, seed, width = base.split("/")
    if not (out / base).exists():
        (out / base).parent.mkdir(parents=True, exist_ok=True)
        small.save_base(task, out / base, seed=int(seed), target=0.35, width=int(width.removeprefix("width=")))


def _run_cell(cell: Cell, out: Path, options: dict[str, Any]) -> str | None:
    """Train one cell; return what went wrong, if anything."""
    try:
        train(cell.config(out, options), quiet=True)
    except Exception:
        return traceback.format_exc()
    return None


def _start_worker(threads: int, parent: int) -> None:
    torch.set_num_threads(threads)
    transformers_logging.disable_progress_bar()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """Stop when the grid is killed: a run that went on alone would write into the log of the next one."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def run(settings: list[Setting], out: Path, *, workers: int, threads: int) -> int:
    """Train all cells, those with the smallest seeds first, so that a stopped grid holds whole pairs.

    Args:
        settings: The grid.
        out: Folder of the grid.
        workers: Processes.
        threads: Of torch, in each.

    Returns:
        How many cells failed; their errors are printed.
    """
    out.mkdir(parents=True, exist_ok=True)
    for setting in settings:  # the protocol, written before its runs
        (out / setting.name).mkdir(exist_ok=True)
        record = {"tie": TIE, **dataclasses.asdict(setting)}
        (out / setting.name / "setting.json").write_text(json.dumps(record, indent=1) + "\n")
    bases = {base for setting in settings for base in setting.bases if base.startswith("small/")}
    options = {setting.name: setting.options for setting in settings}
    seeds = max(setting.seeds for setting in settings)
    cells = [c for seed in range(seeds) for setting in settings if seed < setting.seeds for c in setting.cells(seed)]
    failed = 0
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        workers, mp_context=spawn, initializer=_start_worker, initargs=(threads, os.getpid())
    ) as pool:
        for made in [pool.submit(make_base, base, out) for base in sorted(bases)]:
            made.result()
        futures = {pool.submit(_run_cell, cell, out, options[cell.setting]): cell for cell in cells}
        for future in tqdm(as_completed(futures), total=len(futures), unit="run"):
            error = future.result()
            if error:
                failed += 1
                print(f"{futures[future].folder(out)}\n{error}")
    return failed


def main() -> None:
    """Run a grid, or report on one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    grid = commands.add_parser("run", help="train what is not finished")
    grid.add_argument("--preset", choices=PRESETS, default="cpu")
    grid.add_argument("--only", default="", help="settings whose names contain this")
    grid.add_argument("--seeds", type=int, default=0, help="at most so many seeds of each setting; 0: all")
    grid.add_argument("--steps", type=int, default=0, help="so many steps instead of the preset's; 0: the preset's")
    grid.add_argument("--workers", type=int, default=1)
    grid.add_argument("--threads", type=int, default=1, help="of torch, in each process")
    grid.add_argument("--out", type=Path, default=Path("runs/pairs"))
    summary = commands.add_parser("report", help="summaries, tables and plots from the logs")
    summary.add_argument("--out", type=Path, default=Path("runs/pairs"))
    args = parser.parse_args()
    if args.command == "report":
        import pairs_report

        print(pairs_report.write(args.out))
        return
    settings = [setting for setting in PRESETS[args.preset]() if args.only in setting.name]
    if not settings:
        raise SystemExit(f"no setting of {args.preset} contains {args.only!r}")
    if args.seeds:
        settings = [dataclasses.replace(s, seeds=min(s.seeds, args.seeds)) for s in settings]
    if args.steps:
        settings = [dataclasses.replace(s, options={**s.options, "steps": args.steps}) for s in settings]
    if run(settings, args.out, workers=args.workers, threads=args.threads):
        raise SystemExit("some cells failed; start the same command again to retry them")


if __name__ == "__main__":
    main()
