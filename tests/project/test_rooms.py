"""The layout of the package: imports go one way only, and few names are public."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import penstock

ROOT = Path(penstock.__file__).parent

# A room is a module or package directly below penstock/. A room may import from itself and from the
# rooms above it in this list. docs/follow-a-sample.md has a line on each.
ROOMS = [
    "errors",
    "host",
    "config",
    "native",
    "stats",
    "keyed",
    "tree",
    "serialize",
    "operation",
    "fingerprint",
    "order",
    "options",
    "store",
    "source",
    "stops",
    "image",
    "audio",
    "pipeline",
    "combine",
    "diversity",
    "engine",
    "device",
    "cluster",
    "node",
    "watch",
    "loader",
    "pack",
    "progress_bar",
    "diagnose",
    "torch",
    "inject",
    "commands",
    "cli",
    "__main__",
]

# Exceptions. Users call the loader and the reports as methods of a pipeline.
# A diversity report draws itself with diagnose/svg.py, which imports nothing from penstock.
ALLOWED = {
    ("pipeline", "loader"),
    ("pipeline", "pack"),
    ("pipeline", "combine"),
    ("pipeline", "diagnose"),
    ("pipeline", "diversity"),
    ("diversity", "diagnose"),
}

FRAMEWORKS = {"torch", "triton", "jax", "tensorflow", "ray", "torchvision"}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> set[str]:
    """The modules that a file imports, at its top or inside functions, except for type checking."""
    modules: set[str] = set()
    tree = tree_of(path)
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            modules.add(node.module)
            if node.module == "penstock":
                modules |= {f"penstock.{alias.name}" for alias in node.names}
    return modules


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def files() -> list[Path]:
    return [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]


def test_every_file_belongs_to_a_room() -> None:
    assert {room_of(path) for path in files()} == set(ROOMS)


def test_a_room_imports_only_from_rooms_above_it() -> None:
    wrong = []
    for path in files():
        room = room_of(path)
        for module in imports(path):
            parts = module.split(".")
            if parts[0] != "penstock" or len(parts) == 1 or module == "penstock._kernel":
                continue
            imported = parts[1]
            if (room, imported) in ALLOWED:
                continue
            if ROOMS.index(imported) > ROOMS.index(room):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert wrong == []


def test_stops_do_not_import_each_other() -> None:
    contract = {f"penstock.stops.{name}" for name in ("field", "hold", "stop")}
    for path in sorted((ROOT / "stops").glob("*.py")):
        imported = {module for module in imports(path) if module.startswith("penstock.stops.")}
        assert imported <= contract, path


def test_only_adapters_import_frameworks() -> None:
    for path in files():
        used = {module.split(".")[0] for module in imports(path)} & FRAMEWORKS
        if used == {"ray"}:
            assert path == ROOT / "cluster" / "ray.py"
        elif used:
            on_device = "on_device" in path.relative_to(ROOT).as_posix()
            assert on_device or room_of(path) in ("torch", "device", "diagnose"), (path, used)


def test_only_the_cluster_imports_flight() -> None:
    users = [path for path in files() if re.search(r"pyarrow.*flight", path.read_text())]
    assert [str(path.relative_to(ROOT)) for path in users] == ["cluster/flight.py"]


def test_diversity_imports_only_the_plotter_of_diagnose_which_imports_no_room() -> None:
    used = {
        module
        for path in (ROOT / "diversity").glob("*.py")
        for module in imports(path)
        if module.startswith("penstock.diagnose")
    }
    assert used == {"penstock.diagnose.svg"}
    plotter = imports(ROOT / "diagnose" / "svg.py")
    assert not any(module.startswith("penstock") for module in plotter)


def test_the_public_names() -> None:
    assert penstock.__all__ == [
        "Loader",
        "Order",
        "PenstockError",
        "Pipeline",
        "Reservoir",
        "Weighted",
        "analyze",
        "audio",
        "cu_seqlens",
        "from_arrow",
        "from_dataset",
        "from_files",
        "from_folder",
        "from_mds",
        "from_parquet",
        "from_tar",
        "image",
        "mix",
        "pack_sequences",
        "progress",
    ]
    assert all(getattr(penstock, name) is not None for name in penstock.__all__)
    assert set(dir(penstock)) == {*penstock.__all__, "__version__"}


def test_no_room_hides_a_public_function_of_its_name() -> None:
    packages = {"audio", "image"}
    assert {room_of(path) for path in files()} & set(penstock.__all__) == packages


def test_importing_penstock_a_worker_or_a_member_loads_no_large_package() -> None:
    code = (
        "import sys, penstock; a = set(sys.modules);"
        "import penstock.engine.pools.worker, penstock.cluster.transport, penstock.node.member;"
        "b = set(sys.modules);"
        "print(sorted(a & {'numpy', 'torch', 'cv2', 'lmdb', 'pyarrow', 'rich'}),"
        "sorted(b & {'torch', 'cv2', 'lmdb', 'pyarrow', 'rich', 'simplejpeg',"
        "'scipy', 'soundfile'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"


def test_the_drop_in_imports_only_what_a_plain_loader_needs() -> None:
    unneeded = ("diagnose", "diversity", "image", "node", "source.parquet", "store.lmdb_store")
    code = (
        "import gc, sys; from penstock.torch import DataLoader; assert gc.isenabled(); "
        "DataLoader(range(4), num_workers=1); "
        f"print([name for name in {unneeded!r} if 'penstock.' + name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_there_are_few_rooms() -> None:
    modules = [path for path in ROOT.glob("*.py") if path.name != "__init__.py"]
    packages = list(ROOT.glob("*/__init__.py"))
    assert len(modules) <= 14
    assert len(packages) <= 20


def test_no_two_classes_or_type_aliases_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for path in files():
        for node in tree_of(path).body:
            names = [node.name] if isinstance(node, ast.ClassDef) else []
            if isinstance(node, ast.Assign):
                targets = [one.id for one in node.targets if isinstance(one, ast.Name)]
                names = [name for name in targets if name[:1].isupper() and not name.isupper()]
            for name in names:
                places.setdefault(name.lstrip("_"), []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
