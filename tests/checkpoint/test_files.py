"""safetensors files as the library reads them, values as JSON, progress, memory."""

import json
import math
import os
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from fcoptim import CheckpointError
from fcoptim.cast import RULES
from fcoptim.checkpoint import writing
from fcoptim.checkpoint.layout import Record, to_json
from fcoptim.checkpoint.plan import split
from fcoptim.checkpoint.tensorfile import CHUNK, DTYPES, Item, Reader, TensorFile, as_bytes, write_file
from fcoptim.checkpoint.values import Decoder, Encoder
from tests.optimizer.helpers import assert_same

from .helpers import run_python


def tensors() -> dict[str, torch.Tensor]:
    """Every dtype, and shapes and strides that are out of the ordinary."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for code, dtype in DTYPES.items():
        raw = torch.randint(0, 2 if code == "BOOL" else 256, (5, 3, dtype.itemsize), generator=generator)
        found[f"dtype {code}"] = raw.to(torch.uint8).view(dtype).view(5, 3)
    wide = torch.randn(40, 30, 20, generator=generator)
    found |= {
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 4),
        "transposed": wide[0].t(),
        "sliced": wide[:, ::2, 3:],
        "permuted": wide.permute(2, 0, 1),
        "expanded": torch.ones(1, 7).expand(9, 7),
        "row": torch.randn(1, 3 * CHUNK // 4, generator=generator),
        "big, transposed": torch.randn(700, 1300, generator=generator).t(),
        "channels last": torch.randn(2, 3, 8, 8, generator=generator).contiguous(memory_format=torch.channels_last),
        "naïve \ud7ff/../ name": torch.arange(3),
        "conjugated": torch.randn(4, dtype=torch.complex64, generator=generator).conj(),
    }
    return found


def write(folder: Path, items: list[Item], metadata: dict | None = None) -> Record:
    return write_file(folder, TensorFile("x.safetensors", items, metadata or {}), lambda _: None)


def test_the_library_reads_what_is_written(tmp_path):
    """Every dtype, shape and stride, bit for bit; so does our reader; size and hash are the file's."""
    import hashlib

    expected = tensors()
    record = write(tmp_path, [Item(key, value, value.dtype) for key, value in expected.items()], {"format": "pt"})
    path = tmp_path / "x.safetensors"
    assert (record.size, record.sha256) == (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
    found, reader = load_file(path), Reader(path)
    assert set(found) == set(expected) == set(reader.places)
    for key, value in expected.items():
        for other in (found[key], reader.tensor(key)):
            assert (other.dtype, other.shape) == (value.dtype, value.shape), key
            assert bytes(as_bytes(other)) == bytes(as_bytes(value)), key
    with safe_open(path, "pt") as file:
        assert file.metadata() == reader.metadata == {"format": "pt"}


def test_our_reader_reads_what_the_library_writes(tmp_path):
    """Also where tensors are not aligned."""
    expected = {"b": torch.arange(3, dtype=torch.uint8), "a": torch.randn(7), "c": torch.tensor(2, dtype=torch.int16)}
    save_file(expected, tmp_path / "x.safetensors")
    reader = Reader(tmp_path / "x.safetensors")
    assert_same(expected, {key: reader.tensor(key) for key in expected})
    header = json.dumps(
        {
            "u": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "f": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]},
        }
    ).encode()
    data = b"\x07" + bytes(as_bytes(torch.tensor([2.5])))
    (tmp_path / "y.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    assert Reader(tmp_path / "y.safetensors").tensor("f").item() == 2.5


def test_conversion_is_torchs(tmp_path):
    """A tensor written in another dtype is ``tensor.to(dtype)``."""
    value = torch.randn(3 * CHUNK // 8 + 5, generator=torch.Generator().manual_seed(0))
    write(tmp_path, [Item("x", value, torch.bfloat16)])
    assert torch.equal(load_file(tmp_path / "x.safetensors")["x"], value.bfloat16())


@pytest.mark.parametrize(
    "table",
    [
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}},
        {"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": 3},
        [],
        3,
        {"a": {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 16]}},
        {
            "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
            "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
        },
    ],
)
def test_headers_that_lie(tmp_path, table):
    """Overlaps, gaps, wrong sizes, junk: refused, by us as by the library."""
    header = json.dumps(table).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(6))
    with pytest.raises(CheckpointError, match=r"x\.safetensors is (damaged|truncated)"):
        Reader(path)
    with pytest.raises(SafetensorError):
        load_file(path)


@pytest.mark.parametrize(
    "data", [b"", b"1234567", (1 << 40).to_bytes(8, "little"), b"\xff" * 64, b"\x04" + bytes(7) + b"nope"]
)
def test_junk(tmp_path, data):
    """No header at all."""
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError):
        Reader(tmp_path / "x.safetensors")


def test_names_that_clash(tmp_path):
    """Two tensors of one name, and the format's own."""
    for items in ([Item("a", torch.ones(1), torch.float32)] * 2, [Item("__metadata__", torch.ones(1), torch.float32)]):
        with pytest.raises(CheckpointError, match="two tensors named"):
            write(tmp_path, items)
        (tmp_path / "x.safetensors").unlink()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 60))
def test_shards(sizes, limit):
    """In order, complete, none larger than asked unless it holds a single tensor."""
    items = [Item(str(n), torch.empty(size, dtype=torch.uint8), torch.uint8) for n, size in enumerate(sizes)]
    shards = split(items, limit)
    assert [item.key for shard in shards for item in shard] == [item.key for item in items]
    assert all(sum(item.nbytes for item in shard) <= limit or len(shard) == 1 for shard in shards)


# ------------------------------------------------------------- values

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters())
KEYS = (
    st.text(max_size=5) | st.integers() | st.tuples(st.integers(), st.text(max_size=2)) | st.just("$tensor") | st.none()
)
TENSORS = st.sampled_from(
    [
        torch.tensor(3),
        torch.tensor(-0.0),
        torch.tensor(True),
        torch.tensor(math.inf),
        torch.ones(2, 3).t(),
        torch.empty(0),
    ]
)
VALUES = st.recursive(
    PLAIN | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=15,
)


@settings(max_examples=300, deadline=None)
@given(VALUES)
def test_values_come_back(value):
    """Any nesting, through the bytes of a JSON file."""
    encoder = Encoder("x")
    text = to_json(encoder.encode(value, "v"))
    encoder.check()
    decoded = json.loads(text.decode("utf-8", "surrogatepass"))
    assert_same(value, Decoder(encoder.tensors.__getitem__, "x").decode(decoded))


FORGED = [
    {"$nope": 1},
    {"$scalar": ["float32"]},
    {"$scalar": ["nope", 1]},
    {"$float": "1"},
    {"$tuple": 3},
    {"$tensor": "no"},
    {"$dict": [[1]]},
    {"$dict": [[[], 1]]},
    {"$dtype": "__class__"},
    {"$device": "nope"},
]


@pytest.mark.parametrize("value", FORGED)
def test_unknown_tags_are_refused(value):
    """Nothing is looked up but in tables."""
    with pytest.raises(CheckpointError, match="file is damaged"):
        Decoder({}.__getitem__, "file").decode([value])


# ------------------------------------------------------------- progress and memory


@pytest.mark.parametrize(("total", "terminal", "shown"), [(2e9, True, True), (2e9, False, False), (9e8, True, False)])
def test_progress(monkeypatch, capsys, total, terminal, shown):
    """A bar above 1 GB, on a terminal only."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    with writing.progress("saving x", int(total)) as advance:
        advance(int(total) // 2)
        advance(int(total) // 2)
    out, err = capsys.readouterr()
    assert out == "" and (("saving x" in err) if shown else (err == ""))


def test_jobs_in_threads():
    """Results in order; an error ends it and drops what has not begun."""
    assert writing.in_threads(lambda n: n * n, range(50), range(50)) == [n * n for n in range(50)]
    assert writing.in_threads(lambda n: n, [], []) == []
    with pytest.raises(ZeroDivisionError):
        writing.in_threads(lambda n: 1 // n, [1, 0, 2], [1, 1, 1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's limit on memory")
@pytest.mark.parametrize("rounding", RULES)
def test_memory_of_one_tensor(tmp_path, rounding):
    """One tensor more than what is there anyway is enough to save and load ten; for a copy of all it is not."""
    # The C library would keep freed memory for each thread; here it goes back to the system at once.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = run_python("tests.checkpoint.memory_worker", tmp_path, rounding, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["saved", "loaded", "a copy does not fit", "loaded into a new one"]
