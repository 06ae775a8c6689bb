"""Draws of the counter-based stream in one call, as tests ask for them."""

import re
import subprocess
from pathlib import Path

import torch

from bayesopt_chain.random.philox import draw_elements, in_tensors, parts_of_leaves


def whole_leaves(sizes, draws):
    """All elements of leaves of these sizes."""
    return parts_of_leaves(tuple(((0, n),) for n in sizes), tuple(draws))


def leaf(key, step, size, draw, dtype, kind="gaussian"):
    """A whole leaf."""
    return draw_elements(key, step, whole_leaves([size], [draw]), dtype, kind)[0]


def leaf_in_tensors(key, step, size, draw, dtype):
    """A whole leaf's normals by tensor operations."""
    return in_tensors(key, step, whole_leaves([size], [draw]), dtype)


def parts(key, step, runs, draws, dtype, kind="gaussian"):
    """Runs of leaves."""
    return draw_elements(key, step, parts_of_leaves(tuple(runs), tuple(draws)), dtype, kind)


def cut(x, runs):
    """Runs of a whole leaf that has been drawn."""
    return torch.cat([x[..., a : a + n] for a, n in runs], dim=-1)


# What can be known of a Triton kernel where there is no device: its code


INEXACT = r"sin\.approx|cos\.approx|lg2\.approx|ld\.local|st\.local"  # off by more than 1e-6; and scratch memory


def compiled(kernel, types, constants, aligned, warps, capability=90):
    """The code of a kernel, of whose arguments the first ``aligned`` are multiples of 16: ``ptx`` and ``cubin``."""
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


def cuda_tool(name: str, *arguments: str) -> str:
    """What a program of the CUDA tools that come with Triton says."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    done = subprocess.run([str(tool), *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def registers_and_spills(ptx: str, folder: Path) -> tuple[int, int]:
    """Registers of a thread, and bytes spilled."""
    (folder / "kernel.ptx").write_text(ptx)
    architecture = re.findall(r"\.target (sm_\w+)", ptx)[0]
    files = (str(folder / "kernel.ptx"), "-o", str(folder / "kernel.cubin"))
    said = cuda_tool("ptxas-blackwell", "-v", f"-arch={architecture}", *files)
    return int(re.findall(r"Used (\d+) registers", said)[0]), sum(map(int, re.findall(r"(\d+) bytes spill", said)))


def machine_code(cubin: bytes, folder: Path) -> list[str]:
    """The instructions of a kernel, without the padding behind its last jump."""
    (folder / "code.cubin").write_bytes(cubin)
    text = cuda_tool("nvdisasm", "-c", str(folder / "code.cubin"))
    lines = re.findall(r"/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text)
    return [line for line in lines if line not in ("NOP", "BRA")]


def traffic(instructions: list[str], kind: str) -> int:
    """Bytes of all global loads (``LDG``) or stores (``STG``) of a thread."""
    widths = [re.findall(r"\.(64|128)\b", line) for line in instructions if line.startswith(kind)]
    return sum(int(width[0]) // 8 if width else 4 for width in widths)
