"""The machine's C++ compiler, and a cache of what it made, addressed by content."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..errors import CompileError, CompilerMissingError, KernelError

SOURCES = Path(__file__).resolve().parent
# What debug information calls SOURCES: checkouts at other paths share the cache.
_RECORDED = "/lily_mlx/metal/cpu"
CACHE_ENVIRONMENT = "LILY_MLX_CACHE"
_COMMON = ("-std=c++17", "-fPIC", "-fno-strict-aliasing", "-fno-math-errno", "-fno-trapping-math",
           "-ffp-contract=off", "-fvisibility=hidden", "-w")  # fmt: skip


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: how to call it, and what it says about itself."""

    command: tuple[str, ...]
    version: str

    @property
    def is_clang(self) -> bool:
        return "clang" in self.version

    @property
    def unroll(self) -> str:
        """How it spells `#pragma unroll`."""
        return "#pragma unroll" if self.is_clang else "#pragma GCC unroll 64"


@functools.cache
def find_compiler() -> Compiler:
    """The compiler that CXX names, else the first of c++, g++ and clang++ on PATH.

    Raises:
        CompilerMissingError: there is none.
    """
    named = os.environ.get("CXX", "").strip()
    for name in [named] if named else ["c++", "g++", "clang++"]:
        command = tuple(shlex.split(name))
        if shutil.which(command[0]):
            answer = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
            if answer.returncode == 0:
                return Compiler(command, answer.stdout)
    remedy = "xcode-select --install" if sys.platform == "darwin" else "sudo apt-get install g++"
    looked_for = f"CXX={named}" if named else "c++, g++ or clang++ on PATH"
    raise CompilerMissingError(
        f"the cpu backend needs a C++ compiler and found none ({looked_for}); install one, for example with: {remedy}"
    )


def cache_directory() -> Path:
    """Where compiled kernels are kept: LILY_MLX_CACHE, else lily_mlx in the user's cache directory."""
    given = os.environ.get(CACHE_ENVIRONMENT)
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lily_mlx"


def build_runtime() -> Path:
    """The compiled C++ runtime, which schedules threads and checks them."""
    sources = [SOURCES / name for name in ("runtime.cpp", "switch.cpp", "pool.cpp", "checker.cpp", "hooks.cpp")]
    flags = ("-O2", "-g1", "-fvisibility=default", "-shared", "-pthread")
    return _build("runtime", sources, [], flags)


def build_kernel(name: str, unit: str, checked: bool) -> Path:
    """The compiled translation unit of a kernel.

    Raises:
        CompileError: the compiler rejected it.
    """
    # Without scalar replacement a vector is read and written as a whole, so that its alignment is checked.
    flags = ("-O1", "-g1", "-fno-tree-sra", "-DLILY_CHECKED") if checked else ("-O2",)
    return _build(name, [], [unit], (*flags, *_native(), "-shared", *_undefined()), checked)


def source_line(library: str, offset: int) -> str | None:
    """The line of a kernel's text that an instruction of its library comes from, e.g. "step.metal:12".

    None where the tool that reads debug information is missing.
    """
    tool = shutil.which("atos") if sys.platform == "darwin" else shutil.which("addr2line")
    if tool is None:
        return None
    if sys.platform == "darwin":
        command = [tool, "-i", "-fullPath", "-o", library, f"0x{offset:x}"]
    else:
        command = [tool, "-i", "-e", library, f"0x{offset:x}"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in answer.stdout.splitlines():
        found = re.search(r"(\S[^()]*):(\d+)", line)
        # Helpers of the compat headers are not the kernel's own lines.
        if found and not found.group(1).startswith(_RECORDED) and int(found.group(2)) > 0:
            # Debug information puts the working directory before names such as "<source>".
            return re.sub(r".*/(<[^/]*>)$", r"\1", found.group(1)) + ":" + found.group(2)
    return None


def _undefined() -> tuple[str, ...]:
    # The runtime's functions are found when the kernel is loaded.
    return ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()


@functools.cache
def _native() -> tuple[str, ...]:
    """The flag for this processor's own instructions, if the compiler takes it."""
    for flag in ("-march=native", "-mcpu=native"):
        command = [*find_compiler().command, flag, "-x", "c++", "-fsyntax-only", os.devnull]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return (flag,)
    return ()


@functools.cache
def _machine() -> str:
    """What a build depends on besides text and compiler: the processor's instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.machine() + platform.processor()


@functools.cache
def _headers() -> str:
    return "".join(path.read_text() for path in sorted(SOURCES.glob("*.h")))


def _build(name: str, sources: list[Path], units: list[str], flags: tuple[str, ...], instrument: bool = False) -> Path:
    compiler = find_compiler()
    content = [
        *compiler.command,
        compiler.version,
        _machine(),
        *_COMMON,
        *flags,
        str(instrument),
        _headers(),
        _RECORDED,
    ]
    content += [path.read_text() for path in sources] + units
    digest = hashlib.sha256("\0".join(content).encode()).hexdigest()[:24]
    folder = cache_directory()
    target = folder / f"{name}-{digest}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch_folder = tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-")
    except OSError as error:
        raise KernelError(
            f"kernel {name}: cannot keep compiled kernels in {folder}: {error.strerror}; "
            f"set {CACHE_ENVIRONMENT} to a directory that can be written"
        ) from error
    with scratch_folder as scratch:
        files = [str(path) for path in sources]
        for number, unit in enumerate(units):
            path = Path(scratch) / f"{name}{number or ''}.cpp"
            path.write_text(unit)
            files.append(str(path))
        made = Path(scratch) / "made.so"
        command = [*compiler.command, *_COMMON, f"-I{SOURCES}", f"-ffile-prefix-map={SOURCES}={_RECORDED}"]
        if instrument:
            # The calls that the sanitizer inserts are answered by our runtime, so its own is not linked.
            compiled = str(Path(scratch) / "made.o")
            compile_flags = [flag for flag in flags if flag not in _undefined() and flag != "-shared"]
            _run(name, [*command, *compile_flags, "-fsanitize=thread", "-c", *files, "-o", compiled])
            files = [compiled]
        _run(name, [*command, *flags, *files, "-o", str(made)])
        os.replace(made, target)  # atomic: several processes may build the same kernel
    return target


def _run(name: str, command: list[str]) -> None:
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        words = "\n".join((answer.stderr or answer.stdout).splitlines()[:40])
        raise CompileError(f"kernel {name} does not compile:\n{words}\n(command: {shlex.join(command)})")
