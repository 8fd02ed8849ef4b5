"""The scripts install the packages for the kernel and a browser if allowed, and work without."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import ROOT

TOOLS = ("bash", "cat", "env", "mkdir", "paste", "sha256sum", "tee", "touch", "tr", "true")
HOST_TOOLS = ("ip", "tc", "openssl")
HEADERS = f"python3.{sys.version_info.minor}-dev"


class Result(NamedTuple):
    """``calls``: the commands of package managers that a script has called."""

    code: int
    output: str
    calls: list[str]


class Machine:
    """A simulated machine: a folder with the only commands that a script can call.

    Package managers are fakes that record their calls. ``has`` marks what is installed.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.commands = place / "commands"
        self.commands.mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None
            (self.commands / tool).symlink_to(found)
        self.command("id", "echo 0")
        self.command(
            "python3",
            f'[[ $* == *sysconfig* ]] && echo {place} && exit\nexec "{sys.executable}" "$@"',
        )

    def command(self, name: str, script: str) -> None:
        path = self.commands / name
        path.write_text(f"#!{shutil.which('bash')}\n{script}\n")
        path.chmod(0o755)

    def manager(self, name: str, script: str = "") -> None:
        """Add a package manager; after a call of it nothing is missing."""
        self.command(name, f'echo "{name} $*" >>{self.place}/calls\n{script}')
        with (self.commands / name).open("a") as file:
            file.write(f"touch {self.place}/cc {self.place}/jpeg {self.place}/Python.h\n")

    def has(self, *parts: str) -> None:
        for part in parts:
            (self.place / part).touch()

    def compiler(self) -> None:
        """Add a compiler that finds only the headers that this machine has."""
        self.command(
            "cc",
            f"program=$(cat)\n[[ -e {self.place}/cc ]] || exit 1\n"
            f"[[ $program != *jpeglib* || -e {self.place}/jpeg ]]",
        )

    def run(self, script: str, folder: Path = ROOT, **variables: str) -> Result:
        done = subprocess.run(
            [
                self.commands / "bash",
                "-c",
                f"set -euo pipefail\n. scripts/environment.sh\n{script}",
            ],
            cwd=folder,
            env={"PATH": str(self.commands), **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stderr == ""
        calls = self.place / "calls"
        made = calls.read_text().splitlines() if calls.exists() else []
        return Result(done.returncode, done.stdout, made)

    def equip(self) -> Result:
        return self.run('choose_python\nequip_kernel || { echo "$by_hand"; exit 3; }')


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.compiler()
    return made


def test_a_machine_that_has_everything_is_left_alone(machine: Machine) -> None:
    machine.has("cc", "jpeg", "Python.h")
    machine.manager("apt-get")
    assert machine.equip() == (0, "", [])


def test_root_installs_all_missing_packages_in_one_call(machine: Machine) -> None:
    machine.manager("apt-get")
    packages = f"gcc libc6-dev libjpeg-dev {HEADERS}"
    assert machine.equip() == (
        0,
        f"==> packages for the compiled image kernel: apt-get installs {packages}\n",
        [f"apt-get install --yes --no-install-recommends {packages}"],
    )


@pytest.mark.parametrize(
    ("has", "wanted"), [(("cc", "Python.h"), "libjpeg-dev"), (("cc", "jpeg"), HEADERS)]
)
def test_installed_packages_are_not_requested(
    machine: Machine, has: tuple[str, ...], wanted: str
) -> None:
    machine.has(*has)
    machine.manager("apt-get")
    assert machine.equip().calls == [f"apt-get install --yes --no-install-recommends {wanted}"]


def test_the_package_list_is_updated_only_if_packages_are_not_found(machine: Machine) -> None:
    machine.has("cc", "Python.h")
    machine.manager(
        "apt-get",
        f"[[ $1 == update ]] && touch {machine.place}/listed && exit\n"
        f"[[ -e {machine.place}/listed ]] || exit 100",
    )
    install = "apt-get install --yes --no-install-recommends libjpeg-dev"
    result = machine.equip()
    assert result.code == 0
    assert result.calls == [install, "apt-get update", install]


@pytest.mark.parametrize(
    ("manager", "call"),
    [
        ("dnf", "dnf install -y gcc libjpeg-turbo-devel python3.11-devel"),
        ("microdnf", "microdnf install -y gcc libjpeg-turbo-devel python3.11-devel"),
        ("yum", "yum install -y gcc libjpeg-turbo-devel python3.11-devel"),
        ("apk", "apk add --no-cache gcc musl-dev libjpeg-turbo-dev python3-dev"),
        (
            "zypper",
            "zypper --non-interactive install --no-recommends gcc libjpeg8-devel python3.11-devel",
        ),
        ("pacman", "pacman --sync --noconfirm --needed gcc libjpeg-turbo python"),
    ],
)
def test_every_package_manager_gets_its_own_command(
    machine: Machine, manager: str, call: str
) -> None:
    machine.command("rpm", "echo python3.11-base")
    machine.manager(manager)
    result = machine.equip()
    assert (result.code, result.calls) == (0, [call])


def test_another_user_installs_by_sudo_if_that_needs_no_password(machine: Machine) -> None:
    machine.has("cc", "Python.h")
    machine.command("id", "echo 1000")
    machine.command("sudo", '[[ $1 == -n ]] && shift && exec "$@"')
    machine.manager("apt-get")
    result = machine.equip()
    assert result.code == 0
    assert result.calls == ["apt-get install --yes --no-install-recommends libjpeg-dev"]


@pytest.mark.parametrize("sudo", [False, True])
def test_a_user_who_may_not_install_reads_what_to_install(machine: Machine, sudo: bool) -> None:
    machine.has("cc", "Python.h")
    machine.command("id", "echo 1000")
    if sudo:
        machine.command("sudo", "echo a password is required >&2; exit 1")
    machine.manager("apt-get")
    assert machine.equip() == (3, "install as root: libjpeg-dev\n", [])


def test_without_a_package_manager_the_message_says_what_is_needed(machine: Machine) -> None:
    needed = "install a C compiler, and the headers of libjpeg-turbo and Python\n"
    assert machine.equip() == (3, needed, [])


def test_an_installation_that_changes_nothing_counts_as_failed(machine: Machine) -> None:
    machine.command("apt-get", "exit 0")
    result = machine.equip()
    assert result.code == 3
    assert result.output.endswith(f"install as root: gcc libc6-dev libjpeg-dev {HEADERS}\n")


def test_a_browser_is_installed_once(machine: Machine) -> None:
    machine.manager("apt-get", f"ln -s {shutil.which('true')} {machine.commands}/chromium")
    machine.command("ln", f'exec {shutil.which("ln")} "$@"')
    calls = ["apt-get install --yes --no-install-recommends chromium"]
    output = "==> browser for the tests of web pages: apt-get installs chromium\n"
    assert machine.run("equip_browser") == (0, output, calls)
    assert machine.run("equip_browser") == (0, "", calls)


def test_a_browser_that_cannot_be_installed_is_not_an_error(machine: Machine) -> None:
    assert machine.run("equip_browser") == (0, "", [])
    machine.command("id", "echo 1000")
    machine.manager("apt-get")
    assert machine.run("equip_browser") == (0, "", [])
    machine.command("id", "echo 0")
    machine.command("apt-get", "exit 100")
    assert machine.run("equip_browser").code == 0


def test_tools_for_several_machines_are_installed_once(machine: Machine) -> None:
    made = "".join(
        f"ln -s {shutil.which('true')} {machine.commands}/{tool}\n" for tool in HOST_TOOLS
    )
    machine.manager("apt-get", made)
    machine.command("ln", f'exec {shutil.which("ln")} "$@"')
    calls = ["apt-get install --yes --no-install-recommends iproute2 openssl"]
    output = "==> tools for the tests of several machines: apt-get installs iproute2 openssl\n"
    assert machine.run("equip_hosts") == (0, output, calls)
    assert machine.run("equip_hosts") == (0, "", calls)


@pytest.mark.parametrize("manager", ["dnf", "yum"])
def test_tools_for_several_machines_have_other_names_elsewhere(
    machine: Machine, manager: str
) -> None:
    machine.manager(manager)
    assert machine.run("equip_hosts").calls == [f"{manager} install -y iproute iproute-tc openssl"]


def test_tools_that_cannot_be_installed_are_not_an_error(machine: Machine) -> None:
    assert machine.run("equip_hosts") == (0, "", [])
    machine.command("apt-get", "exit 100")
    assert machine.run("equip_hosts").code == 0


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the files that an installation depends on, with an empty environment."""
    place = tmp_path / "repository"
    for folder in ("native/jpeg", "scripts", ".venv"):
        (place / folder).mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", "scripts/environment.sh", "hatch_build.py"):
        shutil.copy(ROOT / name, place / name)
    for name in ("module.c", "jpeg/one.h"):
        (place / "native" / name).write_text(name)
    return place


PREPARE = 'run() { echo "$1"; }; equip_kernel() { echo EQUIPPED; by_hand="do this"; false; }\n'


def test_the_installation_continues_without_the_kernel(machine: Machine, copy: Path) -> None:
    result = machine.run(f"{PREPARE} prepare demo", copy)
    assert result.code == 0
    assert result.output.splitlines()[1:] == [
        "EQUIPPED",
        "==> without the image kernel: simplejpeg and OpenCV serve. To build it, do this",
        "PyTorch",
        "build tools",
        "Penstock",
        "torchvision",
    ]


def test_no_packages_are_installed_for_a_kernel_that_is_switched_off(
    machine: Machine, copy: Path
) -> None:
    result = machine.run(f"{PREPARE} prepare demo", copy, PENSTOCK_NO_KERNEL="1")
    assert result.code == 0
    assert result.output.splitlines()[1:] == ["PyTorch", "build tools", "Penstock", "torchvision"]


def test_programs_of_the_scripts_keep_compiled_modules(machine: Machine, copy: Path) -> None:
    script = f"{PREPARE} prepare demo >/dev/null; python3 -c 'import sys; print(sys.flags)'"
    result = machine.run(script, copy, PYTHONDONTWRITEBYTECODE="1")
    assert result.code == 0
    assert "dont_write_bytecode=0" in result.output


def test_an_installation_is_repeated_when_any_part_of_the_kernel_changes(
    machine: Machine, copy: Path
) -> None:
    def prepared() -> bool:
        return "Penstock" in machine.run(f"{PREPARE} prepare demo", copy).output

    assert prepared()
    assert not prepared()
    (copy / "native/jpeg/one.h").write_text("changed")
    assert prepared()
    (copy / "native/two.h").write_text("new")
    assert prepared()
    machine.has("cc", "jpeg", "Python.h")  # installed by hand
    assert prepared()
    assert not prepared()
