"""Disassembly of compiled kernels with the cuobjdump that ships in the Triton wheel."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections import Counter
from pathlib import Path

_INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,6})\*/\s+(.*?);")
_SPILLS = ("LDL", "STL")
_TILE_EXPONENTS = 16  # at least, in one thread


def cuobjdump() -> Path | None:
    """Path of the disassembler, or None where Triton is not installed."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return path if path.exists() else None


def disassemble(cubin: bytes, folder: Path) -> list[tuple[int, str]]:
    """(address, instruction) of every instruction."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = cuobjdump()
    assert tool is not None
    text = subprocess.run([str(tool), "--dump-sass", str(path)], capture_output=True, text=True, check=True).stdout
    return [(int(m.group(1), 16), m.group(2)) for m in map(_INSTRUCTION.match, text.splitlines()) if m]


def opcode(instruction: str) -> str:
    """ "FFMA" of "@!P0 FFMA.FTZ R1, ..."."""
    return re.sub(r"^@!?U?P\w+ ", "", instruction).split(" ")[0].split(".")[0]


def spills(code: list[tuple[int, str]]) -> int:
    """Loads and stores of local memory."""
    return sum(opcode(text) in _SPILLS for _, text in code)


def mma_loops(code: list[tuple[int, str]]) -> list[Counter[str]]:
    """Opcode counts of the loops that issue wgmma and exponentiate a tile, shortest first: that of full tiles, then
    that of masked tiles."""
    position = {address: i for i, (address, _) in enumerate(code)}
    loops = []
    for i, (address, text) in enumerate(code):
        target = re.search(r"0x([0-9a-f]+)", text) if opcode(text) == "BRA" else None
        if target is None or int(target.group(1), 16) >= address or int(target.group(1), 16) not in position:
            continue
        body = [opcode(t) for _, t in code[position[int(target.group(1), 16)] : i + 1]]
        if "HGMMA" in body and body.count("MUFU") >= _TILE_EXPONENTS:
            loops.append(Counter(body))
    return sorted(loops, key=lambda c: c.total())
