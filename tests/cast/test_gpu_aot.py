"""Compiles the GPU kernel with no GPU present, and reads the machine code."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from fcoptim.cast import gpu
from fcoptim.cast.rules import ACCUMULATED, HASHED, NEAREST

from .cases import CONTIGUOUS, Case, prepare

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# What a thread holds of a whole tile.
ELEMENTS = 16

pytestmark = pytest.mark.skipif(
    not isinstance(gpu.kernel.cast_tiles, triton.JITFunction), reason="TRITON_INTERPRET is set"
)
nvidia = pytest.mark.parametrize("target", ["sm_80", "sm_90"])
any_target = pytest.mark.parametrize("target", TARGETS)


class _Compiled(dict[str, dict[gpu.Variant, Any]]):
    """All variants by target, compiled when first asked for."""

    def __missing__(self, target: str) -> dict[gpu.Variant, Any]:
        self[target] = gpu.compile_for(TARGETS[target])
        return self[target]


@pytest.fixture(scope="module")
def compiled() -> _Compiled:
    return _Compiled()


def _assembly(kernel: Any) -> str:
    return str(kernel.asm["ptx" if "ptx" in kernel.asm else "amdgcn"])


def _blocks(assembly: str) -> list[list[str]]:
    """Split PTX, AMDGCN or SASS into basic blocks of instructions, without predicates and comments."""
    blocks: list[list[str]] = [[]]
    for line in assembly.splitlines():
        text = re.split(r"//|; |;$", re.sub(r"/\*.*?\*/", "", line))[0].strip()
        text = re.sub(r"^@!?[%A-Z]+\d*\s+", "", text)
        if re.match(r"(\$L__BB|\.LBB|\.L_x_)\d", text):
            blocks.append([])
        elif re.match(r"[A-Za-z]\w*(\.|\s|$)", text):
            blocks[-1].append(text)
            if re.match(r"bra|s_branch|s_cbranch|BRA", text):
                blocks.append([])
    return blocks


def _accesses(block: list[str]) -> list[tuple[str, int]]:
    """List a block's accesses to the tensors as (load or store, bits).

    The table's own loads are of 64 bits in PTX; in AMDGCN they are relative to a scalar address and forward,
    while the tensors' are relative to a vector address ("off") or backward, from the end of a tile.
    """
    found = []
    for line in block:
        ptx = re.match(r"(ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)", line)
        amd = re.match(r"(?:buffer|flat|global)_(load|store)_(dword(?:x(\d))?|u?short|u?byte).*(off\b|offset:-)", line)
        sass = re.match(r"(LD|ST)G\.E(?:\.(128|64|U16|U8))?\b", line)
        if ptx:
            found.append(({"ld": "load", "st": "store"}[ptx[1]], int(ptx[2] or 1) * int(ptx[3])))
        elif amd:
            found.append((amd[1], 32 * int(amd[3] or 1) if amd[2].startswith("dword") else 16))
        elif sass:
            found.append(({"LD": "load", "ST": "store"}[sass[1]], int((sass[2] or "32").strip("U"))))
    return [access for access in found if access != ("load", 64)]


def _fast_blocks(assembly: str) -> list[list[str]]:
    """Return the basic blocks that whole, aligned tiles run through and that touch the tensors."""
    return [block for block in _blocks(assembly) if any(width == 128 for _, width in _accesses(block))]


def _readable(compiled: Any, target: str) -> list[tuple[gpu.Variant, Any]]:
    """In AMDGCN, strided variants read strides by 128 bits as well, so there the others must do."""
    return [(variant, k) for variant, k in compiled[target].items() if not (target == "gfx942" and variant.strided)]


def _count(blocks: list[list[str]], kind: str) -> int:
    return sum(_accesses(block).count((kind, 128)) for block in blocks)


def _bf16_blocks(assembly: str) -> list[list[str]]:
    """Of these, drop the block that serves float32, the one with 4 stores."""
    return [block for block in _fast_blocks(assembly) if _count([block], "store") != 4]


@any_target
def test_every_variant_becomes_machine_code(compiled: Any, target: str) -> None:
    kernels = compiled[target]
    assert len(kernels) == 12
    assert set(kernels) == set(gpu.VARIANTS)
    for kernel in kernels.values():
        assert kernel.asm["hsaco" if target == "gfx942" else "cubin"][:4] == b"\x7fELF"
        assert re.search(rf"_?target.*{target}", _assembly(kernel))


@any_target
def test_whole_tiles_move_by_128_bits(compiled: Any, target: str) -> None:
    """A thread holds 16 elements: 4 loads of masters; 2 stores of bf16, or 4 of float32.

    Error feedback loads and stores 2 of accumulators; counting loads what is served, as bf16 or float32.
    """
    for variant, kernel in _readable(compiled, target):
        blocks = _fast_blocks(_assembly(kernel))
        kept = 2 * (variant.code == ACCUMULATED)
        assert _count(blocks, "load") == 4 + kept + 6 * variant.counted, variant
        assert _count(blocks, "store") == 6 + kept, variant
        narrow = [access for block in blocks for access in _accesses(block) if access[1] != 128]
        assert not narrow, (variant, narrow)


@any_target
def test_traffic_is_6_or_10_bytes_per_element(compiled: Any, target: str) -> None:
    for variant, kernel in _readable(compiled, target):
        blocks = _bf16_blocks(_assembly(kernel))
        traffic = 16 * (_count(blocks, "load") + _count(blocks, "store")) / ELEMENTS
        assert traffic == (10 if variant.code == ACCUMULATED else 6) + 2 * variant.counted, variant


@nvidia
def test_nothing_spills_on_nvidia(compiled: Any, target: str, tmp_path: Path) -> None:
    for variant, kernel in compiled[target].items():
        assert not re.search(r"\.local\b", kernel.asm["ptx"])
        usage = _tool("cuobjdump", tmp_path, kernel, "-res-usage")
        found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", usage)
        assert found is not None, usage
        assert (int(found[2]), int(found[3])) == (0, 0), (variant, usage)
        # So 7 blocks of 128 threads fit on a multiprocessor with 65,536 registers.
        assert int(found[1]) <= 72, (variant, usage)


def test_nothing_spills_on_amd(compiled: Any) -> None:
    for variant, kernel in compiled["gfx942"].items():
        text = kernel.asm["amdgcn"]
        for what in ("private_segment_fixed_size", "sgpr_spill_count", "vgpr_spill_count"):
            assert re.findall(rf"\.{what}: +(\d+)", text) == ["0"], (variant, what)
        assert "scratch_" not in text
        # Buffer accesses with a loaded base would each run in a loop.
        assert not re.search(r"^\s*buffer_(load|store|atomic)", text, re.MULTILINE), variant


def _tool(name: str, tmp_path: Path, kernel: Any, option: str) -> str:
    """Run one of the tools that come with Triton's wheel on a kernel's binary."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        pytest.skip(f"this Triton comes without {name}")
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    return subprocess.run([path, option, binary], capture_output=True, text=True, check=True).stdout


def _operations(blocks: list[list[str]]) -> float:
    """Count per element what is no access, jump, barrier or register initialisation: all of it is integer."""
    other = r"(ld|st|mov|bra|bar|LD|ST|S2|BRA|EXIT|BAR|NOP)"
    return sum(not re.match(other, line) for block in blocks for line in block) / ELEMENTS


def _costs(compiled: Any, target: str, read: Any) -> dict[int, float]:
    variants = [gpu.Variant(code, False, False) for code in (NEAREST, HASHED, ACCUMULATED)]
    return {variant.code: read(compiled[target][variant]) for variant in variants}


@nvidia
def test_operations_per_element_in_ptx(compiled: Any, target: str) -> None:
    """All operations of a whole bf16 tile, addresses included, over the elements; the hash is what it adds."""
    cost = _costs(compiled, target, lambda kernel: _operations(_bf16_blocks(kernel.asm["ptx"])))
    assert cost[HASHED] < 24
    # 18 operations mix a word for two elements, 2 more take each element's half; per element, it would be 20.
    assert 9 < cost[HASHED] - cost[NEAREST] < 14
    assert 5 < cost[NEAREST] < 12
    assert 5 < cost[ACCUMULATED] < 14


@nvidia
def test_operations_per_element_in_sass(compiled: Any, target: str, tmp_path: Path) -> None:
    """The same in machine code, where the branch that serves float32 may be in the same block: an upper bound."""
    cost = _costs(
        compiled,
        target,
        lambda kernel: _operations(_fast_blocks(_tool("nvdisasm", tmp_path, kernel, "-c"))),
    )
    assert cost[HASHED] < 24
    assert 7 < cost[HASHED] - cost[NEAREST] < 14


def _opcodes(kernel: Any) -> Counter[str]:
    """How often each instruction occurs; LLVM may order the operands of a sum one way or the other."""
    return Counter(line.split()[0] for line in _assembly(kernel).splitlines() if line.startswith("\t") and line.strip())


class _AbsentDevice:
    """As much of a Triton driver as launching needs to choose and compile a kernel."""

    NUMBER = 99

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.NUMBER

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_launching_compiles_these_variants_and_no_others(
    compiled: Any, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of rows (1 and 16 are special to Triton) and the alignment of the counters."""
    cast_tiles = gpu.kernel.cast_tiles
    launched = []

    def run(*arguments: Any, **options: Any) -> None:
        launched.append(triton.JITFunction.run(cast_tiles, *arguments, **options | {"warmup": True}))

    monkeypatch.setattr(cast_tiles, "run", run)
    numbers = torch.zeros(3, dtype=torch.int64)
    before = dict(vars(triton.runtime.driver))
    triton.runtime.driver.set_active(_AbsentDevice(TARGETS[target]))
    try:
        for variant, kernel in compiled[target].items():
            for rows in (1, 16, 17):
                plan = gpu._Plan(numbers.numpy(), rows, 5, variant.strided)
                gpu._launch(plan, numbers[1:], numbers[rows % 2 :], variant, gpu._options(TARGETS[target]))
                assert _opcodes(launched[-1]) == _opcodes(kernel)
        assert len(cast_tiles.device_caches[_AbsentDevice.NUMBER][0]) == len(gpu.VARIANTS)
    finally:
        cast_tiles.device_caches.pop(_AbsentDevice.NUMBER, None)
        vars(triton.runtime.driver).clear()
        vars(triton.runtime.driver).update(before)


def test_tensors_on_the_cpu_are_refused() -> None:
    job = prepare([Case(CONTIGUOUS["one"])], NEAREST)[0].job
    with pytest.raises(ValueError, match="got tensors on cpu; move them to a GPU or call cast_"):
        gpu.cast_jobs([job], NEAREST, torch.zeros(1, dtype=torch.int64))
