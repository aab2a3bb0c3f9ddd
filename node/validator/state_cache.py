"""What a validator has in place of an engine: the newest policy versions, each proved to be the trainer's.

A version is offered only for the state that its signed head names: a term that was left made other ones.
"""

from collections.abc import Mapping
from pathlib import Path

from ...protocol.trust import AdmittedHead
from ..inference.engine import Completion, EngineStats, GenerateRequest
from ..ops.errors import EngineError
from ..weights.replica import Policy
from ..weights.state import Changed, State

NOTHING = -1


class Shelf:
    """The last `keep` policies. An Engine to those who load weights; it generates nothing."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._policies: dict[int, Policy] = {}
        self._loaded = NOTHING

    @property
    def policy_version(self) -> int:
        """See Engine."""
        return self._loaded

    def put(self, policy: Policy) -> None:
        """Keep a proved policy, and let go of the one that was put here the longest ago."""
        self._policies.pop(policy.version, None)
        self._policies[policy.version] = policy
        while len(self._policies) > self._keep:
            del self._policies[next(iter(self._policies))]

    def held(self, heads: Mapping[tuple[int, int], AdmittedHead], term: int) -> tuple[int, ...]:
        """Versions of `term` that are here, as the heads of that term name them."""
        return tuple(
            version
            for version, policy in sorted(self._policies.items())
            if (head := heads.get((term, version))) and head.head.state == policy.digest
        )

    def states(self, versions: tuple[int, ...]) -> dict[int, State] | None:
        """The states of these versions; None if one of them is gone."""
        if any(version not in self._policies for version in versions):
            return None
        return {version: self._policies[version].state for version in versions}

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """See Engine. There is nothing to start."""

    async def load(self, version: int, state: State) -> None:
        """See Engine. What is kept comes by put(), also the versions between."""
        self._loaded = version

    async def update(self, version: int, state: State, changed: Changed) -> None:
        """See Engine."""
        self._loaded = version

    async def generate(self, request: GenerateRequest) -> Completion:
        """See Engine. Raises EngineError."""
        raise EngineError("a validator generates nothing: join with --role inference")

    def stats(self) -> EngineStats:
        """See Engine."""
        return EngineStats()

    async def close(self) -> None:
        """See Engine."""
        self._policies.clear()
