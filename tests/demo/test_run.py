"""Whole runs on a tiny model: what is trained, shown and written, also when it is cut short."""

import dataclasses
import io
import json
import signal

import pytest
import torch
from rich.console import Console

from fcoptim.cast import RULES
from fcoptim.demo import run as run_module
from fcoptim.demo.run import header, train_and_report
from fcoptim.demo.screen import pick, table
from fcoptim.demo.task import Task
from fcoptim.demo.train import Settings, Trainer

from .test_plot import png_size


@pytest.fixture
def make(tiny, tokenizer, tmp_path):
    """A function that makes a trainer on the tiny model; keywords change its settings."""

    def build(kind: type[Trainer] = Trainer, **changes) -> Trainer:
        settings = Settings(steps=4, prompts=2, group=6, max_new_tokens=5, shots=1, lr=1e-3, out=tmp_path / "demo")
        settings = dataclasses.replace(settings, **changes)
        settings.check()
        size = settings.steps * settings.prompts
        task = Task(settings.task, size=size, seed=settings.seed, shots=settings.shots, options=settings.task_options)
        return kind(tiny(), tokenizer, task, settings)

    return build


def report(trainer: Trainer, terminal: bool = False) -> tuple[int, str]:
    text = io.StringIO()
    console = Console(file=text, width=100, force_terminal=terminal)
    code = train_and_report(trainer, header(trainer.settings, 1), console, 0.0)
    return code, text.getvalue()


def lines(folder) -> list[dict]:
    def refuse(token):
        raise ValueError(token)

    text = (folder / "steps.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


class Flat(Trainer):
    """Every answer is worth the same."""

    def _rollout(self, step):
        rollout, rewards = super()._rollout(step)
        return rollout, torch.full_like(rewards, 0.25)


class Late(Trainer):
    """All answers of a group differ in two steps, and are worth the same from the third on."""

    def _rollout(self, step):
        rollout, rewards = super()._rollout(step)
        spread = torch.arange(rewards.shape[1]).expand_as(rewards).double()
        return rollout, spread if step < 3 else torch.zeros_like(rewards)


class Stopped(Trainer):
    """Someone presses Ctrl-C in the middle of a step."""

    at = 3

    def _rollout(self, step):
        if step == self.at:
            signal.raise_signal(signal.SIGINT)
        return super()._rollout(step)


class StoppedAtOnce(Stopped):
    at = 1


class TestRecords:
    @pytest.mark.parametrize("rounding", RULES)
    def test_jsonl_and_png_are_well_formed(self, make, tmp_path, rounding):
        code, text = report(make(rounding=rounding))
        assert code == 0
        first, *steps, last = lines(tmp_path / "demo")
        assert first["kind"] == "header" and first["versions"]["torch"] == torch.__version__
        assert first["settings"]["rounding"] == rounding and first["settings"]["steps"] == 4
        assert [record["step"] for record in steps] == [1, 2, 3, 4]
        for record in steps:
            assert list(record["rules"]) == list(RULES)
            assert record["served_equals_its_copy"] is True
            assert set(record["seconds"]) == {"rollout", "loss", "step", "casts", "measures"}
            for measure in record["rules"].values():
                assert 0 <= measure["changed"] <= 1
        assert (last["kind"], last["status"], last["steps"]) == ("end", "complete", 4)
        assert png_size(tmp_path / "demo" / "tracking.png")[0] > 1000
        assert "equalled the " + rounding + " copy bit for bit" in text
        assert f"results: {tmp_path / 'demo'}" in text

    def test_the_measures_are_those_of_the_model_that_was_trained(self, make):
        """Tracked share, changed share and displacement once more, from the model itself."""
        trainer = make(rounding="dither")
        start = {name: p.detach().clone().double() for name, p in trainer.policy.named_parameters()}
        before = {name: p.detach().clone() for name, p in trainer.policy.named_parameters()}
        for record in trainer.steps():
            masters = dict(trainer.opt.named_masters())
            served = dict(trainer.policy.named_parameters())
            pairs = [(masters[n].double() - start[n], served[n].detach().double() - start[n]) for n in start]
            squares = sum(float((d * d).sum()) for d, _ in pairs)
            products = sum(float((d * s).sum()) for d, s in pairs)
            changed = sum(int((served[n] != before[n]).sum()) for n in start) / sum(p.numel() for p in start.values())
            found = record["rules"]["dither"]
            assert found["tracked"] == pytest.approx(products / squares, rel=1e-9)
            assert found["changed"] == pytest.approx(changed, abs=1e-12)
            assert record["master_displacement_l2"] == pytest.approx(squares**0.5, rel=1e-9)
            before = {name: p.detach().clone() for name, p in served.items()}

    def test_the_same_seed_gives_the_same_run(self, make, tmp_path):
        state = torch.get_rng_state()
        runs = []
        for seed in (1, 1, 2):
            trainer = make(seed=seed)
            torch.set_rng_state(state)
            runs.append([{**record, "seconds": None} for record in trainer.steps()])
        assert torch.equal(state, torch.get_rng_state()), "the global random state was used"
        assert runs[0] == runs[1] != runs[2]

    def test_an_earlier_run_is_never_overwritten(self, make, tmp_path):
        report(make(steps=1))
        old = {path: path.read_bytes() for path in (tmp_path / "demo").iterdir()}
        _, text = report(make(steps=2))
        assert {path: path.read_bytes() for path in (tmp_path / "demo").iterdir()} == old
        assert len(lines(tmp_path / "demo-2")) == 4
        assert f"this one goes to {tmp_path / 'demo-2'}" in text


class TestSignal:
    def test_no_signal_at_all(self, make, tmp_path):
        """Gradients are zero, so AdamW's weight decay alone moves the masters; the run says so."""
        trainer = make(Flat)
        norm = sum(float(master.double().square().sum()) for _, master in trainer.opt.named_masters()) ** 0.5
        _, text = report(trainer)
        *steps, last = lines(tmp_path / "demo")[1:]
        assert [record["groups_with_signal"] for record in steps] == [0] * 4
        assert all(record["loss"] == 0.0 for record in steps)
        assert last["steps_without_signal"] == 4
        assert "4 of 4 steps had no signal" in text
        decayed = norm * (1 - (1 - 1e-3 * 1e-2) ** 4)
        assert steps[-1]["master_displacement_l2"] == pytest.approx(decayed, rel=1e-2)

    def test_momentum_goes_on_without_signal(self, make, tmp_path):
        _, text = report(make(Late))
        *steps, last = lines(tmp_path / "demo")[1:]
        assert [record["groups_with_signal"] for record in steps] == [2, 2, 0, 0]
        assert last["steps_without_signal"] == 2
        assert "2 of 4 steps had no signal" in text
        distance = [record["master_displacement_l2"] for record in steps]
        assert distance[0] < distance[1] < distance[2] < distance[3]


class TestInterrupted:
    @pytest.fixture(autouse=True)
    def ctrl_c_heard(self):
        """A test run that was started in the background ignores it."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
        signal.signal(signal.SIGINT, before)

    def test_ctrl_c_keeps_lines_table_and_figure(self, make, tmp_path):
        code, text = report(make(Stopped))
        assert code == 130
        first, *steps, last = lines(tmp_path / "demo")
        assert first["kind"] == "header"
        assert [record["step"] for record in steps] == [1, 2]
        assert (last["status"], last["steps"]) == ("interrupted", 2)
        assert png_size(tmp_path / "demo" / "tracking.png")
        assert "interrupted after 2 of 4 steps" in text and "stochastic *" in text

    def test_ctrl_c_before_the_first_step_is_done(self, make, tmp_path):
        code, text = report(make(StoppedAtOnce))
        assert code == 130 and "interrupted after 0 of 4 steps" in text
        assert [record["kind"] for record in lines(tmp_path / "demo")] == ["header", "end"]
        assert not (tmp_path / "demo" / "tracking.png").exists()

    def test_lines_survive_a_crash(self, make, tmp_path):
        class Crash(Trainer):
            def _rollout(self, step):
                if step == 3:
                    raise MemoryError("no more")
                return super()._rollout(step)

        with pytest.raises(MemoryError):
            report(make(Crash))
        assert [record["kind"] for record in lines(tmp_path / "demo")] == ["header", "step", "step"]

    def test_ctrl_c_while_loading_writes_nothing(self, tmp_path, monkeypatch):
        def load():
            raise KeyboardInterrupt

        monkeypatch.setattr(run_module, "load_smollm2", load)
        text = io.StringIO()
        assert run_module.run(Settings(out=tmp_path / "demo"), Console(file=text)) == 130
        assert "nothing was written" in text.getvalue() and not list(tmp_path.iterdir())


CELLS = [
    (0.0039, 0.003, "0.39% / 0.003"),
    (0.0999499, 1.163, "9.99% / 1.163"),
    (0.0999999, 1.0, "10.0% / 1.000"),
    (0.0, None, "0.00% / -"),
]


class TestScreen:
    def test_terminal_and_pipe(self, make):
        _, live = report(make(), terminal=True)
        assert "measures" in live and "4/4" in live
        _, piped = report(make())
        assert [line.split("  ")[0] for line in piped.splitlines() if line.startswith("step ")][:4] == [
            f"step {n}/4" for n in range(1, 5)
        ]
        assert "\x1b" not in piped

    @pytest.mark.parametrize(("changed", "tracked", "cell"), CELLS)
    def test_table_fits_80_columns(self, changed, tracked, cell):
        rules = {rule: {"changed": changed, "tracked": tracked} for rule in RULES}
        record = {"step": 1000, "reward": 0.5, "groups": 4, "groups_with_signal": 3, "rules": rules}
        text = io.StringIO()
        Console(file=text, width=80).print(table([record] * 3, "error_feedback"))
        assert "…" not in text.getvalue()
        assert text.getvalue().count(cell) == 3 * 4

    @pytest.mark.parametrize(("count", "expected"), [(1, [0]), (3, [0, 1, 2]), (8, list(range(8)))])
    def test_pick_few(self, count, expected):
        assert pick(count, 8) == expected

    def test_pick_many(self):
        chosen = pick(120, 8)
        assert len(chosen) == 8 and chosen[0] == 0 and chosen[-1] == 119


class TestSettings:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"steps": 0}, "steps must be at least 1; got 0"),
            ({"prompts": 0}, "prompts must be at least 1"),
            ({"group": 1}, "group must be at least 2; got 1; a group of one"),
            ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
            ({"shots": -1}, "shots must be at least 0"),
            ({"lr": 0.0}, "lr must be a positive number; got 0.0"),
            ({"lr": float("nan")}, "lr must be a positive number; got nan"),
            ({"temperature": -1.0}, "temperature must be a positive number"),
            ({"rounding": "floor"}, "rounding must be one of 'nearest', .*; got 'floor'"),
        ],
    )
    def test_nonsense_is_refused_by_name(self, change, message):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(Settings(), **change).check()

    def test_defaults_pass(self):
        Settings().check()
