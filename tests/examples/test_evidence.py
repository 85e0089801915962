"""docs/evidence.md: its tables are those of the summaries, and the summaries are of runs that the presets make."""

from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def summaries():
    import pairs_report

    return pairs_report.read(DOCS / "evidence" / "summaries.jsonl")


def test_tables_are_those_of_the_summaries(summaries):
    import pairs_tables

    page = (DOCS / "evidence.md").read_text()
    assert page.count("<!-- begin: ") >= 10
    assert pairs_tables.fill(page, summaries) == page, "run `python examples/pairs_report.py docs/evidence.md`"


def test_every_setting_is_on_the_page(summaries):
    page = (DOCS / "evidence.md").read_text()
    for setting in {summary["setting"] for summary in summaries}:
        assert f"<!-- begin: {setting}/" in page, f"{setting} was run and is not reported"


def test_settings_are_those_of_the_presets(summaries):
    """What the page says was run is what the commands on it run."""
    import seed_pairs

    presets = {setting.name: setting for name in ("cpu", "map", "smollm2") for setting in seed_pairs.PRESETS[name]()}
    for summary in summaries:
        setting = presets[summary["setting"]]
        assert summary["steps"] == setting.options["steps"]
        assert summary["arm"] in setting.arms and summary["lr"] in setting.lrs
        assert summary["base"] == setting.bases[summary["seed"] % len(setting.bases)]
        assert summary["seed"] < setting.seeds and summary["tie"] == seed_pairs.TIE


def test_arms_of_a_pair_started_alike(summaries):
    """To the last bit; but what is served in fp32 is computed in fp32."""
    starts = {}
    for summary in summaries:
        key = summary["setting"], summary["base"], summary["arm"] == "fp32"
        assert starts.setdefault(key, summary["start"]) == summary["start"]
    for (setting, base, exact), start in starts.items():
        assert not exact or start["sampled"] == pytest.approx(starts[setting, base, False]["sampled"], abs=0.002)
