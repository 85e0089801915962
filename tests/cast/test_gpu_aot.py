"""Compiles the GPU kernel with no GPU present, and reads the machine code."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from fcoptim.cast import gpu
from fcoptim.cast.rules import ACCUMULATED, HASHED, NEAREST

from .gpu_checks import CONTIGUOUS, Case, prepare

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Of a whole tile, a thread holds 16 elements: an access of 128 bits per thread is one byte per element.
ELEMENTS = 16

pytestmark = pytest.mark.skipif(
    not isinstance(gpu.kernel.cast_tiles, triton.JITFunction), reason="TRITON_INTERPRET is set"
)
nvidia = pytest.mark.parametrize("target", ["sm_80", "sm_90"])
any_target = pytest.mark.parametrize("target", TARGETS)


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[gpu.Variant, Any]]:
    return {name: gpu.compile_for(target) for name, target in TARGETS.items()}


def _blocks(assembly: str) -> Iterator[list[str]]:
    """Split PTX or AMDGCN into basic blocks of instructions, without predicates and comments."""
    block: list[str] = []
    for line in assembly.splitlines():
        text = re.sub(r"^@!?%p\d+\s+", "", re.split(r"//|;(?= )|\t; ", line)[0].strip())
        label = re.match(r"(\$L__BB|\.LBB|BB)\d", text)
        if label or text.startswith(("bra", "s_branch", "s_cbranch", "ret", "s_endpgm")):
            yield block
            block = []
        elif re.match(r"[a-z]", text):
            block.append(text)
    yield block


def _accesses(block: list[str]) -> list[tuple[str, int]]:
    """List a block's accesses to the tensors as (load or store, bits); the table is read in 64-bit words."""
    found = []
    for line in block:
        ptx = re.match(r"(ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)", line)
        amd = re.match(r"(?:buffer|flat|global)_(load|store)_(dwordx(\d)|dword|u?short|u?byte)", line)
        if ptx:
            found.append(({"ld": "load", "st": "store"}[ptx[1]], int(ptx[2] or 1) * int(ptx[3])))
        elif amd and not (line.startswith("global_load") and amd[3]):
            width = 32 * int(amd[3] or 1) if amd[2].startswith("dword") else 16
            found.append((amd[1], width))
    return [(kind, width) for kind, width in found if width != 64]


def _fast_blocks(kernel: Any) -> list[list[str]]:
    """Return the basic blocks that whole, aligned tiles run through and that touch the tensors."""
    assembly = kernel.asm["ptx" if "ptx" in kernel.asm else "amdgcn"]
    return [block for block in _blocks(assembly) if any(width == 128 for _, width in _accesses(block))]


def _count(blocks: list[list[str]], kind: str, width: int = 128) -> int:
    return sum(_accesses(block).count((kind, width)) for block in blocks)


@any_target
def test_every_variant_becomes_machine_code(compiled: Any, target: str) -> None:
    kernels = compiled[target]
    assert len(kernels) == 12
    assert set(kernels) == set(gpu.VARIANTS)
    for kernel in kernels.values():
        binary = kernel.asm["hsaco" if target == "gfx942" else "cubin"]
        assert binary[:4] == b"\x7fELF"
        text = kernel.asm["amdgcn" if target == "gfx942" else "ptx"]
        assert re.search(rf"(\.target |gcnasm-|amdgcn-amd-amdhsa--){target}", text)


@any_target
def test_whole_tiles_move_by_128_bits(compiled: Any, target: str) -> None:
    """Every access of a whole tile, of every variant: 4 loads of masters; stores of bf16 (2) or fp32 (4).

    Error feedback loads and stores 2 of accumulators; counting loads what is served, as bf16 or fp32.
    """
    for variant, kernel in compiled[target].items():
        blocks = _fast_blocks(kernel)
        kept = 2 * (variant.code == ACCUMULATED)
        assert _count(blocks, "load") == 4 + kept + 6 * variant.counted, variant
        assert _count(blocks, "store") == 2 + 4 + kept, variant
        narrow = [access for block in blocks for access in _accesses(block) if access[1] != 128]
        assert not narrow, (variant, narrow)


@any_target
def test_traffic_is_6_or_10_bytes_per_element(compiled: Any, target: str) -> None:
    """The branch that serves float32 is the one with 4 stores; all other blocks are bf16's."""
    for variant, kernel in compiled[target].items():
        blocks = [block for block in _fast_blocks(kernel) if _count([block], "store") != 4]
        moved = 16 * (_count(blocks, "load") + _count(blocks, "store")) / ELEMENTS
        if variant.counted:
            moved -= 4 * _counts_in_one_block(kernel)
        assert moved == (10 if variant.code == ACCUMULATED else 6) + 2 * variant.counted, variant
