"""Retire a key, or change it for a new one: sign the statement, keep it, tell the trainers that know the key.

A new key replaces the old one on disk in one rename, after the trainers were asked: until then every step may
be repeated, with the same new key and the same statement.
"""

import logging
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ...crypto.hashing import short
from ...crypto.keys import KEY_FILE, SecretKey
from ...protocol import tickets
from ...protocol.errors import RemoteProtocolError
from ...protocol.messages import Accepted, RetireKey
from ...protocol.retirement import read_retirement, retire
from ...protocol.version import ALPN_CONTROL, MAX_GOSSIP
from ..config.run import NetworkConfig
from ..errors import BusyError, NodeError, StorageError, UsageError, file_error
from ..p2p.connections import ConnectionPool
from ..p2p.peers import PeerTable
from ..p2p.rpc import Refused
from ..p2p.transport import TransportError
from ..process.unix_sockets import answers
from ..storage.ledger import OWNER, Ledger
from ..storage.partial import sync, whole_file
from ..storage.run_files import socket_path
from .daemon import RETIRED_FILE
from .factories import MakeTransport, start_iroh
from .tickets import remembered_tickets

logger = logging.getLogger(__name__)

TELL_S = 15.0
NEXT_KEY = "key.next"
"""The new key of a rotation, until the trainers know it."""
ROTATED = "key.rotated-"
"""Begins the name of a kept rotation; the short id of the key that it ended follows."""
LEDGER = "ledger.db"


def retired_file(data_dir: Path) -> Path:
    """Return where the retirement of a directory's key is kept."""
    return data_dir / RETIRED_FILE


def keep(data_dir: Path, sealed: bytes) -> Path:
    """Write a retirement beside the key; return its path. Raises StorageError."""
    path = retired_file(data_dir)
    _write(path, sealed)
    return path


def _write(path: Path, sealed: bytes) -> None:
    with whole_file(path, fsync=True) as partial:
        partial.write_bytes(sealed)


def read(path: Path) -> bytes:
    """Read a kept retirement and check its signature. Raises StorageError, UsageError."""
    try:
        with path.open("rb") as file:
            sealed = file.read(MAX_GOSSIP + 1)
    except OSError as error:
        raise file_error(error, path) from error
    try:
        read_retirement(sealed)
    except RemoteProtocolError as error:
        raise UsageError(f"{path} is no retirement of a key ({error}): copy it again") from error
    return sealed


@dataclass(frozen=True)
class Rotation:
    """The change of a directory's key that has begun."""

    successor: bytes
    """Id of the new key, which waits in NEXT_KEY."""
    statement: Path
    sealed: bytes


def check_may_rotate(data_dir: Path) -> None:
    """Raise BusyError or UsageError if the key of a directory cannot be changed now."""
    if answers(socket_path(data_dir)):
        raise BusyError(f"a node runs in {data_dir}: `primerl-node stop` it first")
    if (data_dir / LEDGER).exists():
        raise UsageError(
            f"{data_dir} is a trainer's or a judge's: its run is bound to its key, and a new run gets a new one"
        )
    if retired_file(data_dir).exists():
        raise UsageError(f"the key of {data_dir} was retired: nothing can take its place")


def begin_rotation(data_dir: Path, key: SecretKey, passphrase: str | None) -> Rotation:
    """Make the new key and sign the statement, or load those of an earlier try.

    Raises KeyFileError, StorageError, UsageError.
    """
    waiting = data_dir / NEXT_KEY
    if not waiting.exists():
        SecretKey.generate().save(waiting, passphrase)
    new = SecretKey.load(waiting, passphrase)
    statement = data_dir / f"{ROTATED}{short(key.node_id)}"
    if not statement.exists():
        _write(statement, retire(key, int(time.time()), new))
    sealed = read(statement)
    if read_retirement(sealed).successor != new.node_id:
        raise UsageError(f"{statement} is of another change of the key: move it and {waiting} away")
    return Rotation(new.node_id, statement, sealed)


def finish_rotation(data_dir: Path, rotation: Rotation) -> list[str]:
    """Put the new key into the place of the old one; return warnings about ledgers that name the old one.

    Raises StorageError.
    """
    try:
        (data_dir / NEXT_KEY).replace(data_dir / KEY_FILE)
        sync(data_dir)
    except OSError as error:
        raise file_error(error, data_dir / KEY_FILE) from error
    warnings: list[str] = []
    for path in sorted(data_dir.glob(f"runs/*/{LEDGER}")):
        try:
            with closing(Ledger(path)) as ledger:
                ledger.set(OWNER, rotation.successor)
        except NodeError as error:
            warnings.append(f"{path} still names the old key: {error}")
    return warnings


def known_tickets(data_dir: Path, given: str) -> list[str]:
    """Return the tickets whose trainers are told: `given`, and of the runs that admitted this directory."""
    try:
        return list(dict.fromkeys([*([given] if given else []), *remembered_tickets(data_dir)]))
    except StorageError as error:
        logger.warning("%s: give --ticket", error)
        return [given] if given else []


async def tell(
    texts: list[str], sealed: bytes, transport: MakeTransport = start_iroh
) -> dict[str, str]:
    """Hand a retirement to the trainer of each ticket; return by trainer why it did not take it, "" if it did.

    It goes under a new key: the retired one may be in use elsewhere, and its thief need not agree. Raises
    RemoteProtocolError for what is no ticket.
    """
    trainers = {ticket.trainer: ticket for ticket in (tickets.read(text, now=0) for text in texts)}
    endpoint = await transport(NetworkConfig(), SecretKey.generate(), 0)
    peers = PeerTable()
    links = ConnectionPool(endpoint, peers, connect_timeout_s=TELL_S)
    replies: dict[str, str] = {}
    try:
        for trainer, ticket in trainers.items():
            peers.hint(trainer, ticket.addresses)
            try:
                await links.request(
                    trainer, ALPN_CONTROL, RetireKey(sealed), Accepted, deadline=TELL_S
                )
                replies[trainer.hex()] = ""
            except (TransportError, Refused, RemoteProtocolError) as error:
                replies[trainer.hex()] = str(error)
    finally:
        await links.close()
        await endpoint.close()
    return replies
