"""Retire a key: sign the statement, keep it beside the key, and tell the trainers that know the key."""

import logging
import os
from pathlib import Path

from ...crypto.keys import SecretKey
from ...protocol import tickets
from ...protocol.errors import RemoteProtocolError
from ...protocol.messages import Accepted, RetireKey
from ...protocol.retirement import read_retirement
from ...protocol.version import ALPN_CONTROL, MAX_GOSSIP
from ..config.run import NetworkConfig
from ..errors import StorageError, UsageError, file_error
from ..p2p.connections import ConnectionPool
from ..p2p.peers import PeerTable
from ..p2p.rpc import Refused
from ..p2p.transport import TransportError
from .daemon import RETIRED_FILE
from .factories import MakeTransport, start_iroh
from .tickets import remembered_tickets

logger = logging.getLogger(__name__)

TELL_S = 15.0


def retired_file(data_dir: Path) -> Path:
    """Return where the retirement of a directory's key is kept."""
    return data_dir / RETIRED_FILE


def keep(data_dir: Path, sealed: bytes) -> Path:
    """Write a retirement beside the key; return its path. Raises StorageError."""
    path = retired_file(data_dir)
    try:
        with path.open("wb") as file:
            file.write(sealed)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise file_error(error, path) from error
    return path


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
    answers: dict[str, str] = {}
    try:
        for trainer, ticket in trainers.items():
            peers.hint(trainer, ticket.addresses)
            try:
                await links.request(
                    trainer, ALPN_CONTROL, RetireKey(sealed), Accepted, deadline=TELL_S
                )
                answers[trainer.hex()] = ""
            except (TransportError, Refused, RemoteProtocolError) as error:
                answers[trainer.hex()] = str(error)
    finally:
        await links.close()
        await endpoint.close()
    return answers
