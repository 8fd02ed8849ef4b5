"""The checks of packages and accelerators: which facts lead to which finding and fix."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.diagnose.doctor.checks import check
from penstock.diagnose.doctor.facts import Facts
from penstock.diagnose.doctor.report import Finding, Level


def with_package(facts: Facts, module: str, **changes: object) -> Facts:
    changed = replace(facts.packages[module], **changes)  # type: ignore[arg-type]
    return replace(facts, packages={**facts.packages, module: changed})


def named(facts: Facts, name: str) -> Finding:
    (finding,) = (finding for finding in check(facts) if finding.name == name)
    return finding


def commands(finding: Finding) -> list[str]:
    return [fix.command for fix in finding.remedies]


@pytest.mark.parametrize("module", ["numpy", "lmdb", "xxhash", "msgpack", "cloudpickle", "rich"])
def test_a_missing_core_package_is_a_problem(sound: Facts, module: str) -> None:
    finding = named(with_package(sound, module, state="absent", minimum="1.4"), module)
    assert finding.level is Level.PROBLEM
    assert commands(finding) == [f'pip install "{module}>=1.4"']
    core = named(with_package(sound, module, state="absent"), "core")
    assert module not in core.text


@pytest.mark.parametrize(
    ("module", "name", "command"),
    [
        ("simplejpeg", "simplejpeg", 'pip install "penstock[image]"'),
        ("cv2", "OpenCV", 'pip install "penstock[image]"'),
        ("PIL", "Pillow", 'pip install "pillow"'),
        ("pyarrow", "pyarrow", 'pip install "penstock[parquet]"'),
        ("torch", "torch", 'pip install "penstock[torch]"'),
    ],
)
def test_a_missing_optional_package_is_noted(
    sound: Facts, module: str, name: str, command: str
) -> None:
    finding = named(with_package(sound, module, state="absent"), name)
    assert finding.level is Level.NOTE
    assert finding.text.startswith("not installed: ")
    assert commands(finding) == [command]


@pytest.mark.parametrize(
    ("module", "name"),
    [("lmdb", "lmdb"), ("simplejpeg", "simplejpeg"), ("cv2", "OpenCV"), ("torch", "torch")],
)
def test_a_package_that_cannot_be_imported_is_a_problem(
    sound: Facts, module: str, name: str
) -> None:
    facts = with_package(sound, module, state="broken", error="OSError: libfoo.so is missing")
    finding = named(facts, name)
    assert finding.level is Level.PROBLEM
    assert finding.why == "OSError: libfoo.so is missing"
    assert commands(finding)[0].startswith("pip install --force-reinstall --no-deps ")


@pytest.mark.parametrize(
    ("module", "name", "level"),
    [
        ("lmdb", "lmdb", Level.PROBLEM),
        ("pyarrow", "pyarrow", Level.WARNING),
        ("cv2", "OpenCV", Level.WARNING),
        ("torch", "torch", Level.WARNING),
    ],
)
def test_a_package_that_is_too_old_is_to_be_upgraded(
    sound: Facts, module: str, name: str, level: Level
) -> None:
    facts = with_package(sound, module, version="1.3.9+cpu", minimum="1.4")
    finding = named(facts, name)
    assert finding.level is level
    assert finding.text == "1.3.9+cpu is too old: 1.4 or later is needed"
    assert commands(finding)[0].endswith('>=1.4"')


@pytest.mark.parametrize("version", ["1.4", "1.4.0", "1.10.2", "2.0rc1", "2.13.0+cpu", ""])
def test_a_package_that_is_new_enough_is_fine(sound: Facts, version: str) -> None:
    facts = with_package(sound, "pyarrow", version=version, minimum="1.4.0")
    assert named(facts, "pyarrow").level is Level.OK


def test_an_opencv_that_wants_a_display_is_replaced_by_the_headless_one(sound: Facts) -> None:
    error = "ImportError: libGL.so.1: cannot open shared object file"
    facts = with_package(sound, "cv2", state="broken", error=error)
    finding = named(replace(facts, opencv=("opencv-python",)), "OpenCV")
    assert finding.level is Level.PROBLEM
    assert commands(finding) == [
        "pip uninstall -y opencv-python && pip install opencv-python-headless"
    ]


def test_opencv_distributions_over_each_other_are_warned_about(sound: Facts) -> None:
    two = ("opencv-python-headless", "opencv-python")
    findings = check(replace(sound, opencv=two))
    conflict = [f for f in findings if f.name == "OpenCV" and f.level is Level.WARNING]
    assert [commands(finding) for finding in conflict] == [
        [
            "pip uninstall -y opencv-python-headless opencv-python && "
            "pip install opencv-python-headless"
        ]
    ]


def test_contributed_opencv_modules_are_kept_when_a_conflict_is_solved(sound: Facts) -> None:
    two = ("opencv-python", "opencv-contrib-python")
    conflict = [f for f in check(replace(sound, opencv=two)) if f.level is Level.WARNING]
    assert commands(conflict[0])[0].endswith("pip install opencv-contrib-python-headless")


def test_the_finding_on_opencv_names_its_thread_library(sound: Facts) -> None:
    own = named(with_package(sound, "cv2", threads="TBB"), "OpenCV")
    none = named(with_package(sound, "cv2", threads="none"), "OpenCV")
    assert own.text == "4.10.0, built with TBB threads, turned off in workers"
    assert none.text == "4.10.0, built without threads"


def test_an_opencv_whose_threads_cannot_be_turned_off_is_warned_about(sound: Facts) -> None:
    finding = named(with_package(sound, "cv2", threads="OpenMP", stays_single=False), "OpenCV")
    assert finding.level is Level.WARNING
    assert "export OMP_NUM_THREADS=1" in commands(finding)


def test_packages_that_turn_the_gil_on_again_are_named(sound: Facts) -> None:
    python = replace(sound.python, version=(3, 14, 0), free_threaded=True, gil=False)
    packages = {name: replace(p, gil=name == "lmdb") for name, p in sound.packages.items()}
    facts = replace(sound, python=python, packages=packages)
    finding = named(facts, "GIL")
    assert (finding.level, finding.text) == (Level.WARNING, "turned on again by lmdb")
    assert commands(finding)[0] == "pip install --upgrade lmdb"
    quiet = {name: replace(p, gil=False) for name, p in packages.items()}
    assert not [f for f in check(replace(facts, packages=quiet)) if f.name == "GIL"]


def test_accelerators_are_listed(sound: Facts) -> None:
    assert named(sound, "torch").text == "2.5.1, built for CUDA 12.4"
    assert named(sound, "cuda:0").text == "NVIDIA H100, 80.0 GB"


def test_a_cpu_build_beside_an_nvidia_driver_is_warned_about(sound: Facts) -> None:
    finding = named(with_package(sound, "torch", cuda="", devices=()), "accelerator")
    assert (finding.level, finding.text) == (
        Level.WARNING,
        "none, although an NVIDIA driver is installed",
    )
    assert commands(finding) == ["pip uninstall -y torch && pip install torch"]


def test_a_driver_that_torch_cannot_use_is_warned_about_in_torchs_words(sound: Facts) -> None:
    facts = with_package(sound, "torch", devices=(), said=("The NVIDIA driver is too old.",))
    finding = named(facts, "accelerator")
    assert finding.level is Level.WARNING
    assert finding.why == "The NVIDIA driver is too old."


@pytest.mark.parametrize("value", ["", "-1"])
def test_hidden_gpus_are_warned_about(sound: Facts, value: str) -> None:
    facts = with_package(sound, "torch", devices=())
    finding = named(replace(facts, settings={"CUDA_VISIBLE_DEVICES": value}), "accelerator")
    assert finding.level is Level.WARNING
    assert commands(finding) == ["unset CUDA_VISIBLE_DEVICES"]


def test_a_cuda_build_without_a_driver_is_noted(sound: Facts) -> None:
    facts = replace(with_package(sound, "torch", devices=()), nvidia=False, container=True)
    finding = named(facts, "accelerator")
    assert finding.level is Level.NOTE
    assert commands(finding) == ["docker run --gpus all ..."]


def test_a_machine_without_accelerators_is_noted(sound: Facts) -> None:
    facts = replace(with_package(sound, "torch", cuda="", devices=()), nvidia=False)
    finding = named(facts, "accelerator")
    assert (finding.level, finding.text) == (Level.NOTE, "none: training runs on the CPU")


def test_a_machine_whose_packages_could_not_be_looked_at_is_still_checked(sound: Facts) -> None:
    findings = check(replace(sound, packages={}, opencv=()))
    assert [f.name for f in findings if f.topic == "Packages"] == ["kernel"]
    assert {finding.topic for finding in findings} - {"Packages"} == {
        "Python",
        "Machine",
        "Memory",
        "Disk",
        "Limits",
    }


def test_a_kernel_that_is_not_in_use_is_noted_with_the_reason(sound: Facts) -> None:
    assert named(sound, "kernel").level is Level.OK
    finding = named(replace(sound, no_kernel="no compiler was found."), "kernel")
    assert finding.level is Level.NOTE
    assert finding.why == "no compiler was found."
