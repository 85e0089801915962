"""The figures of casts and lag in TensorBoard and W&B (offline), through Trainer and by hand."""

import json
import struct

import pytest
import torch
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter
from wandb.proto import wandb_internal_pb2

from fcoptim import FairCastOptimizer
from fcoptim.integrations.transformers import FairCastCallback
from fcoptim.meter import LagMeter

from . import tiny
from .trainers import pair, trainer


def tensorboard(folder) -> dict[str, dict[int, float]]:
    """Scalars by tag and step, from the event files of a folder."""
    found: dict[str, dict[int, float]] = {}
    for file in folder.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(file))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, {}).update({event.step: event.value for event in events.Scalars(tag)})
    return found


def leveldb_records(content: bytes):
    """Records of a file in LevelDB's log format, which W&B's are: blocks of 32 KiB, records in one or more chunks."""
    position, parts = 7, b""  # after W&B's own header
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last chunk
            yield parts
            parts = b""


def wandb_offline(folder) -> list[dict[str, float]]:
    """The history that an offline run has written to its file."""
    (file,) = folder.rglob("run-*.wandb")
    rows = []
    for data in leveldb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item})
    return rows


def test_trainer_to_tensorboard(tmp_path, monkeypatch):
    """The callback stands before Trainer's TensorBoard reporter: each training step's figures are in the event file."""
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    model, opt = pair()
    run = trainer("Trainer", tmp_path, model, optimizers=(opt, None), report_to=["tensorboard"])
    FairCastCallback().attach(run)
    run.train()
    found = tensorboard(tmp_path)
    expected = {entry["step"]: entry for entry in run.state.log_history if "loss" in entry}
    for name in ("fcoptim/changed", "fcoptim/tracked", "fcoptim/lag", "fcoptim/error_rms"):
        values = next(value for tag, value in found.items() if tag.endswith(name))
        assert values == {step: pytest.approx(entry[name]) for step, entry in expected.items()}


def test_trainer_to_wandb(tmp_path, monkeypatch):
    """The same for W&B in offline mode, whose file a later ``wandb sync`` would send."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()  # an earlier run in this process would keep its folder
    model, opt = pair()
    run = trainer("GRPOTrainer", tmp_path, model, optimizers=(opt, None), report_to=["wandb"], run_name="fair")
    FairCastCallback().attach(run)
    run.train()
    wandb.finish()
    wandb.teardown()
    rows = [row for row in wandb_offline(tmp_path) if any("fcoptim" in key for key in row)]
    expected = [entry for entry in run.state.log_history if "loss" in entry]
    assert len(rows) == len(expected) == 3
    for row, entry in zip(rows, expected):
        key = next(key for key in row if key.endswith("fcoptim/tracked"))
        assert row[key] == pytest.approx(entry["fcoptim/tracked"])


def test_by_hand(tmp_path):
    """In a loop of one's own the meter's dict goes to a SummaryWriter as it is."""
    model = tiny.model()
    opt = FairCastOptimizer(model, torch.optim.AdamW, lr=1e-3)
    meter, written = LagMeter(opt), []
    with SummaryWriter(tmp_path) as writer:
        for step in range(3):
            ids = torch.randint(3, 30, (4, 8), generator=torch.Generator().manual_seed(step))
            model(input_ids=ids, labels=ids).loss.backward()
            opt.step()
            opt.zero_grad()
            written.append(meter.update())
            for name, value in written[-1].items():
                writer.add_scalar(name, value, step)
    found = tensorboard(tmp_path)
    assert found.keys() == written[0].keys()
    assert all(found[name][2] == pytest.approx(value) for name, value in written[2].items())
