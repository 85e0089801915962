"""The command ``fcoptim``. Each command imports what it runs when it is called."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from .cast import DEFAULT

USAGE_ERROR = 2

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Unbiased fp32-to-bf16 export for RL post-training.",
)
bench = typer.Typer(invoke_without_command=True, help="Measure the kernels on this machine.")
app.add_typer(bench, name="bench")


@contextmanager
def _one_line_errors(extra: str = "demo") -> Iterator[None]:
    """End with one line and exit code 2 on wrong input or a missing package."""
    try:
        yield
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(USAGE_ERROR) from error
    except ImportError as error:
        hint = f'pip install "fcoptim[{extra}]"'
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        typer.echo(f"error: {text}" if hint in text else f"error: {text}: {hint}", err=True)
        raise typer.Exit(USAGE_ERROR) from error


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """Read ``key=value`` pairs; a value that is JSON is taken as such, anything else as text.

    Raises:
        ValueError: A pair has no ``=`` or no key.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise ValueError(f"--task-option takes key=value, for example max_word_len=5; got {pair!r}")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return options


@app.command()
def demo(
    task: Annotated[str, typer.Option(help="Any dataset of reasoning-gym.")] = "coin_flip",
    task_option: Annotated[list[str] | None, typer.Option(help="Option of the dataset, key=value.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 20,
    lr: Annotated[float, typer.Option(help="AdamW's learning rate.")] = 1e-6,
    rounding: Annotated[
        str, typer.Option(help="Rule that serves the trained policy: nearest, stochastic, dither, error_feedback.")
    ] = "stochastic",
    seed: Annotated[int, typer.Option(help="Seed of rounding, sampling and task.")] = 0,
    prompts: Annotated[int, typer.Option(help="Prompts in each step.")] = 4,
    group: Annotated[int, typer.Option(help="Completions for each prompt.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Longest completion, in tokens.")] = 12,
    shots: Annotated[int, typer.Option(help="Solved examples in each prompt.")] = 2,
    temperature: Annotated[float, typer.Option(help="Of the sampling.")] = 1.0,
    out: Annotated[Path, typer.Option(help="Folder for JSONL and PNG; a new one if it holds a run.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Train SmolLM2-135M on a verifiable task and cast its masters by every rule side by side."""
    with _one_line_errors():
        from .demo.run import run
        from .demo.train import Settings

        settings = Settings(
            task=task,
            task_options=parse_options(task_option or []),
            steps=steps,
            lr=lr,
            rounding=rounding,
            seed=seed,
            prompts=prompts,
            group=group,
            max_new_tokens=max_new_tokens,
            shots=shots,
            temperature=temperature,
            out=out,
        )
        code = run(settings)
    raise typer.Exit(code)


Elements = Annotated[int, typer.Option(help="Elements of the large tensor.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; torch's own number if not given.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]


@bench.callback()
def bench_default(context: typer.Context) -> None:
    """Measure on this machine; without a subcommand, the cast."""
    if context.invoked_subcommand is None:
        bench_cast()


@bench.command("cast")
def bench_cast(elements: Elements = 64 << 20, threads: Threads = None, device: Device = "cpu") -> None:
    """Time every rounding rule against served.copy_(master)."""
    with _one_line_errors():
        from .bench.cast import main

        main(elements, threads, device)


@bench.command("checkpoint")
def bench_checkpoint(
    megabytes: Annotated[int, typer.Option(help="Size of the checkpoint.")] = 1000,
    folder: Annotated[
        Path | None, typer.Option(help="Where to write; the system's temporary folder if not given.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Timed saves and loads of each.")] = 5,
) -> None:
    """Time save_checkpoint and load_checkpoint against torch.save and torch.load of the same bytes."""
    with _one_line_errors():
        from .bench.checkpoint import main

        main(megabytes, folder, rounds)


@bench.command("distributed")
def bench_distributed(
    ranks: Annotated[int, typer.Option(help="Processes.")] = 2,
    width: Annotated[int, typer.Option(help="Width of the model's layers.")] = 256,
    layers: Annotated[int, typer.Option(help="Layers before the last one.")] = 4,
    rounding: Annotated[str, typer.Option(help="Rounding rule.")] = DEFAULT,
    steps: Annotated[int, typer.Option(help="Timed steps.")] = 5,
) -> None:
    """Count the bytes that ranks communicate in a step under DDP and FSDP2, and which of them are fcoptim's."""
    with _one_line_errors():
        from .bench.distributed import main

        main(ranks, width, layers, rounding, steps)


@bench.command("muon")
def bench_muon(
    layers: Annotated[int, typer.Option(help="Layers of SmolLM2-135M whose matrices are stepped; it has 30.")] = 30,
    threads: Threads = None,
    device: Device = "cpu",
    rounds: Annotated[int, typer.Option(help="Timed steps of each.")] = 3,
) -> None:
    """Time fcoptim.Muon against torch.optim.Muon, and count the operations of both."""
    with _one_line_errors():
        from .bench.muon import main

        main(layers, threads, device, rounds)


@bench.command("sync")
def bench_sync(
    steps: Annotated[int, typer.Option(help="Steps, each published.")] = 20,
    lr: Annotated[float, typer.Option(help="About how far a weight moves in a step.")] = 1e-6,
    device: Device = "cpu",
) -> None:
    """Weigh what each rounding rule makes a sparse weight sync carry, on a synthetic trajectory."""
    with _one_line_errors():
        from .bench.sync import main

        main(steps, lr, device)


@app.command()
def audit(
    path: Annotated[Path | None, typer.Argument(help="A checkpoint of fcoptim's.")] = None,
    served: Annotated[Path | None, typer.Option(help="Any folder or file of safetensors.")] = None,
    masters: Annotated[Path | None, typer.Option(help="Another, with the masters.")] = None,
    start: Annotated[Path | None, typer.Option(help="The weights at the start, for the share that is served.")] = None,
) -> None:
    """Check that a checkpoint is whole and its halves agree, or how well one set of weights serves another.

    The exit code is 0 if a checkpoint is in order and 1 if not.
    """
    with _one_line_errors():
        from .checkpoint import report

        if (path is None) == (served is None and masters is None) or (served is None) != (masters is None):
            raise ValueError("pass a checkpoint, or --served and --masters")
        if path is not None and start is not None:
            raise ValueError("--start goes with --served and --masters")
        if served is not None and masters is not None:
            code = report.audit_pair(served, masters, start)
        else:
            assert path is not None
            code = report.audit_checkpoint(path)
    raise typer.Exit(code)


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(help="A folder or file of safetensors, for example a checkpoint.")],
    b: Annotated[Path, typer.Argument(help="Another.")],
) -> None:
    """Count the weights whose bits differ, and weigh a sparse patch of them; exit code 1 if any do."""
    with _one_line_errors():
        from .checkpoint import report

        code = report.print_difference(a, b)
    raise typer.Exit(code)


@app.command()
def forecast(
    path: Annotated[Path, typer.Argument(help="A .safetensors file, or a model's folder.")],
    lr: Annotated[float, typer.Option(help="AdamW's learning rate.")] = 1e-6,
    beta1: Annotated[float, typer.Option(help="AdamW's.")] = 0.9,
    beta2: Annotated[float, typer.Option(help="AdamW's.")] = 0.999,
    signal: Annotated[float, typer.Option(help="Mean of a weight's gradient over its standard deviation.")] = 0.3,
    steps: Annotated[int, typer.Option(help="How far to look ahead.")] = 120,
    out: Annotated[Path, typer.Option(help="The histogram.")] = Path("forecast.png"),
) -> None:
    """Say, before any training, how late round-to-nearest will serve a model's updates."""
    with _one_line_errors():
        from .reports import forecast_report

        forecast_report(path, lr=lr, beta1=beta1, beta2=beta2, signal=signal, steps=steps, out=out)


@app.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(help="JSON lines of one or several runs.")],
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("runs.png"),
) -> None:
    """Draw changed share, tracked share, lag and reward of runs side by side."""
    with _one_line_errors():
        from .reports import plot_report

        plot_report(runs, out)


@app.command()
def version() -> None:
    """Print the versions of fcoptim and torch."""
    import torch

    from . import __version__

    typer.echo(f"fcoptim {__version__}, torch {torch.__version__}")
