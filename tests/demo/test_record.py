"""Folders that no run overwrites, and lines that outlive it."""

import json

import pytest

from fcoptim.demo.record import Recorder, new_folder


def test_new_folders_never_touch_old_ones(tmp_path):
    wanted = tmp_path / "deep" / "demo"
    first = new_folder(wanted)
    assert first == wanted and first.is_dir()
    assert new_folder(wanted) == wanted, "an empty folder may be used"
    (first / "steps.jsonl").write_text("old")
    second = new_folder(wanted)
    assert second.name == "demo-2"
    (second / "x").touch()
    assert new_folder(wanted).name == "demo-3"
    assert (first / "steps.jsonl").read_text() == "old"


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "demo").write_text("mine")
    assert new_folder(tmp_path / "demo").name == "demo-2"
    with pytest.raises(ValueError, match="can't make the folder"):
        new_folder(tmp_path / "demo" / "below")
    assert (tmp_path / "demo").read_text() == "mine"


def test_lines_are_there_before_the_file_is_closed(tmp_path):
    with Recorder(tmp_path) as recorder:
        recorder.write({"a": 1})
        assert json.loads(recorder.path.read_text()) == {"a": 1}
        recorder.write({"b": [0.5, None]})
    assert [json.loads(line) for line in recorder.path.read_text().splitlines()] == [{"a": 1}, {"b": [0.5, None]}]
    with pytest.raises(FileExistsError):
        Recorder(tmp_path)


def test_nan_is_refused(tmp_path):
    with Recorder(tmp_path) as recorder, pytest.raises(ValueError, match="not JSON compliant"):
        recorder.write({"x": float("nan")})
