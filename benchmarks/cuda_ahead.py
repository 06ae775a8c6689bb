"""What the CUDA kernels cost by their machine code, compiled ahead of time: no device is needed.

    python -m benchmarks.cuda_ahead

For every kernel and architecture: registers of a thread and bytes that it spills, as ``ptxas`` reports them; machine
instructions, and bytes loaded and stored, for each parameter; and the time for 1e9 parameters that the two roofs allow,

    memory       bytes / bandwidth
    arithmetic   instructions / (multiprocessors x 128 x clock)

of which the larger one bounds the kernel from below. Bandwidths, multiprocessors and clocks are those of the vendor's data
sheets (A100 80 GB SXM, H100 SXM, B200). Every instruction counts as one of full rate, which flatters integer products.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import RESULTS, command, keep, markdown


class Device(NamedTuple):
    """An architecture, and the device whose roofs stand in the table."""

    name: str
    capability: int
    bandwidth: float  # bytes a second
    multiprocessors: int
    clock: float  # cycles a second


DEVICES = (
    Device("A100", 80, 2.04e12, 108, 1.41e9),
    Device("H100", 90, 3.35e12, 132, 1.83e9),
    Device("B200", 100, 8.0e12, 148, 1.85e9),
)


class Kernel(NamedTuple):
    """A kernel with the arguments for which it is compiled."""

    function: Any
    types: dict[str, str]
    constants: dict[str, int]
    aligned: int  # so many of the first arguments are multiples of 16
    warps: int
    parameters: int  # that a thread moves
    shared: int  # bytes that all threads load from the same addresses: key, count, table


def kernels() -> dict[str, Kernel]:
    """The library's kernels by name."""
    from bayesopt_chain.engine import langevin_cuda
    from bayesopt_chain.random import philox_cuda

    floats = ("lr", "weight_decay", "keep", "momentum", "level", "deferred")
    step = {**dict.fromkeys(("theta", "g", "s"), "*fp32"), **dict.fromkeys(("key", "count"), "*i64")}
    step |= {**dict.fromkeys(("size", "draw"), "i32"), **dict.fromkeys(floats, "fp32")}
    normals = {"out": "*fp32", **dict.fromkeys(("keys", "counts", "table"), "*i64")}
    normals |= dict.fromkeys(("key_stride", "count_stride", "total", "runs", "programs"), "i32")
    ones = dict.fromkeys(("key_stride", "count_stride"), 1)  # Triton takes arguments that are 1 as constants
    return {
        "SGHMC step": Kernel(langevin_cuda._kernel, step, {"BLOCKS": 512, "RUN": 64}, 6, 4, 16, 16),
        "normals": Kernel(philox_cuda._normals, normals, {"BLOCKS": 512, "RUN": 64, **ones}, 1, 4, 16, 44),
    }


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, int], aligned: int, warps: int, capability: int = 90
) -> dict[str, Any]:
    """The code of a kernel with these arguments, of which the first ``aligned`` are multiples of 16: ``ptx`` and ``cubin``."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        kernel,
        types | dict.fromkeys(constants, "constexpr"),
        constexprs={(list(types | constants).index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(aligned)},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps}).asm


def tool(name: str) -> str:
    """A program of the CUDA tools that come with Triton."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def resources(ptx: str) -> dict[str, int]:
    """Registers of a thread, and bytes spilled."""
    architecture = re.search(r"\.target (sm_\w+)", ptx)
    assert architecture is not None
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kernel.ptx").write_text(ptx)
        command = [tool("ptxas-blackwell"), "-v", f"-arch={architecture.group(1)}", "kernel.ptx", "-o", "kernel.cubin"]
        said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stderr
    registers, spills = re.search(r"Used (\d+) registers", said), re.findall(r"(\d+) bytes spill", said)
    assert registers is not None
    return {"registers": int(registers.group(1)), "spilled": sum(map(int, spills))}


def machine_code(cubin: bytes) -> list[str]:
    """The instructions of a kernel, without the padding behind its last jump."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool("nvdisasm"), "-c", file.name], capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text)
    return [line for line in lines if line not in ("NOP", "BRA")]


def traffic(instructions: list[str], kind: str) -> int:
    """Bytes of all global loads (``LDG``) or stores (``STG``) of a thread."""
    found = [line for line in instructions if line.startswith(kind)]
    widths = [re.search(r"\.(64|128)\b", line) for line in found]
    return sum(int(width.group(1)) // 8 if width else 4 for width in widths)


def row(name: str, kernel: Kernel, device: Device) -> dict[str, Any]:
    """One kernel on one architecture."""
    asm = compiled(kernel.function, kernel.types, kernel.constants, kernel.aligned, kernel.warps, device.capability)
    code, n = machine_code(asm["cubin"]), kernel.parameters
    loads, stores = traffic(code, "LDG") - kernel.shared, traffic(code, "STG")
    memory = 1e9 * (loads + stores) / n / device.bandwidth
    arithmetic = 1e9 * len(code) / n / (device.multiprocessors * 128 * device.clock)
    return {
        "kernel": name,
        "device": f"{device.name} (sm_{device.capability})",
        **resources(asm["ptx"]),
        "instructions": round(len(code) / n, 1),
        "loaded": loads / n,
        "stored": stores / n,
        "memory_ms": round(1e3 * memory, 2),
        "arithmetic_ms": round(1e3 * arithmetic, 2),
    }


if __name__ == "__main__":
    command()
    rows = [row(name, kernel, device) for name, kernel in kernels().items() for device in DEVICES]
    keep(RESULTS / "cuda_ahead.json", {"rows": rows})
    print(markdown(list(rows[0]), [list(each.values()) for each in rows]))
