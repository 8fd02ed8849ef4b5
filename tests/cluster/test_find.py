"""Which machines ``cluster="auto"`` finds, by what a launcher says in the environment."""

from __future__ import annotations

import pytest

from penstock.cluster import find
from penstock.cluster.find import find_cluster, numeric, own_address

LAUNCHERS = ("MASTER_ADDR", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_STEP_NODELIST")
VARIABLES = (*LAUNCHERS, "SLURM_JOB_NODELIST", "PENSTOCK_CLUSTER", "RAY_ADDRESS")
SLURM = {"SLURM_JOB_NODELIST": "login,gpu[01-02,7]"}
TORCHRUN = {"MASTER_ADDR": "gpu01", "WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("given", "seeds", "reason"),
    [
        ({}, (), "the node of this machine"),
        (SLURM, ("login:7411", "gpu01:7411", "gpu02:7411"), "SLURM_JOB_NODELIST"),
        # The machines of a job step may be fewer than those of the job.
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu[01-02]"}, ("gpu01:7411", "gpu02:7411"), "SLURM"),
        ({"SLURM_JOB_NODELIST": "gpu01"}, (), "the node of this machine"),
        ({**SLURM, **TORCHRUN, "LOCAL_WORLD_SIZE": "2"}, ("gpu01:7411",), "MASTER_ADDR"),
        # torchrun on one machine of several.
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, (), "the node of this machine"),
        ({**SLURM, "PENSTOCK_CLUSTER": "10.0.0.9"}, ("10.0.0.9:7411",), "PENSTOCK_CLUSTER"),
    ],
)
def test_a_launcher_says_which_machines_there_are(
    given: dict[str, str], seeds: tuple[str, ...], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = find_cluster("auto")
    assert found.seeds == seeds
    assert reason in found.reason
    assert not found.by_ray


@pytest.mark.parametrize(
    ("here", "outside", "expected"),
    [
        ({"10.0.0.1"}, "10.0.0.1", "10.0.0.1:7411"),
        # The file /etc/hosts of Debian.
        ({"127.0.1.1"}, "10.0.0.1", "10.0.0.1:7411"),
        # On another machine.
        (set(), "10.0.0.2", "10.0.0.1:7411"),
    ],
)
def test_a_machine_that_a_launcher_names_has_the_same_address_everywhere(
    here: set[str], outside: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"gpu-1": sorted(here or {"10.0.0.1"})}
    monkeypatch.setattr(find, "addresses_of", lambda host: names.get(host, [host]))
    monkeypatch.setattr(find, "is_local", lambda address: address in here | {outside})
    monkeypatch.setattr(find, "default_host", lambda: outside)
    assert numeric("gpu-1:7411") == expected
    is_here = outside == "10.0.0.1"
    assert (own_address((numeric("gpu-1:7411"),)) == ("10.0.0.1", 7411)) == is_here


def test_names_that_nobody_knows_and_numbers_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(find, "addresses_of", lambda host: [host] if ":" in host else [])
    for seed in ("gpu-9:7411", "10.0.0.1:80", "[::1]:7411"):
        assert numeric(seed) == seed
