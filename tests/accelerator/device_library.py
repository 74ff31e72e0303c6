"""Compiles the emulated device with the C++ compiler alone. As a script: tells where it is, or why there is none.

The library is kept in build/accelerator of the checkout, in a folder named by what it is made from.
"""

from __future__ import annotations

import hashlib
import os
import runpy
import shutil
import signal
import subprocess
import sys
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path

RELEASE = "2.13"
"""The release of torch whose internals the source is written for."""
SOURCE = Path(__file__).with_name("emulated_cuda.cpp")
FOLDER = Path(__file__).parents[2] / "build" / "accelerator"
MODULE = "_emulated_cuda"
OPTIONS = ["-O1", "-g0", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-DUSE_C10D_GLOO"]
LIBRARIES = ["c10", "torch_cpu", "torch", "torch_python"]
SECONDS = 1200
"""More than the compiler takes even on a machine that has much else to do."""


def torch_folder() -> Path:
    """Return the folder of the package torch, without importing it."""
    found = find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


@cache
def library() -> Path:
    """Return the path of the library, which may not be there yet."""
    version = (torch_folder() / "version.py").read_text()
    made_from = "\n".join([SOURCE.read_text(), version, sys.version, *OPTIONS])
    return FOLDER / hashlib.sha256(made_from.encode()).hexdigest()[:16] / f"{MODULE}.so"


def compiler() -> str | None:
    """Return the C++ compiler: that of the variable CXX, else the system's."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++"]
    return next((path for path in map(shutil.which, names) if path), None)


def unsupported() -> str | None:
    """Return why there is no emulated device here, before anything is compiled; None if there can be one."""
    if sys.platform != "linux":
        return f"it is written for Linux, and this is {sys.platform}"
    torch = runpy.run_path(str(torch_folder() / "version.py"))
    if torch["cuda"] or torch["hip"]:
        return f"torch {torch['__version__']} is a build for GPUs, and the emulation needs the one for CPUs"
    if not torch["__version__"].startswith(f"{RELEASE}."):
        return f"it is written for torch {RELEASE}, and this is torch {torch['__version__']}"
    if not library().exists() and compiler() is None:
        return "there is no C++ compiler"
    return None


def build() -> str | None:
    """Compile the library unless it is there; return why it could not be, in one line."""
    if reason := unsupported():
        return reason
    if library().exists():
        return None
    library().parent.mkdir(parents=True, exist_ok=True)
    made = library().with_suffix(f".{os.getpid()}")
    root = torch_folder()
    folders = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    command = [
        *(compiler() or "", *OPTIONS, f"-DTORCH_EXTENSION_NAME={MODULE}", "-DTORCH_API_INCLUDE_EXTENSION_H"),
        *(part for folder in folders for part in ("-isystem", str(folder))),
        *(str(SOURCE), "-o", str(made), f"-L{root / 'lib'}", *(f"-l{name}" for name in LIBRARIES)),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, printed = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the compiler proper is a child of the one that was started
        process.communicate()
        return f"the compiler did not end within {SECONDS} s"
    if process.returncode:
        errors = [line for line in printed.splitlines() if "error" in line] or ["no message"]
        return f"it could not be compiled: {errors[0]}"
    made.rename(library())
    return None


if __name__ == "__main__":
    reason = build()
    sys.stdout.write(f"no emulated device: {reason}\n" if reason else f"{library()}\n")
    sys.exit(1 if reason else 0)
