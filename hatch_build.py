"""Compiles the optional image kernel when a wheel or an editable install is built.

The kernel only makes decoding faster. The package is built without it, and works, if there is no C
compiler, if the headers of Python or libjpeg-turbo are missing, or with ``PENSTOCK_NO_KERNEL=1``.
``PENSTOCK_KERNEL=require`` makes that an error: use it for wheels that are given to others.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags

_FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-pthread"]
# Products and sums must be rounded each, as Python rounds them: drawn parameters depend on it.
_FLAGS += ["-ffp-contract=off"]
_LIBRARIES = ["-ljpeg", "-lm"]

# The stable ABI has the buffer protocol from 3.11 on, and free-threaded Python has no stable ABI. A
# build on an older or free-threaded Python works with that version of Python only.
_STABLE = sys.version_info >= (3, 11) and not sysconfig.get_config_var("Py_GIL_DISABLED")


class CannotCompile(Exception):
    """The kernel cannot be built; the message says why."""


class KernelHook(BuildHookInterface[Any]):
    """Adds the kernel to the build, or displays a warning that says why it is left out."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        required = self._required()
        package = Path(self.root) / "penstock"
        editable = version == "editable"
        if editable:
            # Remove the kernel of an earlier install: it may not match the source.
            for stale in package.glob("_kernel.*.so"):
                stale.unlink()
        self._place = Path(tempfile.mkdtemp(prefix="penstock-kernel-"))
        try:
            built = _compile(Path(self.root) / "native" / "module.c", self._place)
        except CannotCompile as why:
            shutil.rmtree(self._place)
            if required:
                self.app.abort(
                    f"penstock: the image kernel cannot be built: {why}. PENSTOCK_KERNEL=require "
                    "makes that an error; unset it to build without the kernel."
                )
            self.app.display_warning(
                f"penstock: building without the optional image kernel: {why}. Images are decoded "
                "by simplejpeg and OpenCV instead."
            )
            return
        if editable:
            shutil.move(built, package / built.name)
        else:
            build_data["force_include"][str(built)] = f"penstock/{built.name}"
        build_data["pure_python"] = False
        if _STABLE:
            build_data["tag"] = f"cp311-abi3-{_platform()}"
        else:
            build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(self._place, ignore_errors=True)

    def _required(self) -> bool:
        asked = os.environ.get("PENSTOCK_KERNEL", "")
        if asked not in ("", "require"):
            self.app.abort(f'penstock: PENSTOCK_KERNEL is {asked!r}; give "require", or unset it.')
        return asked == "require"


def _compile(source: Path, place: Path) -> Path:
    """Compile the module into the directory ``place``; returns its path."""
    if os.environ.get("PENSTOCK_NO_KERNEL", "0") not in ("", "0"):
        raise CannotCompile("PENSTOCK_NO_KERNEL is set")
    if sys.implementation.name != "cpython":
        raise CannotCompile(f"it does not support {sys.implementation.name}")
    suffix = ".abi3.so" if _STABLE else sysconfig.get_config_var("EXT_SUFFIX")
    built = place / f"_kernel{suffix}"
    command = [
        *_compiler(),
        *_FLAGS,
        *(["-DPy_LIMITED_API=0x030B0000"] if _STABLE else []),
        f"-I{sysconfig.get_path('include')}",
        *_from_environment("CPPFLAGS"),
        *_from_environment("CFLAGS"),
        str(source),
        "-o",
        str(built),
        *_from_environment("LDFLAGS"),
        *_LIBRARIES,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CannotCompile(f"no C compiler ({error})") from error
    if done.returncode:
        raise CannotCompile(_first_error(done.stderr))
    _check(built)
    return built


def _compiler() -> list[str]:
    named = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    command = shlex.split(named)
    # The compiler that built Python may not be installed on this machine.
    return command if shutil.which(command[0]) else ["cc"]


def _from_environment(name: str) -> list[str]:
    return shlex.split(os.environ.get(name, ""))


def _first_error(output: str) -> str:
    errors = [line for line in output.splitlines() if "error" in line or "cannot find" in line]
    return (errors or output.splitlines() or ["the compiler failed without a message"])[0].strip()


def _check(built: Path) -> None:
    """Load the module: a library may lack symbols that its headers declare."""
    loader = ExtensionFileLoader("penstock._kernel", str(built))
    spec = ModuleSpec(loader.name, loader, origin=str(built))
    try:
        loader.exec_module(loader.create_module(spec))
    except ImportError as error:
        raise CannotCompile(f"it cannot be loaded ({error})") from error


def _platform() -> str:
    return next(
        tag.platform
        for tag in sys_tags()
        if "manylinux" not in tag.platform and "musllinux" not in tag.platform
    )
