"""A small grid from start to report, and what the tables say.

Of examples/seed_pairs.py and its pairs_report.py, pairs_tables.py and pairs_plot.py.
"""

import json
import multiprocessing

import pytest

SUMMARY = {"setting": "s", "steps": 2, "tie": 0.01, "kl": 1e-5, "reward": [0.1, 0.2], "start": {"sampled": 0.1}}


def summary(arm, seed, sampled, lr=1e-3):
    served = {"sampled": sampled, "greedy": sampled}
    return {**SUMMARY, "arm": arm, "seed": seed, "lr": lr, "served": served, "master": served}


def test_grid_runs_resumes_and_reports(tmp_path, base, capsys):
    import pairs_report
    import seed_pairs

    options = {"task": "addition", "steps": 3, "prompts": 2, "group": 2, "max_new_tokens": 2, "eval_prompts": 4}
    grid = [seed_pairs.Setting("tiny", options, (1e-3,), ("nearest", "dither", "fp32"), 1, (base,))]
    assert seed_pairs.run(grid, tmp_path, workers=1, threads=1) == 0
    logs = {log.parent.name: log.read_text() for log in tmp_path.glob("tiny/*/log.jsonl")}
    assert set(logs) == {f"{arm}_lr0.001_seed0" for arm in ("nearest", "dither", "fp32")}
    firsts = [next(r for r in map(json.loads, text.splitlines()) if r["kind"] == "step") for text in logs.values()]
    assert len({(step["reward"], step["tokens"]) for step in firsts}) == 1  # the same prompts and samples to begin with
    (tmp_path / "tiny" / "dither_lr0.001_seed0" / "log.jsonl").unlink()
    assert seed_pairs.run(grid, tmp_path, workers=1, threads=1) == 0
    seconds = lambda text: [{**json.loads(line), "seconds": 0} for line in text.splitlines()]  # noqa: E731
    assert {log.parent.name: seconds(log.read_text()) for log in tmp_path.glob("tiny/*/log.jsonl")} == {
        name: seconds(text) for name, text in logs.items()
    }
    text = pairs_report.write(tmp_path, tmp_path / "report")
    assert "## tiny" in text and "| dither | 0.001 | 1 |" in text
    assert (tmp_path / "report" / "tiny.png").stat().st_size > 10_000
    found = pairs_report.read(tmp_path / "report" / "summaries.jsonl")
    assert [s["arm"] for s in found] == ["dither", "fp32", "nearest"] and all("seconds" in s for s in found)


def test_failed_cell_is_named_and_others_go_on(tmp_path, base, capsys):
    import seed_pairs

    options = {"task": "addition", "steps": 1, "prompts": 1, "group": 1}
    grid = [seed_pairs.Setting("tiny", options, (1e-3,), ("nearest",), 1, (base,))]
    assert seed_pairs.run(grid, tmp_path, workers=1, threads=1) == 1
    assert "--group must be at least 2" in capsys.readouterr().out


def test_worker_ends_with_its_grid():
    """A worker that outlives a killed grid would write into the logs of the next one."""
    import seed_pairs

    worker = multiprocessing.get_context("fork").Process(target=seed_pairs._end_with, args=(-1,))
    worker.start()
    worker.join()
    assert worker.exitcode == 1


def test_report_without_runs_says_what_to_do(tmp_path):
    import pairs_report

    with pytest.raises(ValueError, match=r"seed_pairs\.py run"):
        pairs_report.write(tmp_path)


@pytest.mark.parametrize("preset", ["cpu", "map", "smollm2", "paper"])
def test_presets_are_runs_that_grpo_accepts(preset, tmp_path):
    import seed_pairs

    settings = list(seed_pairs.PRESETS[preset]())
    assert len({setting.name for setting in settings}) == len(settings)
    for setting in settings:
        folders = set()
        for seed in range(setting.seeds):
            for cell in setting.cells(seed):
                cell.config(tmp_path, setting.options).check()
                folders.add(cell.folder(tmp_path))
        assert len(folders) == setting.seeds * len(setting.lrs) * len(setting.arms)


def test_paper_has_the_published_number_of_pairs():
    import seed_pairs

    assert sum(setting.seeds for setting in seed_pairs.PRESETS["paper"]()) == 25


def test_pairs_are_compared_by_the_tie_rule():
    import pairs_tables

    arm, other = {0: 0.50, 1: 0.505, 2: 0.60, 3: 0.9}, {0: 0.52, 1: 0.50, 2: 0.50}
    found = pairs_tables.against(arm, other, 0.01)
    assert (found["pairs"], found["ahead"], found["tied"], found["behind"]) == (3, 1, 1, 1)
    assert found["mean"] == pytest.approx((-0.02 + 0.005 + 0.1) / 3)
    assert found["low"] == pytest.approx(-0.02) and found["high"] == pytest.approx(0.1)
    assert pairs_tables.against({5: 1.0}, other, 0.01) is None


def test_best_table_compares_each_arm_at_its_own_rate():
    import pairs_tables

    runs = [summary("nearest", 0, 0.3, 1e-3), summary("nearest", 0, 0.5, 1e-2)]
    runs += [summary("dither", 0, 0.6, 1e-3), summary("dither", 0, 0.4, 1e-2)]
    assert pairs_tables.best_rates(runs) == {"nearest": 1e-2, "dither": 1e-3}
    line = next(line for line in pairs_tables.best_table(runs).splitlines() if "dither" in line)
    assert line.startswith("| dither | 0.001 | 1 | 60.0 | +10.00 [+10.00, +10.00] | 1 / 0 / 0 |")


def test_unknown_table_is_refused():
    import pairs_tables

    with pytest.raises(ValueError, match="overview"):
        pairs_tables.fill("<!-- begin: other/reward -->\n\n<!-- end -->", [summary("nearest", 0, 0.3)])


def test_headline_sets_dither_beside_nearest():
    import pairs_tables

    runs = []
    for task, best in (("zebra", 0.5), ("addition", 0.7)):
        for arm in pairs_tables.ARMS:
            gain = 0.0 if arm == "nearest" else 0.02
            for lr, score in ((1e-6, 0.4 + gain), (4e-6, best)):
                figures = {"changed": 0.004, "lag_peak": 60.0, "tracked": {"end": 0.5}, "setting": f"{task}-adamw"}
                runs.append(summary(arm, 0, score, lr) | figures)
    runs.append(summary("nearest", 0, 0.9) | {"setting": "probe"})  # lacks rules, so it does not count
    lines = pairs_tables.headline_table(runs).splitlines()
    assert lines[2] == "| served weights that change in a step, lr 1e-06 | 0.4 to 0.5% |  | 0.40% | 0.40% |"
    assert lines[-3].endswith("| 2 / 0 / 0, +2.00 |")
    assert lines[-2].endswith("| 0 / 2 / 0, +0.00 |")
    assert lines[-1].endswith("| 50.0 | 50.0 |")
    with pytest.raises(ValueError, match="no setting has finished runs"):
        pairs_tables.headline_table(runs[-1:])


def test_filling_is_idempotent_and_starts_from_nothing():
    import pairs_tables

    mark = "<!-- begin: s/reward -->\n<!-- end -->\n"
    page = pairs_tables.fill(f"{mark}between\n{mark}", [summary("nearest", 0, 0.3)])
    assert page.count("| nearest | 0.001 | 1 | 30.0 |") == 2 and "\nbetween\n" in page
    assert pairs_tables.fill(page, [summary("nearest", 0, 0.3)]) == page
