"""What pyproject.toml cannot say: where there is a C++ compiler, a wheel carries the kernels, compiled.

One library for each source and each level of processor (bayesopt_chain/random/compiled.py), beside the source. The wheel then
belongs to a platform, but to no version of Python: the libraries are called through ctypes. Without a compiler, and on
systems other than Linux, it is a wheel of Python files, and kernels are compiled where they are used.

A package index shows the README apart from the repository: its links, which are relative there, get the project's address.
"""

import platform
import re
import sys
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
spec = spec_from_file_location("compiled", ROOT / "bayesopt_chain" / "random" / "compiled.py")
compiled = module_from_spec(spec)
spec.loader.exec_module(compiled)


def readme():
    """The README with absolute links: pages as the repository shows them, pictures as files."""
    home = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Homepage"]
    text = re.sub(r"(!\[[^]]*\]\()(?!https?://)", rf"\1{home}/raw/main/", (ROOT / "README.md").read_text())
    return re.sub(r"((?<!!)\[[^]]*\]\()(?!https?://|#)", rf"\1{home}/blob/main/", text)


class BuildKernels(build_py):
    """The Python files, then the kernels beside them."""

    def run(self):
        super().run()
        if self.editable_mode or sys.platform != "linux":
            return
        levels = compiled.LEVELS if platform.machine() == "x86_64" else ["default"]
        for source in Path(self.build_lib).rglob("*.cpp"):
            for level in levels:
                try:
                    compiled.prebuild(source, level, compiled.library_of(source, level))
                except compiled.CompileError as err:
                    self.announce(f"no {level} library of {source.name}: {err}", level=3)


class Wheel(bdist_wheel):
    """A wheel of a platform if it holds libraries."""

    def get_tag(self):
        python, abi, system = super().get_tag()
        return (
            ("py3", "none", self.plat_name.replace("-", "_").replace(".", "_"))
            if self.holds_libraries()
            else (python, abi, system)
        )

    def write_wheelfile(self, *args, **kwargs):
        self.root_is_pure = not self.holds_libraries()
        super().write_wheelfile(*args, **kwargs)

    def holds_libraries(self):
        return any(Path(self.bdist_dir).rglob("*.so"))


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    cmdclass={"build_py": BuildKernels, "bdist_wheel": Wheel},
)
