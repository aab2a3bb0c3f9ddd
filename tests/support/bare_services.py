"""NodeServices with only the parts that a test names."""

import asyncio
from dataclasses import fields
from typing import Any

from support.protocol_cases import RUN, TRAINER

from primerl.crypto.keys import SecretKey
from primerl.node.p2p.rpc import Refused
from primerl.node.p2p.services import NodeServices


def bare_services(key: SecretKey = TRAINER, **parts: Any) -> NodeServices:
    """The services of the node with `key` in the run RUN; parts that are not given are None."""
    known: dict[str, Any] = {
        "key": key,
        "run_id": RUN,
        "trainer": TRAINER.node_id,
        "keep_chunks": set[bytes](),
        "key_refusals": asyncio.Queue[Refused](1),
    }
    values: dict[str, Any] = {one.name: None for one in fields(NodeServices)}
    return NodeServices(**{**values, **known, **parts})
