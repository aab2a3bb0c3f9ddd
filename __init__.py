"""primerl: a peer-to-peer node for decentralised reinforcement learning of language models.

The repository root is this package (see `package-dir` in pyproject.toml).
Start reading in `node/trainer/loop.py` and `node/worker/loop.py`. docs/library.md explains the names below,
which are stable; everything else may change with any release.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .crypto.keys import SecretKey
    from .node.app.embedded_node import EmbeddedNode as Node
    from .node.app.offline_audit import AuditResult, audit, draw
    from .node.app.weight_updates import WeightFollower, WeightUpdate, make_update
    from .node.errors import NodeError
    from .node.models.model_files import read_state
    from .node.verification.auditor import AuditItem, SampledSpan
    from .node.weights.state import State, Tensor, WeightsError
    from .protocol.errors import RemoteProtocolError

__version__ = "0.1.0"

_PLACES = {
    "SecretKey": "crypto.keys",
    "Node": "node.app.embedded_node",
    "AuditResult": "node.app.offline_audit",
    "audit": "node.app.offline_audit",
    "draw": "node.app.offline_audit",
    "WeightFollower": "node.app.weight_updates",
    "WeightUpdate": "node.app.weight_updates",
    "make_update": "node.app.weight_updates",
    "NodeError": "node.errors",
    "read_state": "node.models.model_files",
    "AuditItem": "node.verification.auditor",
    "SampledSpan": "node.verification.auditor",
    "State": "node.weights.state",
    "Tensor": "node.weights.state",
    "WeightsError": "node.weights.state",
    "RemoteProtocolError": "protocol.errors",
}
"""Public name -> module, which is imported when the name is first used."""
_NAMES = {"Node": "EmbeddedNode"}

__all__ = [  # noqa: RUF022 - by subject
    "Node", "NodeError",
    "SecretKey", "State", "Tensor", "WeightFollower", "WeightUpdate", "make_update", "read_state",
    "RemoteProtocolError", "WeightsError",
    "AuditItem", "AuditResult", "SampledSpan", "audit", "draw",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_PLACES[name]}", __name__), _NAMES.get(name, name))
    globals()[name] = value
    return value
