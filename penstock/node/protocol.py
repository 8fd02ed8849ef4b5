"""The messages between members and the node, as small records.

A member sends ``Join``, then ``BeginEpoch`` for each epoch, ``Want`` for each batch in the order of
its plan, ``Took`` when the training loop has taken a batch, and ``Released`` when the last view of
it is gone. The node answers ``Join`` with ``Welcome`` or ``Refused``, and ``BeginEpoch`` with
``First``. It sends ``BatchGiven`` or ``BatchFailed`` for each wanted batch, and ``Broken`` if the
group cannot go on. A command that is not a member sends ``GetStatus`` or ``EndNode``; the node
answers both with ``Status``. A member that has waited for long sends ``AskProgress``, and gets
``Progress``. One that leaves while its process still uses batches sends ``LeaveGroup``. A process
that wants the node to work with other machines sends ``EnterCluster`` first, and gets ``Entered``
or ``Refused``; ``LeaveCluster`` ends that. A process that keeps a node in its cluster sends
``HoldNode`` instead of asking it to stay.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

from penstock.engine.pools.wire import (
    RELEASE,
    ProtocolError,
    Vocabulary,
    check_types,
    pack_integers,
    unpack_integers,
)
from penstock.node.copies import MakeCopy, MayLeave, OwnerLeft, UseCopy
from penstock.node.state import BatchName, Lag
from penstock.order import BatchKeys

__all__ = ["RELEASE"]

VERSION = 7
"""Version of these messages. The node refuses members of another version."""


class Join(NamedTuple):
    """A process asks to become a member of a group.

    ``part``: rank and world. ``size``: its batch size. ``cuts``: it can make its batches from
    batches of another size. ``unit``: the group's batch size, if it was a member before.
    ``clustered``: the caches of the group are divided over the machines of the node's cluster.
    ``dealt``: the rank that gets each sample in the first epoch, packed by ``pack_ranks``.
    """

    version: int
    release: str
    group: str
    description: dict[str, Any]
    part: str
    size: int
    cuts: bool
    unit: int | None
    lag: Lag
    clustered: bool = False
    dealt: bytes | None = None


class Welcome(NamedTuple):
    """The process is now a member. ``needs_code``: the node does not have the pipeline yet.

    ``unit``: the group's batch size. ``part``: which batches the member takes, as in their names.
    """

    needs_code: bool
    unit: int
    part: str


class Refused(NamedTuple):
    """The node refuses a request."""

    reason: str


class Code(NamedTuple):
    """The pipeline: packed, in a shared file whose descriptor is sent along.

    ``path`` and ``directory``: import path and working directory of the job. ``user_code``: the
    pipeline runs code that is not Penstock's own.
    """

    path: list[str]
    directory: str
    user_code: bool


class BeginEpoch(NamedTuple):
    """A member begins an epoch of ``length`` batches, of which it has had ``done``.

    ``first``: the batch it begins with; ``None`` lets the node choose.
    """

    epoch: int
    length: int | None
    first: int | None
    done: int


class First(NamedTuple):
    """The batch that a member begins an epoch with."""

    epoch: int
    first: int


class Want(NamedTuple):
    """A member will need this batch. Arrays are little-endian 64-bit integers."""

    epoch: int
    number: int
    indices: bytes
    replicas: bytes | None
    spent: bytes | None

    @classmethod
    def of(cls, keys: BatchKeys) -> Want:
        indices = pack_integers(keys.indices) or b""
        return cls(
            keys.epoch,
            keys.number,
            indices,
            pack_integers(keys.replicas),
            pack_integers(keys.spent),
        )

    def keys(self) -> BatchKeys:
        indices = unpack_integers(self.indices)
        if indices is None:
            raise ValueError("a batch without samples")
        replicas, spent = unpack_integers(self.replicas), unpack_integers(self.spent)
        return BatchKeys(self.epoch, self.number, indices, replicas, spent)

    def named(self, part: str) -> BatchName:
        """The name of this batch, equal in all processes for equal samples at one position."""
        digest = hashlib.blake2b(digest_size=8)
        for data in (self.indices, self.replicas):
            digest.update(b"-" if data is None else data + b"+")
        return BatchName(part, self.epoch, self.number, digest.hexdigest())


class AskProgress(NamedTuple):
    """A member that has waited for long asks what the node is doing for it."""


class Progress(NamedTuple):
    """What the node is doing for a member that waits, in words."""

    text: str


class LeaveGroup(NamedTuple):
    """A member leaves its group, and closes the connection when it has released all batches.

    ``used``: epoch, number and digest of each batch that its process still uses.
    """

    used: list[list[Any]]


class Took(NamedTuple):
    """The training loop of a member has taken this batch."""

    epoch: int
    number: int
    digest: str


class Released(NamedTuple):
    """A member's process no longer uses this batch."""

    epoch: int
    number: int
    digest: str


class Rewind(NamedTuple):
    """A member withdraws all its earlier requests for batches."""


class ShareCopies(NamedTuple):
    """A job delivers batches to a device, and shares its copies with others.

    ``part``: which batches it takes, and how large they are. ``device``: equal for all processes
    that use one device.
    """

    version: int
    release: str
    group: str
    part: str
    device: str


class AskCopy(NamedTuple):
    """A job is about to copy this batch to its device."""

    epoch: int
    number: int
    digest: str


class CopyMade(NamedTuple):
    """A job has copied this batch where others can read it.

    ``version`` counts the memory of the place. ``layout``: the tensors in it. ``handles``: by which
    others map the memory, by their numbers; only for those that have none yet.
    """

    epoch: int
    number: int
    digest: str
    version: int
    layout: str
    handles: dict[int, bytes]


class CopyEnded(NamedTuple):
    """A job has read the copy of this batch, waits for it no longer, or could not make it."""

    epoch: int
    number: int
    digest: str


class StopSharing(NamedTuple):
    """A job will close this connection and free its copies."""


class Several(NamedTuple):
    """Several messages in one, because each message wakes the node."""

    messages: list[list[Any]]


class BatchGiven(NamedTuple):
    """A prepared batch, in a slot. The descriptor of a new slot is sent along.

    ``layout``: packed, if it is another than that of the batch before. ``whole``: the slot holds a
    packed value of ``nbytes`` instead of rows. ``beside``: packed fields that are not in the slot.
    ``elsewhere``: rows that other machines have prepared, by machine.
    """

    epoch: int
    number: int
    digest: str
    slot: int | None
    layout: bytes | None
    whole: bool
    rows: int
    nbytes: int
    beside: bytes | None
    bad: list[tuple[int, str, str, str]]
    elsewhere: dict[str, int]


class BatchFailed(NamedTuple):
    """A batch that could not be prepared, with the packed error."""

    epoch: int
    number: int
    digest: str
    error: bytes


class Broken(NamedTuple):
    """The group cannot go on, with the packed error."""

    error: bytes


class GetStatus(NamedTuple):
    """Asks for the status of the node."""


class EnterCluster(NamedTuple):
    """Asks the node to work with the nodes of other machines.

    - ``seeds``: addresses of machines to begin with; empty: the cluster that the node is in.
    - ``address``: where other machines reach this node; empty: it is found out.
    - ``secret``: directory of the token and the certificate; empty: the usual place.
    - ``cache_bytes``: room for samples of jobs on other machines. ``cores``: that jobs on other
      machines may use. ``stay``: until ``LeaveCluster``, even without members.
    - ``found``: a launcher has named the seeds, and not the user. If a command has put the node
      into a cluster, it stays in that one.
    """

    seeds: list[str]
    address: str
    secret: str
    cache_bytes: int
    cores: int
    stay: bool
    found: bool = False


class HoldNode(NamedTuple):
    """Asks a node that is in a cluster to stay while this connection is open.

    - ``keeper``: who holds it, such as ``"Ray"``. ``grace``: seconds that the node stays after the
      connection has ended, so that the keeper may come back.
    - ``seeds``: the machines that may be head from now on. ``courier``: path of a socket at which
      the keeper brings recipes to other machines; empty if it does not.
    """

    keeper: str
    grace: float
    seeds: list[str]
    courier: str


class Entered(NamedTuple):
    """The node works with other machines. ``address``: where they reach it."""

    machine: str
    address: str


class LeaveCluster(NamedTuple):
    """Asks the node to leave its cluster. It ends, unless a job uses it."""


class EndNode(NamedTuple):
    """Asks the node to end."""


class Status(NamedTuple):
    """The status of the node, as plain data."""

    status: dict[str, Any]


VOCABULARY = Vocabulary(
    join=Join,
    welcome=Welcome,
    refused=Refused,
    code=Code,
    begin=BeginEpoch,
    first=First,
    want=Want,
    took=Took,
    released=Released,
    rewind=Rewind,
    several=Several,
    ask=AskProgress,
    progress=Progress,
    leave=LeaveGroup,
    given=BatchGiven,
    failed=BatchFailed,
    broken=Broken,
    look=GetStatus,
    enter=EnterCluster,
    entered=Entered,
    hold=HoldNode,
    leave_cluster=LeaveCluster,
    end=EndNode,
    status=Status,
    share_copies=ShareCopies,
    ask_copy=AskCopy,
    make_copy=MakeCopy,
    use_copy=UseCopy,
    copy_made=CopyMade,
    copy_ended=CopyEnded,
    owner_left=OwnerLeft,
    stop_sharing=StopSharing,
    may_leave=MayLeave,
)

MOST_WANTED = 1024
"""Batches that a member may want at the same time. Choosing among more takes the node too long."""


def check(message: tuple[Any, ...]) -> None:
    """Raise ProtocolError if a message to the node has values that no member sends.

    One wrong value that reached the state of a group would fail for all of its members.
    """
    kind = type(message)
    if kind is Several:
        if not isinstance(message[0], list):
            raise ProtocolError("Several without a list of messages")
        return
    allowed = _FIELDS.get(kind)
    if allowed is None:
        raise ProtocolError(f"a node does not handle {kind.__name__}")
    check_types(message, allowed)
    problem = _problem(message)
    if problem:
        raise ProtocolError(f"{kind.__name__} with {problem}")


_NONE = type(None)

_FIELDS: dict[type, tuple[tuple[type, ...], ...]] = {
    Join: (
        *((int,), (str,), (str,), (dict,), (str,), (int,), (bool,), (int, _NONE), (str,)),
        *((bool,), (bytes, _NONE)),
    ),
    Code: ((list,), (str,), (bool,)),
    BeginEpoch: ((int,), (int, _NONE), (int, _NONE), (int,)),
    Want: ((int,), (int,), (bytes,), (bytes, _NONE), (bytes, _NONE)),
    Took: ((int,), (int,), (str,)),
    Released: ((int,), (int,), (str,)),
    Rewind: (),
    AskProgress: (),
    LeaveGroup: ((list,),),
    GetStatus: (),
    EnterCluster: ((list,), (str,), (str,), (int,), (int,), (bool,), (bool,)),
    HoldNode: ((str,), (float,), (list,), (str,)),
    LeaveCluster: (),
    EndNode: (),
    ShareCopies: ((int,), (str,), (str,), (str,), (str,)),
    AskCopy: ((int,), (int,), (str,)),
    CopyMade: ((int,), (int,), (str,), (int,), (str,), (dict,)),
    CopyEnded: ((int,), (int,), (str,)),
    StopSharing: (),
}
"""The types of the fields of each message that a node handles."""


def _problem(message: tuple[Any, ...]) -> str:
    """What is wrong with the values of a message; empty if nothing is."""
    if isinstance(message, Join):
        if message.size < 1 or (message.unit is not None and message.unit < 1):
            return f"batches of {message.unit or message.size} samples"
        if message.lag not in ("detach", "wait"):
            return f"lag {message.lag!r}"
    elif isinstance(message, LeaveGroup):
        used = message.used
        if not all(type(n) is list and [*map(type, n)] == [int, int, str] for n in used):
            return "names that are not names of batches"
    elif isinstance(message, CopyMade):
        if not all(type(k) is int and type(v) is bytes for k, v in message.handles.items()):
            return "handles that are not bytes by number"
    elif isinstance(message, Code):
        if not all(isinstance(entry, str) for entry in message.path):
            return "an import path that is not a list of text"
    elif isinstance(message, (EnterCluster, HoldNode)):
        if not all(isinstance(seed, str) for seed in message.seeds):
            return "addresses that are not text"
    elif isinstance(message, BeginEpoch):
        if min(message.length or 0, message.first or 0, message.done) < 0:
            return f"a negative number: {message}"
    elif isinstance(message, Want):
        sizes = {len(message.indices), len(message.replicas or message.indices)}
        if len(sizes) > 1 or any(len(data or b"") % 8 for data in message[2:]):
            return "arrays of the wrong length"
    return ""


ABOUT_COPIES = (AskCopy, CopyMade, CopyEnded, StopSharing)
"""Messages of jobs that share copies on a device."""

ABOUT_BATCHES = (Want, Took, Released, Rewind)
"""Messages that go to a group; several that came together are handled together."""


def requested_size(size: int, unit: int, cuts: bool) -> int:
    """Size of the batches that a member asks for, in a group with batches of ``unit`` samples.

    ``size``: the member's batch size. ``cuts``: it can make its batches from batches of another
    size.

    >>> [requested_size(32, 64, True), requested_size(128, 64, True)]
    [64, 64]
    >>> [requested_size(48, 64, True), requested_size(32, 64, False)]
    [48, 32]
    """
    return unit if cuts and (size % unit == 0 or unit % size == 0) else size
