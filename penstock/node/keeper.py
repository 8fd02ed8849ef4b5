"""Keeps the node of this machine in a cluster, for a launcher such as Ray that supervises it.

The process of a keeper is not the node: it starts the node, holds a connection to it, and starts
another one when the connection breaks. If the keeper dies, the node stays for ``GRACE`` seconds,
and after that for as long as jobs use it.
"""

from __future__ import annotations

import logging
import select
import shutil
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock import config
from penstock.cluster.find import PORT, bracketed, parse_own_address, split_address
from penstock.cluster.mailbox import Mailbox, PublishedRecipes
from penstock.cluster.placing import KeeperReport, PlacementOptions
from penstock.cluster.secrets import Secrets, fingerprint_of, read_secrets, write_secrets
from penstock.engine.pools.wire import Wire
from penstock.errors import ClusterError, PenstockError, WorkerError
from penstock.node.client import connect_or_start, leave_cluster, request_status
from penstock.node.directory import NodeDirectory
from penstock.node.protocol import VOCABULARY, EnterCluster, Entered, HoldNode, Refused, Status

_log = logging.getLogger("penstock.keeper")

GRACE = 60.0
"""Seconds that a node stays without its keeper. Ray restarts an actor within seconds, and machines
reconnect to a restarted head of Ray within a minute."""

LOOK = 1.0
"""Seconds between two looks at the node, for the number of its jobs."""

ANSWER = 30.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before another attempt after a failure; the pause doubles each time."""

PORT_PATIENCE = 5.0
"""Seconds for which the port of a node that has ended may still be taken. The kernel closes the
sockets of a killed process one after the other, on a busy machine with pauses."""

REMEDY = (
    "Ray carries secrets and code only if it asks every client for a token. Start Ray with "
    "RAY_AUTH_MODE=token on all machines (`ray get-auth-token --generate` makes a token), put "
    "{directory} on a file system that all machines share, or copy it: `penstock cluster secrets "
    "--export | ssh MACHINE penstock cluster secrets --import`."
)


class NodeKeeper:
    """See ``penstock.cluster.placing.MachineKeeper``. ``host``: address of this machine for others.

    ``fetch``: brings a recipe from another machine, given its digest and a number of seconds. It
    raises ClusterError if no code may travel.
    """

    def __init__(
        self,
        options: PlacementOptions,
        host: str,
        fetch: Callable[[str, float], bytes | None],
        directory: NodeDirectory | None = None,
        *,
        name: str = "Ray",
    ) -> None:
        self._options = options
        self._host = host
        self._name = name
        self._directory = directory or NodeDirectory()
        self._lock = threading.Lock()
        self._wake_end, self._wake = Wire.pair()
        self._closing = False
        self._seeds: tuple[str, ...] = ()
        self._secrets: Secrets | None = None
        self._secret = ""
        self._report = KeeperReport("starting")
        self._recipes = PublishedRecipes(fetch)
        self._directory.create()
        self._mailbox = Mailbox(self._directory.path / "keeper.sock", self._recipes)
        self._address = self._choose_address()
        self._thread = threading.Thread(target=self._keep, name="penstock-keeper", daemon=True)
        self._thread.start()

    # What the supervisor asks. None of it waits for the node.

    def tend(self, seeds: tuple[str, ...], secrets: Secrets | None) -> KeeperReport:
        with self._lock:
            changed = seeds != self._seeds or (secrets is not None and self._secrets is None)
            self._seeds = seeds
            self._secrets = self._secrets or secrets
            report = replace(self._report, address=self._address, secret=self._secret)
        if changed:
            self._ring()
        return report

    def hand_over(self) -> Secrets | None:
        with self._lock:
            return self._secrets

    def recipe(self, digest: str) -> bytes | None:
        return self._recipes.content(digest)

    def leave(self) -> None:
        with self._lock:
            self._closing = True
        self._ring()
        self._thread.join(ANSWER)
        for end in (self._wake, self._wake_end):
            end.close()
        with suppress(PenstockError):
            leave_cluster(self._directory)
        self._mailbox.close()
        if self._secret and Path(self._secret).parent == self._directory.path:
            # The node has read them. A file that stays would outlive the cluster.
            shutil.rmtree(self._secret, ignore_errors=True)

    # The thread.

    def _ring(self) -> None:
        with suppress(OSError):
            self._wake.send(b"!", socket.MSG_DONTWAIT)

    def _keep(self) -> None:
        pause = FIRST_PAUSE
        while not self._closing:
            if not self._seeds:
                self._wait(LOOK)
                continue
            try:
                self._prepare_secrets()
                self._hold_node()
                pause = FIRST_PAUSE
            except (PenstockError, OSError) as error:
                self._set(KeeperReport("failed", reason=str(error)))
                _log.warning("%s", error)
                # Another process may have taken the port, also while the node was restarted.
                with suppress(ClusterError):
                    self._wait_for_port()
                    address = self._choose_address(self._address)
                    with self._lock:
                        self._address = address
                self._wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            except Exception as error:
                self._set(KeeperReport("failed", reason=f"{type(error).__name__}: {error}"))
                _log.exception("the node cannot be kept in the cluster")
                self._wait(LONGEST_PAUSE)

    def _wait(self, seconds: float) -> None:
        if select.select([self._wake_end], [], [], seconds)[0]:
            with suppress(OSError):
                self._wake_end.recv(1)

    def _hold_node(self) -> None:
        """Put the node into the cluster, and hold it until it ends or this keeper is to end."""
        wire = Wire(connect_or_start(self._directory), VOCABULARY)
        wire.socket.settimeout(ANSWER)
        try:
            options = self._options
            entered = self._ask(
                wire,
                EnterCluster(
                    list(self._seeds),
                    self._address,
                    self._secret,
                    options.cache_bytes,
                    options.cores,
                    stay=False,
                ),
            )
            if not isinstance(entered, Entered):
                raise WorkerError("the node has not answered EnterCluster")
            with self._lock:
                self._address = entered.address
            while not self._closing:
                hold = HoldNode(self._name, GRACE, list(self._seeds), str(self._mailbox.path))
                status = self._ask(wire, hold)
                if not isinstance(status, Status):
                    return  # it has ended; the next round starts another
                members = sum(len(group["members"]) for group in status.status["groups"])
                self._set(
                    KeeperReport(
                        "in",
                        machine=entered.machine,
                        pid=status.status["pid"],
                        members=members,
                        has_secrets=True,
                    )
                )
                ready = select.select([wire.socket, self._wake_end], [], [], LOOK)[0]
                if self._wake_end in ready:
                    self._wait(0)
                if wire.socket in ready:
                    self._set(KeeperReport("starting", reason="the node has ended"))
                    return
        except (BrokenPipeError, ConnectionResetError):
            self._set(KeeperReport("starting", reason="the node has ended"))
        except TimeoutError:
            raise WorkerError(
                f"the node did not answer within {ANSWER:g} s. Its log is {self._directory.log}."
            ) from None
        finally:
            wire.close()

    def _ask(self, wire: Wire, message: tuple[Any, ...]) -> Any | None:
        wire.send(message)
        received = wire.receive()
        answer = None if received is None else received[0]
        if isinstance(answer, Refused):
            raise WorkerError(answer.reason)
        return answer

    def _set(self, report: KeeperReport) -> None:
        with self._lock:
            self._report = replace(report, has_secrets=self._secrets is not None)

    # Secrets and the address.

    def _prepare_secrets(self) -> None:
        """Find the directory of the right secrets, or write those that came through Ray."""
        expected = self._options.fingerprint
        given = self._secrets
        tried = []
        for directory in dict.fromkeys([Path(self._options.secret), config.cluster_secret()]):
            try:
                found = read_secrets(directory)
            except ClusterError as error:
                tried.append(str(error))
                continue
            if fingerprint_of(found) == expected:
                with self._lock:
                    self._secrets, self._secret = found, str(directory.absolute())
                return
            tried.append(f"{directory} has the secrets of another cluster.")
        if given is None:
            remedy = REMEDY.format(directory=self._options.secret)
            raise ClusterError(f"{self._host} lacks the secrets: {' '.join(tried)} {remedy}")
        if fingerprint_of(given) != expected:
            raise ClusterError("the secrets that came through Ray are those of another cluster")
        directory = self._directory.path / f"secrets-{expected[:12]}"
        shutil.rmtree(directory, ignore_errors=True)
        write_secrets(directory, given)
        with self._lock:
            self._secret = str(directory.absolute())

    def _choose_address(self, before: str = "") -> str:
        """The address of the node. ``before``: its last one, which other machines know.

        The port of that, the usual one, or a free one if other processes have both.
        """
        given = config.cluster_address()
        if given:
            return parse_own_address(given, "PENSTOCK_CLUSTER_ADDRESS")
        with suppress(PenstockError):
            # The keeper before this one has died, and its node has the usual port.
            cluster = (request_status(self._directory) or {}).get("cluster")
            if cluster is not None:
                return str(cluster["address"])
        last = [split_address(before)[1]] if before else []
        for port in dict.fromkeys([*last, PORT, 0]):
            found = self._free_port(port)
            if found is not None:
                return f"{bracketed(self._host)}:{found}"
        raise ClusterError(
            f"this machine has no address {self._host}, by which Ray knows it. Set "
            "PENSTOCK_CLUSTER_ADDRESS to an address that other machines reach."
        )

    def _free_port(self, port: int) -> int | None:
        """The port if a node can listen on it, or a free one for 0; ``None`` if it is taken."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe, suppress(OSError):
            # As the node will: the connections of one that has just ended do not matter.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((self._host, port))
            return int(probe.getsockname()[1])
        return None

    def _wait_for_port(self) -> None:
        """Wait until the last node has given up its port, which other machines know."""
        port = split_address(self._address)[1]
        end = time.monotonic() + PORT_PATIENCE
        while not self._closing and self._free_port(port) is None and time.monotonic() < end:
            self._wait(0.1)
