"""The GPU kernel on a device: the same bits as the reference on the CPU. Skipped where there is none."""

from __future__ import annotations

import functools

import pytest
import torch
import triton

import fcoptim.cast
from fcoptim.cast import gpu
from fcoptim.cast.rules import ACCUMULATED, HASHED, RULES

from .cases import CODES, CONTIGUOUS, STRIDED, Case, Layout, alike, dense
from .cases import check as check_back_end
from .runs import SHARDS
from .runs import check as check_runs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
    pytest.mark.skipif(not isinstance(gpu.kernel.cast_tiles, triton.JITFunction), reason="TRITON_INTERPRET is set"),
]
DEVICE = "cuda"

check = functools.partial(check_back_end, gpu.cast_jobs, device=DEVICE)
codes = pytest.mark.parametrize("code", CODES.values(), ids=CODES)


@codes
@pytest.mark.parametrize("counted", [False, True], ids=["uncounted", "counted"])
@pytest.mark.parametrize("layouts", [CONTIGUOUS, STRIDED, CONTIGUOUS | STRIDED], ids=["contiguous", "strided", "all"])
def test_layouts_in_one_call(code: int, counted: bool, layouts: dict[str, Layout]) -> None:
    cases = [Case(layout, start, wide) for layout in layouts.values() for start in (0, 2043) for wide in (False, True)]
    check(cases, code, counted=counted)


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "fp32"])
def test_shards_of_several_runs(wide: bool, shard: str) -> None:
    check_runs(gpu.cast_jobs, HASHED, shard, wide, DEVICE)


@codes
def test_large_tensors_and_many(code: int) -> None:
    sizes = [3_000_001, 1 << 20, *(number * 97 % 5000 for number in range(300))]
    cases = [Case(alike((size,), dense((size,))), number % 3 * 1024) for number, size in enumerate(sizes)]
    square = (1024, 768)
    cases.append(Case(Layout(square, dense(square), dense(square, (1, 0)), dense(square))))
    check(cases, code, counted=True)


@pytest.mark.parametrize("start", [2**33 - 1000, 2**33, 2**45 + 7, 2**61 - 3000])
def test_words_beyond_32_bits(start: int) -> None:
    check([Case(CONTIGUOUS["whole tiles"], start), Case(STRIDED["transposed"], start)], HASHED, counted=False)


@pytest.mark.parametrize("rounding", RULES)
def test_cast_gives_the_same_on_cpu_and_gpu(rounding: str) -> None:
    masters = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in ((300, 70), (5,), ())]
    results = []
    for device in ("cpu", DEVICE):
        served = [torch.zeros(master.shape, dtype=torch.bfloat16, device=device) for master in masters]
        kept = [
            fcoptim.cast.start_accumulator_(torch.empty(master.shape, dtype=torch.int16, device=device), key=number)
            for number, master in enumerate(masters)
        ]
        changed = torch.empty(3, dtype=torch.int64, device=device)
        for count in range(3):
            fcoptim.cast.cast_(
                served,
                [master.to(device) for master in masters],
                rounding=rounding,
                key=[0, 1, 2],
                count=[count] * 3,
                error_feedback=kept if rounding == "error_feedback" else None,
                changed=changed,
            )
        results.append([tensor.cpu() for tensor in (*served, *kept, changed)])
    for on_cpu, on_gpu in zip(*results):
        assert torch.equal(on_cpu, on_gpu)


def test_shapes_never_make_it_compile_again() -> None:
    """Counts of 1 and multiples of 16 are what Triton would specialise on."""
    for jobs in (1, 2, 16, 17):
        check([Case(CONTIGUOUS["cut tile"], start) for start in range(jobs)], HASHED, counted=True)
        check([Case(CONTIGUOUS["one"], start) for start in range(jobs)], HASHED, counted=True)
    kernels = gpu.kernel.cast_tiles.device_caches[torch.cuda.current_device()][0]
    assert 0 < len(kernels) <= len(gpu.VARIANTS)


def test_it_runs_on_the_current_stream() -> None:
    """A cast queued behind slow work on the same stream sees that work's masters, and later casts its own keys."""
    size = 1 << 24
    master = torch.zeros(size, device=DEVICE)
    served = torch.zeros(size, dtype=torch.bfloat16, device=DEVICE)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    snapshots = []
    with torch.cuda.stream(stream):
        for count in range(5):
            for _ in range(20):
                master += 0.01
            fcoptim.cast.cast_(served, master, rounding="stochastic", key=7, count=count)
            snapshots.append((master[:5000].clone(), served[:5000].clone()))
    stream.synchronize()
    for count, (then, result) in enumerate(snapshots):
        expected = torch.zeros(5000, dtype=torch.bfloat16)
        fcoptim.cast.cast_(expected, then.cpu(), rounding="stochastic", key=7, count=count)
        assert torch.equal(expected, result.cpu())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_tensors_need_not_be_on_the_current_device() -> None:
    with torch.cuda.device(0):
        check_back_end(gpu.cast_jobs, [Case(CONTIGUOUS["cut tile"])], ACCUMULATED, "cuda:1", counted=True)


def test_compiled_ahead_is_what_runs() -> None:
    """The variants for this very device, compiled ahead of time, are loadable and do not spill."""
    target = triton.runtime.driver.active.get_current_target()
    for variant, kernel in gpu.compile_for(target).items():
        kernel._init_handles()
        assert kernel.n_spills == 0, variant
