"""The checks: pure functions from ``Facts`` to findings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from penstock.config import SMALL_SHM, show_size
from penstock.diagnose.doctor.facts import THREAD_SETTINGS, Directory, Facts, Limit, Package
from penstock.diagnose.doctor.report import Finding, Fix, Level
from penstock.host.mounts import is_network

LITTLE_ROOM = 1 << 30
"""Bytes; a store with less room is of little use."""

FEW_FILES = 4096
"""Open files. Workers, slots, stores, torch and the files being read all hold descriptors."""

FEW_PROCESSES = 1024
"""Processes. Threads count too: a few dozen workers with the thread pools of their libraries
exceed 500."""

_LABELS = {"cv2": "OpenCV", "PIL": "Pillow"}

_WITHOUT = {
    "simplejpeg": "ps.image.decode() needs it for JPEG",
    "cv2": "ps.image needs it",
    "PIL": "only datasets that use Pillow themselves need it",
    "pyarrow": "ps.from_parquet needs it",
    "scipy": "ps.audio needs it for resampling and spectrograms",
    "soundfile": "ps.audio.decode() needs it for all but plain WAV files",
    "obstore": "URLs of buckets and web servers need it",
    "fsspec": "URLs that obstore does not know need it",
    "zstandard": "from_tar and from_mds need it for shards compressed with zstd",
    "ray": 'cluster="ray" needs it',
    "torch": "penstock.torch needs it; other loaders return NumPy batches",
}


def check(facts: Facts) -> list[Finding]:
    """All findings, in the order of the report."""
    return [finding for run in CHECKS for finding in run(facts)]


# Python and cores


def python(facts: Facts) -> Iterator[Finding]:
    interpreter = facts.python
    version = ".".join(map(str, interpreter.version))
    if interpreter.version < (3, 10):
        yield Finding(
            Level.PROBLEM,
            "Python",
            "python",
            f"{version} is too old",
            why="Penstock needs Python 3.10 or later.",
            remedies=(Fix("make an environment with a newer Python:", "uv venv --python 3.12"),),
        )
    elif interpreter.free_threaded and interpreter.gil:
        yield Finding(
            Level.WARNING,
            "Python",
            "python",
            f"{version}, free-threaded, but its GIL is on",
            why="Only one worker thread runs Python code at a time.",
            remedies=(Fix("turn the GIL off:", "export PYTHON_GIL=0"),),
        )
    elif interpreter.free_threaded:
        text = f"{version}, free-threaded: workers are threads"
        yield Finding(Level.OK, "Python", "python", text)
    else:
        text = f"{version}, with the GIL: Python code runs in worker processes"
        yield Finding(Level.OK, "Python", "python", text)
    yield Finding(Level.OK, "Python", "penstock", facts.penstock)


def cores(facts: Facts) -> Iterator[Finding]:
    usable, mask, machine = facts.cores.usable, facts.cores.mask, facts.cores.machine
    if usable == machine:
        single = usable == 1
        yield Finding(
            Level.NOTE if single else Level.OK,
            "Machine",
            "cores",
            "1: training and data preparation share it" if single else f"{usable}, all usable",
        )
        return
    level = Level.WARNING if usable == 1 else Level.NOTE
    if usable < mask:
        text = f"{usable} of {machine}: the container's quota allows no more"
        fix = Fix("raise the quota:", f"docker run --cpus={machine} ...")
    else:
        text = f"{usable} of {machine}: the CPU affinity of this process allows no more"
        fix = Fix("request more cores, under Slurm with", f"#SBATCH --cpus-per-task={machine}")
    yield Finding(level, "Machine", "cores", text, remedies=(fix,))


def thread_settings(facts: Facts) -> Iterator[Finding]:
    usable = facts.cores.usable
    for name in THREAD_SETTINGS:
        value = facts.settings.get(name)
        if value is None:
            continue
        # OpenMP takes a list with a number for each level of nesting; workers use the first level.
        first = value.split(",")[0].strip()
        if not first.isdecimal() or first == "0":
            yield Finding(
                Level.WARNING,
                "Machine",
                name,
                f"{value!r} is not a number of threads",
                remedies=(Fix("leave it to Penstock:", f"unset {name}"),),
            )
        elif int(first) > 1 and usable > 1:
            yield Finding(
                Level.WARNING,
                "Machine",
                name,
                f"{first}: {usable} worker processes would run {usable * int(first)} threads",
                why=f"Worker processes inherit the variable, and there are {usable} cores. If it "
                "is not set, Penstock gives each worker one thread and the training process keeps "
                "its own default.",
                remedies=(Fix("leave it to Penstock:", f"unset {name}"),),
            )
        else:
            yield Finding(Level.OK, "Machine", name, first)


# Memory


def memory(facts: Facts) -> Iterator[Finding]:
    usable, machine, available = (
        facts.memory.usable,
        facts.memory.machine,
        facts.memory.available,
    )
    free = "" if available is None else f", {show_size(available)} free"
    text = show_size(usable) + free
    if available is not None and available < max(LITTLE_ROOM, usable // 20):
        yield Finding(
            Level.WARNING,
            "Memory",
            "memory",
            text,
            why="A memory cache or many prefetched batches may not fit.",
            remedies=(
                Fix("list the processes that use most:", "ps aux --sort=-rss | head"),
                Fix("lower the limit of each loader:", '.loader(memory="256MB")'),
            ),
        )
    elif usable < machine:
        yield Finding(
            Level.NOTE,
            "Memory",
            "memory",
            f"{show_size(usable)} of {show_size(machine)}: the container's limit{free}",
            remedies=(Fix("raise the limit:", "docker run --memory=... ..."),),
        )
    else:
        yield Finding(Level.OK, "Memory", "memory", text)


def shared_memory(facts: Facts) -> Iterator[Finding]:
    shm = facts.shm
    fault = _shm_fault(shm)
    if not fault:
        text = f"{show_size(shm.free)} free of {show_size(shm.total)} on {shm.path}"
        yield Finding(Level.OK, "Memory", "shared memory", text)
        return
    level = Level.WARNING if facts.system == "Linux" else Level.NOTE
    full = shm.exists and shm.writable and shm.total >= SMALL_SHM
    if full:
        why = (
            "Memory caches are kept there. Samples that do not fit are prepared again in every "
            "epoch."
        )
        fixes: tuple[Fix, ...] = (Fix("see what fills it:", f"du -sh {shm.path}/*"),)
    else:
        why = (
            "Memory caches move to the temporary directory. They are as fast only while the page "
            "cache holds them."
        )
        fixes = _shm_fixes(facts) if facts.system == "Linux" else ()
    why += " Batches use memfd; this limit does not apply to them." if facts.memfd else ""
    yield Finding(level, "Memory", "shared memory", fault, why=why, remedies=fixes)


def _shm_fault(shm: Directory) -> str:
    if not shm.exists:
        return f"there is no {shm.path}"
    if shm.total < SMALL_SHM:
        return f"{shm.path} has {show_size(shm.total)}: too small for data"
    if not shm.writable:
        return f"{shm.path} cannot be written to"
    if shm.free < LITTLE_ROOM:
        return f"{show_size(shm.free)} free of {show_size(shm.total)} on {shm.path}"
    return ""


def _shm_fixes(facts: Facts) -> tuple[Fix, ...]:
    if "PENSTOCK_SHM_DIR" in facts.settings:
        return (Fix("go back to /dev/shm:", "unset PENSTOCK_SHM_DIR"),)
    if facts.shm.exists and not facts.shm.writable:
        return (Fix("allow all users to write there:", f"sudo chmod 1777 {facts.shm.path}"),)
    half = max(2, facts.memory.usable // 2 >> 30)
    if facts.container:
        return (
            Fix("start the container with", f"docker run --shm-size={half}g ..."),
            Fix("or use the shared memory of the host:", "docker run --ipc=host ..."),
        )
    mount = "remount," if facts.shm.exists else ""
    kind = "" if facts.shm.exists else "-t tmpfs tmpfs "
    return (Fix("make it larger:", f"sudo mount -o {mount}size={half}G {kind}{facts.shm.path}"),)


def memfd(facts: Facts) -> Iterator[Finding]:
    if facts.memfd:
        yield Finding(Level.OK, "Memory", "memfd", "available: processes share batches through it")
    else:
        yield Finding(
            Level.WARNING if facts.system == "Linux" else Level.NOTE,
            "Memory",
            "memfd",
            "not available: processes share batches through temporary files",
            why="Python lacks it, or the container's system call filter refuses memfd_create.",
            remedies=(Fix("point TMPDIR at memory:", "export TMPDIR=/dev/shm"),)
            if facts.shm.exists and facts.shm.writable
            else (),
        )


def leftovers(facts: Facts) -> Iterator[Finding]:
    found, collected = facts.leftovers.found, facts.leftovers.collected
    if facts.leftovers.error:
        yield Finding(
            Level.PROBLEM,
            "Memory",
            "leftovers",
            f"{facts.leftovers.place} cannot be used",
            why=f"{facts.leftovers.error.rstrip('.')}. Memory caches will fail to open.",
            remedies=(Fix("use another directory:", "export PENSTOCK_SHM_DIR=/path/on/tmpfs"),),
        )
    if collected:
        yield Finding(
            Level.OK,
            "Memory",
            "leftovers",
            f"{_runs(collected)}, {_bytes(collected)}: removed",
            details=_listed(collected),
        )
    if found:
        yield Finding(
            Level.WARNING,
            "Memory",
            "leftovers",
            f"{_runs(found)}, {_bytes(found)}",
            why="They occupy memory until the next memory cache is opened.",
            details=_listed(found),
            remedies=(_leftovers_fix(facts),),
        )
    if not (found or collected or facts.leftovers.error):
        yield Finding(Level.OK, "Memory", "leftovers", "none")


def _leftovers_fix(facts: Facts) -> Fix:
    if not facts.leftovers.tried:
        return Fix("remove them:", "penstock doctor --fix")
    # Name each path: the same directory holds the files of live runs.
    paths = " ".join(shlex.quote(path) for path, _ in facts.leftovers.found)
    return Fix("they could not be removed; as root:", f"sudo rm -rf {paths}")


def _runs(found: tuple[tuple[str, int], ...]) -> str:
    return "1 killed run" if len(found) == 1 else f"{len(found)} killed runs"


def _bytes(found: tuple[tuple[str, int], ...]) -> str:
    return show_size(sum(size for _, size in found))


def _listed(found: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    return tuple(f"{show_size(size):>9}  {path}" for path, size in found)


# Disk


def temporary_directory(facts: Facts) -> Iterator[Finding]:
    directory = facts.temporary
    elsewhere = (Fix("use another directory:", "export TMPDIR=/path/with/room"),)
    if directory is None:
        yield Finding(
            Level.PROBLEM,
            "Disk",
            "temporary",
            "no writable directory",
            why="Python tried TMPDIR, TEMP, TMP, /tmp, /var/tmp, /usr/tmp and the current "
            "directory.",
            remedies=elsewhere,
        )
    elif directory.free < LITTLE_ROOM:
        holds_caches = facts.memory_stores.startswith(directory.path + "/")
        yield Finding(
            Level.WARNING,
            "Disk",
            "temporary",
            f"{show_size(directory.free)} free on {directory.path}",
            why="Memory caches are kept here and will be small." if holds_caches else "",
            remedies=elsewhere,
        )
    else:
        text = f"{show_size(directory.free)} free on {directory.path}"
        yield Finding(Level.OK, "Disk", "temporary", text)


def disk_stores(facts: Facts) -> Iterator[Finding]:
    directory = facts.disk
    fixes = (Fix("use another directory:", "export PENSTOCK_CACHE_DIR=/path/on/local/disk"),)
    if directory is None:
        yield Finding(
            Level.WARNING,
            "Disk",
            "disk caches",
            "no directory: this user has no home directory",
            why='Pipelines with .cache(..., where="disk") will fail.',
            remedies=fixes,
        )
    elif not directory.writable:
        yield Finding(
            Level.WARNING,
            "Disk",
            "disk caches",
            f"{directory.path} cannot be written to",
            why='Pipelines with .cache(..., where="disk") will fail.',
            remedies=fixes,
        )
    elif is_network(directory.filesystem):  # LMDB's locks and maps are not reliable there
        yield Finding(
            Level.WARNING,
            "Disk",
            "disk caches",
            f"{directory.path} is on {directory.filesystem}, a network file system",
            why="Caches are LMDB databases, which need the locks and memory maps of a local disk.",
            remedies=fixes,
        )
    elif directory.free < LITTLE_ROOM:
        yield Finding(
            Level.WARNING,
            "Disk",
            "disk caches",
            f"{show_size(directory.free)} free on {directory.path}",
            why="Samples that do not fit in a disk cache are prepared again in every epoch.",
            remedies=fixes,
        )
    else:
        text = f"{show_size(directory.free)} free on {directory.path}"
        yield Finding(Level.OK, "Disk", "disk caches", text)


def node(facts: Facts) -> Iterator[Finding]:
    if facts.no_node:
        yield Finding(
            Level.WARNING,
            "Disk",
            "node",
            'jobs with share="..." will fail',
            why=facts.no_node,
            remedies=(
                Fix(
                    "use another directory:", "export PENSTOCK_RUNTIME_DIR=/short/path/of/your/own"
                ),
            ),
        )


# Limits


def open_files(facts: Facts) -> Iterator[Finding]:
    yield _limit(facts, "open files", facts.files, FEW_FILES, 65536, "ulimit -n", "nofile")


def processes(facts: Facts) -> Iterator[Finding]:
    yield _limit(facts, "processes", facts.processes, FEW_PROCESSES, 32768, "ulimit -u", "nproc")


def _limit(
    facts: Facts, name: str, limit: Limit, few: int, enough: int, ulimit: str, key: str
) -> Finding:
    if limit.soft is None or limit.soft >= few:
        return Finding(
            Level.OK, "Limits", name, "no limit" if limit.soft is None else str(limit.soft)
        )
    reach = enough if limit.hard is None else min(enough, limit.hard)
    fixes = []
    if reach > limit.soft:
        fixes.append(Fix("raise it in the shell that starts training:", f"{ulimit} {reach}"))
    if reach < few and facts.container:
        flag = "--pids-limit=-1" if key == "nproc" else f"--ulimit nofile={enough}:{enough}"
        fixes.append(Fix("start the container with", f"docker run {flag} ..."))
    elif reach < few:
        line = f"echo '* - {key} {enough}' | sudo tee -a /etc/security/limits.conf"
        fixes.append(Fix("raise it permanently, then log in again:", line))
    return Finding(
        Level.WARNING,
        "Limits",
        name,
        f"{limit.soft}: low for many workers",
        why="Workers, slots and stores hold descriptors; a long run may fail with 'Too many open "
        "files'."
        if key == "nofile"
        else "Threads count too; workers may fail to start.",
        remedies=tuple(fixes),
    )


# Packages and accelerators


def core_packages(facts: Facts) -> Iterator[Finding]:
    core = [package for package in facts.packages.values() if package.core]
    for package in core:
        if package.state == "present" and not _too_old(package):
            continue
        yield _unusable(package)
    sound = [p for p in core if p.state == "present" and not _too_old(p)]
    # One line for all sound packages: six lines would hide the findings that matter.
    if sound:
        text = ", ".join(f"{package.name} {package.version}" for package in sound)
        yield Finding(Level.OK, "Packages", "core", text)


def optional_packages(facts: Facts) -> Iterator[Finding]:
    for package in facts.packages.values():
        if package.core or package.module in ("cv2", "torch"):  # they have checks of their own
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
        "not in use: simplejpeg decodes every row of a JPEG from the top to the end of a crop",
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
            "needs display libraries that are not installed",
            why=package.error,
            remedies=(_replace_opencv(facts.opencv, "use the build without a display:"),),
        )
    elif package.state != "present" or _too_old(package):
        yield _unusable(package)
    elif not package.stays_single:
        yield Finding(
            Level.WARNING,
            "Packages",
            "OpenCV",
            f"{package.version}: its thread pool cannot be turned off",
            why=f"It was built with {package.threads}; each worker runs its own pool of threads.",
            remedies=(
                Fix("limit it to one thread:", "export OMP_NUM_THREADS=1"),
                _replace_opencv(facts.opencv, "or use the standard build:"),
            ),
        )
    else:
        own = "built without threads"
        if package.threads != "none":
            own = f"built with {package.threads} threads, turned off in workers"
        yield Finding(Level.OK, "Packages", "OpenCV", f"{package.version}, {own}")
    if len(facts.opencv) > 1:
        yield Finding(
            Level.WARNING,
            "Packages",
            "OpenCV",
            f"{len(facts.opencv)} distributions installed over each other",
            why=f"{', '.join(facts.opencv)} share one folder. Python imports the one installed "
            "last, and removing one breaks the other.",
            remedies=(_replace_opencv(facts.opencv, "keep one (headless: without a display):"),),
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
            why="A package that does not declare support for free threading turns the GIL on for "
            "the whole process.",
            remedies=(
                Fix("install newer versions:", f"pip install --upgrade {' '.join(holders)}"),
                Fix("or, at your own risk, keep the GIL off:", "export PYTHON_GIL=0"),
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
            why="This value hides every GPU.",
            remedies=(Fix("make them visible:", "unset CUDA_VISIBLE_DEVICES"),),
        )
    if facts.nvidia and not built:
        return Finding(
            Level.WARNING,
            "torch",
            "accelerator",
            "none, although an NVIDIA driver is installed",
            why="This build of torch supports the CPU only.",
            remedies=(
                Fix(
                    "install a build for CUDA (see https://pytorch.org/get-started):",
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
            why=" ".join(package.said) or "The driver may be too old for this version of CUDA.",
            remedies=(Fix("check the driver:", "nvidia-smi"),),
        )
    if built:
        return Finding(
            Level.NOTE,
            "torch",
            "accelerator",
            "none: no driver found, training runs on the CPU",
            remedies=(Fix("start the container with", "docker run --gpus all ..."),)
            if facts.container
            else (),
        )
    return Finding(Level.NOTE, "torch", "accelerator", "none: training runs on the CPU")


def _unusable(package: Package, topic: str = "Packages") -> Finding:
    """The finding on a package that is missing, too old, or cannot be imported."""
    why, minimum = "", f">={package.minimum}" if package.minimum else ""
    if package.state == "absent":
        level = Level.PROBLEM if package.core else Level.NOTE
        text = f"not installed: {_WITHOUT.get(package.module, 'Penstock needs it')}"
        what = f"penstock[{package.extra}]" if package.extra else f"{package.name}{minimum}"
        fix = Fix("install it:", f'pip install "{what}"')
    elif package.state == "broken":
        level, text, why = Level.PROBLEM, "installed, but cannot be imported", package.error
        fix = Fix("reinstall it:", f"pip install --force-reinstall --no-deps {package.name}")
    else:
        level = Level.PROBLEM if package.core else Level.WARNING
        text = f"{package.version} is too old: {package.minimum} or later is needed"
        fix = Fix("upgrade it:", f'pip install --upgrade "{package.name}{minimum}"')
    return Finding(level, topic, _label(package), text, why=why, remedies=(fix,))


def _replace_opencv(installed: tuple[str, ...], how: str) -> Fix:
    contrib = any("contrib" in name for name in installed)
    keep = "opencv-contrib-python-headless" if contrib else "opencv-python-headless"
    removed = " ".join(installed or ("opencv-python",))
    return Fix(how, f"pip uninstall -y {removed} && pip install {keep}")


def _label(package: Package) -> str:
    return _LABELS.get(package.module, package.name)


def _too_old(package: Package) -> bool:
    if not package.version or not package.minimum:
        return False
    return _numbers(package.version) < _numbers(package.minimum)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, without build and pre-release suffixes.

    >>> _numbers("2.13.0+cpu"), _numbers("4.8")
    ((2, 13), (4, 8))
    """
    leading = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in leading[0].split(".")] if leading else []
    # 14 and 14.0 are the same version.
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


CHECKS = (
    python,
    cores,
    thread_settings,
    memory,
    shared_memory,
    memfd,
    leftovers,
    temporary_directory,
    disk_stores,
    node,
    open_files,
    processes,
    core_packages,
    optional_packages,
    opencv,
    kernel,
    gil_holders,
    torch,
)
