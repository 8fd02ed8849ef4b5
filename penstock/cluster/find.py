"""Finds the machines of a cluster: addresses that the user gives, a launcher, or Slurm."""

from __future__ import annotations

import fcntl
import re
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass

from penstock import config
from penstock.errors import PipelineError

PORT = 7411
"""The port of a node for other machines, unless the user gives another."""

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9_.-]+)(?::([0-9]{1,5}))?")
_GET_ADDRESS = 0x8915
"""Linux: the IPv4 address of a network interface (SIOCGIFADDR)."""

_HOSTS = re.compile(r"([^,\[\]]+)(?:\[([0-9,-]+)\])?([^,\[\]]*)(?:,|$)")


@dataclass(frozen=True)
class ClusterPlace:
    """Where to look for the other machines. ``seeds``: addresses; empty: the node knows them.

    ``reason``: how they were found. ``by_ray``: Ray places the nodes and knows the addresses.
    ``launched``: a launcher has named them, and not the user.
    """

    seeds: tuple[str, ...]
    reason: str
    by_ray: bool = False
    launched: bool = False


def find_cluster(text: str) -> ClusterPlace:
    """The machines that ``cluster=`` names.

    >>> find_cluster("10.0.0.1,10.0.0.2:9000").seeds
    ('10.0.0.1:7411', '10.0.0.2:9000')
    """
    if text == "ray":
        return ClusterPlace((), 'cluster="ray"', by_ray=True)
    if text != "auto":
        return ClusterPlace(parse_addresses(text, "cluster"), f"cluster={text!r}")
    given = config.cluster()
    if given == "ray":
        return ClusterPlace((), "PENSTOCK_CLUSTER", by_ray=True)
    if given and given != "auto":
        return ClusterPlace(parse_addresses(given, "PENSTOCK_CLUSTER"), "PENSTOCK_CLUSTER")
    # Before MASTER_ADDR, which the workers of Ray Train have too.
    if ray_is_connected() or config.ray_address():
        return ClusterPlace((), "Ray", by_ray=True)
    master = config.master_machine()
    if master is not None:
        return ClusterPlace((f"{bracketed(master)}:{PORT}",), "MASTER_ADDR", launched=True)
    hosts = expand_hosts(config.slurm_hosts())
    if len(hosts) > 1:
        # Three are enough to find a new head if the first machine fails.
        seeds = tuple(f"{host}:{PORT}" for host in hosts[:3])
        return ClusterPlace(seeds, "SLURM_JOB_NODELIST", launched=True)
    return ClusterPlace((), "the node of this machine")


def ray_is_connected() -> bool:
    """Whether this process is connected to a Ray cluster, as jobs and workers of Ray are."""
    ray = sys.modules.get("ray")
    connected = getattr(ray, "is_initialized", None)
    return connected is not None and bool(connected())


def parse_addresses(text: str, what: str, *, least_port: int = 1) -> tuple[str, ...]:
    """Addresses with ports. ``what`` names the text in errors.

    >>> parse_addresses("gpu-1, [::1]:80", "cluster")
    ('gpu-1:7411', '[::1]:80')
    """
    found = []
    for part in text.split(","):
        match = _ADDRESS.fullmatch(part.strip())
        if match is None or int(match[2] or PORT) not in range(least_port, 65536):
            raise PipelineError(
                f"{what} is {text!r}, and {part.strip()!r} is not an address. Give machines with "
                f'commas between them, such as "10.0.0.1:{PORT},gpu-2", "ray" or "auto".'
            )
        found.append(f"{match[1]}:{match[2] or PORT}")
    return tuple(dict.fromkeys(found))


def bracketed(host: str) -> str:
    """A host as it stands before a port: an IPv6 address gets brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def split_address(address: str) -> tuple[str, int]:
    """Host and port of an address.

    >>> split_address("[::1]:80")
    ('::1', 80)
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def expand_hosts(text: str) -> list[str]:
    """The hosts that Slurm names in its compact form.

    >>> expand_hosts("login,gpu[01-03,7]")
    ['login', 'gpu01', 'gpu02', 'gpu03', 'gpu7']
    """
    hosts = []
    for match in _HOSTS.finditer(text):
        before, numbers, behind = match.groups()
        if numbers is None:
            hosts.append(before.strip() + behind)
            continue
        for part in numbers.split(","):
            first, _, last = part.partition("-")
            for number in range(int(first), int(last or first) + 1):
                hosts.append(f"{before}{number:0{len(first)}}{behind}")
    return hosts


def parse_own_address(text: str, what: str) -> str:
    """The address of this machine for others; port 0 stands for any free port."""
    found = parse_addresses(text, what, least_port=0)
    if len(found) != 1:
        raise PipelineError(f"{what} is {text!r}; give one address, that of this machine.")
    return found[0]


def numeric(seed: str) -> str:
    """The same address with a number as its host, if its name is known: machines compare addresses.

    >>> numeric("10.0.0.1:7411"), numeric("localhost:80")
    ('10.0.0.1:7411', '127.0.0.1:80')
    """
    host, port = split_address(seed)
    if host == "localhost":
        return f"127.0.0.1:{port}"
    found = addresses_of(host)
    if not found:
        return seed
    here = [address for address in found if is_local(address)]
    if host not in found and here and all(map(is_loopback, here)):
        # Debian gives a machine's own name a loopback address, which others cannot reach.
        here = [default_host()]
    return f"{bracketed((here or found)[0])}:{port}"


def own_address(seeds: tuple[str, ...]) -> tuple[str, int]:
    """The address of this machine that others reach, and a port (0: any free one).

    It is the seed that is this machine, or else the local end of the way to the first seed.
    """
    for seed in seeds:
        host, port = split_address(seed)
        for address in addresses_of(host):
            if is_local(address):
                return address, port
    for seed in seeds:
        host, port = split_address(seed)
        for address in addresses_of(host):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                try:
                    probe.connect((address, port))  # sends nothing
                except OSError:
                    continue
                return str(probe.getsockname()[0]), 0
    raise PipelineError(
        f"none of the machines {', '.join(seeds)} has an address that this machine can reach. "
        "Check the names, or give numeric addresses."
    )


def addresses_of(host: str) -> list[str]:
    """The numeric addresses of a host; none if its name is not known."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_local(address: str) -> bool:
    """Whether this machine has this numeric address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


def default_host() -> str:
    """An address of this machine for other machines: that of the way to the outside, or else the
    first one that other machines may reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # An address of documentation (RFC 5737): nothing is sent, only the way is looked up.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            pass  # a network without a way to the outside
        for _, name in socket.if_nameindex():
            wanted = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # without an address
                found = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, wanted)
                host = socket.inet_ntoa(found[20:24])
                if not is_loopback(host):
                    return host
        return "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Whether other machines cannot reach this address.

    >>> is_loopback("127.0.1.1"), is_loopback("10.0.0.1"), is_loopback("gpu-1")
    (True, False, False)
    """
    return host in ("localhost", "::1") or host.startswith("127.")
