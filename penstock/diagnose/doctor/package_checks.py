"""The checks of packages and accelerators: facts in, findings out, no looking around."""

from __future__ import annotations

import re
from collections.abc import Iterator

from penstock.config import show_size
from penstock.diagnose.doctor.facts import Facts
from penstock.diagnose.doctor.finding import Finding, Level, Remedy
from penstock.diagnose.doctor.packages import Package

_LABELS = {"cv2": "OpenCV", "PIL": "Pillow"}

_WITHOUT = {
    "simplejpeg": "ps.image.decode() needs it for JPEG",
    "cv2": "ps.image needs it",
    "PIL": "only datasets that use it themselves need it",
    "pyarrow": "ps.from_parquet needs it",
    "scipy": "ps.audio needs it for resampling and spectrograms",
    "soundfile": "ps.audio.decode() needs it for all but plain WAV files",
    "torch": "penstock.torch needs it; loaders give NumPy batches",
}


def core_packages(facts: Facts) -> Iterator[Finding]:
    core = [package for package in facts.packages.values() if package.core]
    for package in core:
        if package.state == "present" and not _too_old(package):
            continue
        yield _unusable(package)
    sound = [p for p in core if p.state == "present" and not _too_old(p)]
    # One line for those that are as they should be: nobody reads six.
    if sound:
        text = ", ".join(f"{package.name} {package.version}" for package in sound)
        yield Finding(Level.OK, "Packages", "core", text)


def optional_packages(facts: Facts) -> Iterator[Finding]:
    for module in ("simplejpeg", "PIL", "pyarrow", "scipy", "soundfile"):
        package = facts.packages.get(module)
        if package is None:
            continue
        if package.state == "present" and not _too_old(package):
            yield Finding(Level.OK, "Packages", _label(package), package.version)
        else:
            yield _unusable(package)


def kernel(facts: Facts) -> Iterator[Finding]:
    if not facts.no_kernel:
        yield Finding(
            Level.OK, "Packages", "kernel", "built: a crop decodes only its part of a JPEG"
        )
        return
    yield Finding(
        Level.NOTE,
        "Packages",
        "kernel",
        "not in use: simplejpeg decodes every row down to the end of a crop",
        why=facts.no_kernel,
    )


def opencv(facts: Facts) -> Iterator[Finding]:
    package = facts.packages.get("cv2")
    if package is None:
        return
    if package.state == "broken" and "libGL" in package.error:
        yield Finding(
            Level.PROBLEM,
            "Packages",
            "OpenCV",
            "needs a display's libraries, which are not here",
            why=package.error,
            remedies=(_opencv_anew(facts.opencv, "use the build without windows:"),),
        )
    elif package.state != "present" or _too_old(package):
        yield _unusable(package)
    elif not package.stays_single:
        yield Finding(
            Level.WARNING,
            "Packages",
            "OpenCV",
            f"{package.version}: its threads cannot be turned off",
            why=f"It was built with {package.threads}; each worker runs a pool of its own.",
            remedies=(
                Remedy("hold it to one thread:", "export OMP_NUM_THREADS=1"),
                _opencv_anew(facts.opencv, "or use the usual build:"),
            ),
        )
    else:
        own = "built without threads"
        if package.threads != "none":
            own = f"threads by {package.threads}, turned off in workers"
        yield Finding(Level.OK, "Packages", "OpenCV", f"{package.version}, {own}")
    if len(facts.opencv) > 1:
        yield Finding(
            Level.WARNING,
            "Packages",
            "OpenCV",
            f"{len(facts.opencv)} distributions installed over each other",
            why=f"{', '.join(facts.opencv)} share one folder: which one is imported depends on "
            "which came last, and removing either breaks the other.",
            remedies=(_opencv_anew(facts.opencv, "keep one (headless: without windows):"),),
        )


def gil_holders(facts: Facts) -> Iterator[Finding]:
    if not facts.python.free_threaded or facts.python.gil:
        return
    holders = sorted(
        package.name
        for package in facts.packages.values()
        if package.state == "present" and package.gil
    )
    if holders:
        yield Finding(
            Level.WARNING,
            "Packages",
            "GIL",
            f"turned on again by {', '.join(holders)}",
            why="A package that does not declare itself free-threaded turns the GIL on for all.",
            remedies=(
                Remedy("look for newer ones:", f"pip install --upgrade {' '.join(holders)}"),
                Remedy("or, at your own risk, keep it off:", "export PYTHON_GIL=0"),
            ),
        )


def torch(facts: Facts) -> Iterator[Finding]:
    package = facts.packages.get("torch")
    if package is None:
        return
    if package.state != "present" or _too_old(package):
        yield _unusable(package, topic="torch")
        return
    build = "CPU build"
    if package.cuda:
        build = f"built for CUDA {package.cuda}"
    elif package.rocm:
        build = f"built for ROCm {package.rocm}"
    elif any(device.kind in ("mps", "xpu") for device in package.devices):
        build = f"built for {package.devices[0].kind.upper()}"
    yield Finding(Level.OK, "torch", "torch", f"{package.version}, {build}")
    if package.devices:
        for number, device in enumerate(package.devices):
            size = f", {show_size(device.memory)}" if device.memory else ""
            yield Finding(Level.OK, "torch", f"{device.kind}:{number}", f"{device.name}{size}")
    else:
        yield _no_accelerator(facts, package)


def _no_accelerator(facts: Facts, package: Package) -> Finding:
    hidden = facts.settings.get("CUDA_VISIBLE_DEVICES")
    built = package.cuda or package.rocm
    if hidden is not None and built and hidden.strip() in ("", "-1"):
        return Finding(
            Level.WARNING,
            "torch",
            "accelerator",
            f'none: CUDA_VISIBLE_DEVICES is "{hidden}"',
            why="That hides every GPU.",
            remedies=(Remedy("show them:", "unset CUDA_VISIBLE_DEVICES"),),
        )
    if facts.nvidia and not built:
        return Finding(
            Level.WARNING,
            "torch",
            "accelerator",
            "none, though there is an NVIDIA driver",
            why="This torch was built for the CPU alone.",
            remedies=(
                Remedy(
                    "install one built for CUDA (see https://pytorch.org/get-started):",
                    "pip uninstall -y torch && pip install torch",
                ),
            ),
        )
    if facts.nvidia:
        return Finding(
            Level.WARNING,
            "torch",
            "accelerator",
            "none: torch cannot use the NVIDIA driver",
            why=" ".join(package.said) or "Driver and CUDA version may not fit together.",
            remedies=(Remedy("see whether the driver answers:", "nvidia-smi"),),
        )
    if built:
        return Finding(
            Level.NOTE,
            "torch",
            "accelerator",
            "none: no driver to be seen, training runs on the CPU",
            remedies=(Remedy("start the container with", "docker run --gpus all ..."),)
            if facts.container
            else (),
        )
    return Finding(Level.NOTE, "torch", "accelerator", "none: training runs on the CPU")


def _unusable(package: Package, topic: str = "Packages") -> Finding:
    """A package that is missing, too old, or cannot be imported."""
    why, minimum = "", f">={package.minimum}" if package.minimum else ""
    if package.state == "absent":
        level = Level.PROBLEM if package.core else Level.NOTE
        text = f"not installed: {_WITHOUT.get(package.module, 'Penstock does not run without it')}"
        what = f"penstock[{package.extra}]" if package.extra else f"{package.name}{minimum}"
        remedy = Remedy("install it:", f'pip install "{what}"')
    elif package.state == "broken":
        level, text, why = Level.PROBLEM, "installed, but cannot be imported", package.error
        remedy = Remedy(
            "install it anew:", f"pip install --force-reinstall --no-deps {package.name}"
        )
    else:
        level = Level.PROBLEM if package.core else Level.WARNING
        text = f"{package.version} is too old: {package.minimum} or later is needed"
        remedy = Remedy("renew it:", f'pip install --upgrade "{package.name}{minimum}"')
    return Finding(level, topic, _label(package), text, why=why, remedies=(remedy,))


def _opencv_anew(installed: tuple[str, ...], how: str) -> Remedy:
    contrib = any("contrib" in name for name in installed)
    keep = "opencv-contrib-python-headless" if contrib else "opencv-python-headless"
    gone = " ".join(installed or ("opencv-python",))
    return Remedy(how, f"pip uninstall -y {gone} && pip install {keep}")


def _label(package: Package) -> str:
    return _LABELS.get(package.module, package.name)


def _too_old(package: Package) -> bool:
    if not package.version or not package.minimum:
        return False
    return _numbers(package.version) < _numbers(package.minimum)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, without what a build or a pre-release adds.

    >>> _numbers("2.13.0+cpu"), _numbers("4.8")
    ((2, 13), (4, 8))
    """
    leading = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in leading[0].split(".")] if leading else []
    # 14 and 14.0 are the same version.
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


PACKAGE_CHECKS = (core_packages, optional_packages, opencv, kernel, gil_holders, torch)
