"""Whole or absent: killed anywhere, out of space, without permission, a save leaves what was there."""

import contextlib
import errno
import json
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from fcoptim import CheckpointError, load_checkpoint, save_checkpoint
from fcoptim.checkpoint import folder as folders
from fcoptim.checkpoint.layout import MANIFEST
from tests.optimizer.helpers import assert_same_run, pair, train

from .crash_worker import HOWS
from .helpers import contents, names, run_python, saved_run

pytestmark = pytest.mark.skipif(os.name != "posix", reason="kills processes and takes rights away")


def run(steps: int) -> tuple:
    model, opt = pair("error_feedback")
    train(opt, model, range(steps))
    return model, opt


@pytest.fixture(scope="module")
def runs() -> dict:
    return {steps: run(steps)[1] for steps in (2, 3, 4)}


@pytest.fixture(scope="module")
def crashes(tmp_path_factory) -> Path:
    """What processes that died while saving have left."""
    root = tmp_path_factory.mktemp("crashes")
    done = run_python("tests.checkpoint.crash_worker", root)
    assert done.returncode == 0, done.stderr[-3000:]
    return root


def step_of(path: Path, runs: dict) -> int:
    """The step of a checkpoint, which loads and is exactly the run's.

    Raises:
        AssertionError: It is not.
    """
    _, other = pair("error_feedback", seed=9)
    step = load_checkpoint(path, other)["step"]
    assert_same_run(runs[step], other)
    return step


def outcome(folder: Path, how: str, runs: dict) -> bool:
    """Check what must hold wherever the writer died; returns whether the new checkpoint is there."""
    if how == "overwrite":
        done = step_of(folder / "step-2", runs) == 3
    else:
        done = (folder / "step-3").exists()
        if done:
            assert step_of(folder / "step-3", runs) == 3
        if how != "keep" or not done:
            assert step_of(folder / "step-2", runs) == 2
    save_checkpoint(folder / "step-4", runs[4])
    assert step_of(folder / "step-4", runs) == 4
    left = [name for name in names(folder) if not name.startswith("step-")]
    assert not left, "the next save removes what is left"
    return done


@pytest.mark.parametrize("how", HOWS)
def test_killed_anywhere(crashes, runs, how):
    """Field report 18: killed between any two files or in the middle of one, the previous or the new one loads."""
    died = json.loads((crashes / how / "died.json").read_text())
    events = died.pop("-1")
    assert how == "bytes" or events > 20, events
    ends = [code for code in died.values() if code < 0]
    assert len(ends) == events or (how == "bytes" and len(ends) > 10), died
    assert set(ends) == {-signal.SIGXFSZ if how == "bytes" else -signal.SIGKILL}
    outcomes = [outcome(crashes / how / number, how, runs) for number, code in died.items() if code < 0]
    assert outcomes == sorted(outcomes), "absent up to some point, whole from there on"
    assert not outcomes[0] and (outcomes[-1] or how == "bytes")


def test_a_living_writer_is_left_alone(tmp_path, runs):
    """Cleaning up removes what the dead have left, not what others are writing at this moment."""
    with folders.new_folder(tmp_path / "step-1") as partial:
        (partial / "half").touch()
        save_checkpoint(tmp_path / "step-2", runs[2])
        assert (partial / "half").exists()
        folders.clean(tmp_path)
        assert (partial / "half").exists()
    assert names(tmp_path) == ["step-1", "step-2"]


def test_two_writers_of_one_path(tmp_path, runs):
    """One of them wins, the other is told; neither harms the other."""
    told = []

    def save() -> None:
        try:
            save_checkpoint(tmp_path / "a", runs[2])
        except FileExistsError as error:
            told.append(error)

    threads = [threading.Thread(target=save) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 3 and names(tmp_path) == ["a"]
    assert step_of(tmp_path / "a", runs) == 2


# ------------------------------------------------------------- errors of the system


@contextlib.contextmanager
def unprivileged(folder: Path):
    """Without the right to write into a folder; root loses its own for as long."""
    for parent in [*folder.parents][:4]:
        parent.chmod(parent.stat().st_mode | 0o055)
    folder.chmod(0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)


def test_no_permission(tmp_path, runs):
    """A clear error of the usual class, nothing left behind."""
    with unprivileged(tmp_path), pytest.raises(PermissionError, match=r"checkpoint .*/a was not saved: Permission"):
        save_checkpoint(tmp_path / "a", runs[2])
    assert names(tmp_path) == []


def test_missing_folder_and_file_in_the_way(tmp_path, runs):
    """Each is told by its path."""
    with pytest.raises(FileNotFoundError, match=r"does not exist; create it first: '.*/no'"):
        save_checkpoint(tmp_path / "no" / "a", runs[2])
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError, match=r"but it is a file: '.*/file'"):
        save_checkpoint(tmp_path / "file" / "a", runs[2])
    for path in ("", "/"):
        with pytest.raises(CheckpointError, match="needs a path with a name"):
            save_checkpoint(path, runs[2])
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("there", ["checkpoint", "folder", "empty folder", "file", "dangling link"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_existing_path(tmp_path, runs, there, overwrite):
    """Nothing is replaced unasked, and nothing but a checkpoint of ours if asked."""
    path = tmp_path / "a"
    if there == "checkpoint":
        save_checkpoint(path, runs[2])
    elif there == "file":
        path.write_text("mine")
    elif there == "dangling link":
        path.symlink_to(tmp_path / "nowhere")
    else:
        path.mkdir()
        if there == "folder":
            (path / "mine").write_text("mine")
    before = contents(tmp_path)
    if overwrite and there == "checkpoint":
        save_checkpoint(path, runs[3], overwrite=True)
        assert step_of(path, runs) == 3
        assert names(tmp_path) == ["a"]
        return
    said = "is no checkpoint of fcoptim's" if overwrite else "exists already; save under another name"
    with pytest.raises(FileExistsError, match=said):
        save_checkpoint(path, runs[3], overwrite=overwrite)
    assert contents(tmp_path) == before and names(tmp_path) == ["a"]


def test_no_space_is_seen_before_writing(tmp_path, runs, monkeypatch):
    """With the figures; nothing is written."""
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"needs 0\.00 GB, 0\.00 GB are free") as caught:
        save_checkpoint(tmp_path / "a", runs[2])
    assert caught.value.errno == errno.ENOSPC
    assert names(tmp_path) == []


@pytest.mark.parametrize("limit", [10, 700, 2000])
def test_disk_full_while_writing(tmp_path, runs, limit):
    """A write that fails in the middle leaves nothing; files past a limit of size fail like those on a full disk."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OSError, match=r"checkpoint .*/a was not saved: File too large"):
            save_checkpoint(tmp_path / "a", runs[2])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == []


# ------------------------------------------------------------- keep


def test_keep_rotates(tmp_path, runs):
    """The last ones stay, by when they were saved; nothing but this series is touched."""
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-7").mkdir()  # no checkpoint
    save_checkpoint(tmp_path / "best-1", runs[2])
    for step in (10, 20, 30, 9):
        save_checkpoint(tmp_path / f"step-{step}", runs[2], step=step, keep=2)
    assert names(tmp_path) == ["best-1", "step-30", "step-7", "step-9", "step-x"]
    save_checkpoint(tmp_path / "step-40", runs[2], keep=1)
    assert names(tmp_path) == ["best-1", "step-40", "step-7", "step-x"]
    assert step_of(tmp_path / "step-40", runs) == 2


def test_keep_does_not_follow_links(tmp_path, runs):
    """A link in the series is not ours to remove, nor is what it points to."""
    (tmp_path / "other").mkdir()
    save_checkpoint(tmp_path / "other" / "x", runs[2])
    (tmp_path / "step-1").symlink_to(tmp_path / "other" / "x")
    save_checkpoint(tmp_path / "step-2", runs[2], keep=1)
    assert names(tmp_path) == ["other", "step-1", "step-2"]
    assert (tmp_path / "step-1" / MANIFEST).exists()


def test_paths_as_users_write_them(tmp_path, runs, monkeypatch):
    """Relative, with a slash at the end, with ``..`` in it, as text or Path."""
    monkeypatch.chdir(tmp_path)
    assert save_checkpoint("a/", runs[2]).path == tmp_path / "a"
    assert save_checkpoint(Path("x") / ".." / "b", runs[2]).path == tmp_path / "b"
    assert step_of("b/", runs) == step_of(tmp_path / "a", runs) == 2


def test_checkpoint_is_the_same_every_time(tmp_path):
    """Two saves of one state differ in nothing but the manifest's time."""
    _, opt = saved_run(tmp_path / "a")
    save_checkpoint(tmp_path / "b", opt)
    first, second = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert first.pop(MANIFEST) != second.pop(MANIFEST)
    assert first == second
