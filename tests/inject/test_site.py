"""``sitecustomize``: it injects a task into Python processes, and never breaks one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import PipelineError
from penstock.inject import Process, environment, processes
from penstock.inject.launch import SITE, VARIABLE

TASK = """
def install(settings, module):
    print("installed", settings["number"], settings["rank"], module.READY, module.__loader__)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a minimal package ``torch`` and a task."""
    package = tmp_path / "torch" / "utils" / "data"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "dataloader.py").write_text("READY = True\n")
    (tmp_path / "task.py").write_text(TASK)
    return tmp_path


def run(
    place: Path, code: str, *words: str, module: str = "task", python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    settings = {"number": 3, "reports": str(place)}
    variables = environment("run", settings, {**os.environ, "PYTHONPATH": str(place), "RANK": "0"})
    injected = json.loads(variables[VARIABLE])
    variables[VARIABLE] = json.dumps({**injected, "module": module})
    return subprocess.run(
        [python, *words, "-c", code], env=variables, capture_output=True, text=True, check=True
    )


IMPORT = "import torch.utils.data.dataloader"


def test_a_task_is_installed_when_the_module_is_imported(place: Path) -> None:
    done = run(place, f"print('before'); {IMPORT}; print('after')")
    before, installed, after = done.stdout.splitlines()
    assert (before, after) == ("before", "after")
    assert installed.startswith("installed 3 0 True ")
    assert "SourceFileLoader" in installed
    assert done.stderr == ""
    [process] = processes(place)
    assert process == Process(process.pid, process.argv, 0, "")
    assert process.argv[1:] == ("-c", f"print('before'); {IMPORT}; print('after')")


@pytest.mark.parametrize("outcome", ["print('prepared')", "1 / 0"])
def test_a_task_prepares_itself_where_the_import_of_torch_ends(place: Path, outcome: str) -> None:
    (place / "torch" / "__init__.py").write_text(f"{IMPORT}\nprint('torch is there')\n")
    (place / "task.py").write_text(f"{TASK}\ndef prepare():\n    {outcome}\n")
    done = run(place, "import gc, torch; print('after', gc.isenabled())")
    installed, *rest = done.stdout.splitlines()
    assert installed.startswith("installed")
    prepared = ["prepared"] if "print" in outcome else []
    assert rest == ["torch is there", *prepared, "after True"]
    assert done.stderr == ""


def test_processes_started_by_the_script_are_reached_too(place: Path) -> None:
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{IMPORT}'])"
    assert run(place, inner).stdout.startswith("installed")


def test_a_process_without_torch_imports_nothing_of_penstock(place: Path) -> None:
    code = "import sys; print(sorted({'json', 'penstock', 'typing', 'task'} & set(sys.modules)))"
    plain = {**os.environ, "PYTHONPATH": str(place)}
    loaded = subprocess.run(
        [sys.executable, "-c", code], env=plain, capture_output=True, text=True, check=True
    )
    # Compared with a plain start, because editable installs import modules too.
    assert run(place, code).stdout == loaded.stdout
    assert processes(place) == []


def test_the_users_sitecustomize_runs_as_without_penstock(place: Path) -> None:
    (place / "sitecustomize.py").write_text("print('mine')")
    code = "import sys, sitecustomize; print(sitecustomize.__file__); print(*sys.path, sep='\\n')"
    done = run(place, code)
    first, file, *path = done.stdout.splitlines()
    assert (first, file) == ("mine", str(place / "sitecustomize.py"))
    assert str(SITE) not in path


def test_a_failing_sitecustomize_of_the_user_is_reported_by_python(place: Path) -> None:
    (place / "sitecustomize.py").write_text("1 / 0")
    done = run(place, f"{IMPORT}; print('on')")
    assert done.stdout.splitlines()[-1] == "on"
    assert "Error in sitecustomize" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_a_task_that_fails_prints_one_line_and_the_script_runs(place: Path) -> None:
    (place / "task.py").write_text("def install(settings, module):\n    raise KeyError('gone')")
    done = run(place, f"{IMPORT}; print('on')")
    assert done.stdout == "on\n"
    assert done.stderr == (
        "penstock: nothing was changed in this script, because Penstock could not be installed in "
        "it: KeyError('gone')\n"
    )


def test_a_python_without_penstock_is_named_and_the_script_runs(place: Path) -> None:
    done = run(place, f"{IMPORT}; print('on')", module="penstock_of_another_python.task")
    assert done.stdout == "on\n"
    [line] = done.stderr.splitlines()
    assert line.startswith("penstock: nothing was changed in this script, because its Python, /")
    assert "No module named 'penstock_of_another_python'" in line
    [process] = processes(place)
    assert process.why in line


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_paused_while_torch_is_imported(place: Path, enabled: bool) -> None:
    (place / "torch" / "__init__.py").write_text("import gc; print(gc.isenabled())")
    prepare = "" if enabled else "gc.disable(); "
    code = f"import gc; {prepare}import torch; print(gc.isenabled(), gc.get_freeze_count())"
    assert run(place, code).stdout == f"False\n{enabled} 0\n"


def test_the_objects_of_torch_are_old_after_its_import(place: Path) -> None:
    (place / "torch" / "__init__.py").write_text("kept = [[] for _ in range(50_000)]")
    code = "import gc, torch; print(sum(map(len, map(gc.get_objects, (0, 1)))) < 50_000)"
    assert run(place, code).stdout == "True\n"


def test_objects_that_the_script_has_frozen_stay_frozen(place: Path) -> None:
    code = "import gc; gc.freeze(); import torch; print(gc.get_freeze_count() > 0, gc.isenabled())"
    assert run(place, code).stdout == "True True\n"


def test_garbage_collection_goes_on_after_a_failed_import(place: Path) -> None:
    (place / "torch" / "__init__.py").write_text("1 / 0")
    code = """
import gc
try:
    import torch
except ZeroDivisionError:
    print(gc.isenabled())
"""
    assert run(place, code).stdout == "True\n"


def test_looking_for_a_module_does_not_end_the_wait_for_it(place: Path) -> None:
    (place / "torch" / "__init__.py").write_text("import gc; print(gc.isenabled())")
    code = (
        "from importlib.util import find_spec; assert find_spec('torch'); "
        f"import torch; assert find_spec('torch.utils.data.dataloader'); {IMPORT}"
    )
    paused, installed = run(place, code).stdout.splitlines()
    assert paused == "False"
    assert installed.startswith("installed 3 0 True ")


def test_nothing_is_injected_into_workers_and_the_node(place: Path) -> None:
    code = f"{IMPORT}\nif 0: from penstock.engine.pools.worker import main"
    assert run(place, code).stdout == ""
    assert processes(place) == []


def test_an_isolated_python_is_not_reached(place: Path) -> None:
    assert run(place, "print('on')", "-E").stdout == "on\n"
    assert processes(place) == []


def test_the_users_pythonpath_follows_ours() -> None:
    base = {"PYTHONPATH": f"/a{os.pathsep}{SITE}{os.pathsep}/b", "X": "1"}
    variables = environment("run", {}, base)
    assert variables["PYTHONPATH"].split(os.pathsep) == [str(SITE), "/a", "/b"]
    assert variables["X"] == "1"
    assert environment("run", {}, {})["PYTHONPATH"] == str(SITE)


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(PipelineError, match="no task 'sing'"):
        environment("sing", {})
