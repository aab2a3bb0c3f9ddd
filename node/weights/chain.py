"""Plan over policy versions: which artifacts to fetch, which to keep, when to publish a snapshot. No I/O.

A delta is only ever planned onto the exact state that it names; a version number alone proves nothing.
"""

from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet

from ...protocol.manifests import Artifact, ChunkRef, PolicyManifest
from .state import NoPath, WeightsError

NOTHING = -1
"""The version held by a node that holds no weights."""

Step = tuple[int, Artifact]
"""A version, and the artifact that reaches it."""
Needs = Callable[[PolicyManifest, Artifact], Sequence[ChunkRef]]
"""Select the chunks of an artifact that have to be fetched for the manifest's version."""
_Route = tuple[int, int, tuple[Step, ...]]
"""Bytes to fetch, steps, and the steps themselves; compares by the first two."""


def all_chunks(_manifest: PolicyManifest, artifact: Artifact) -> Sequence[ChunkRef]:
    """Select every chunk, for a node that holds all weights."""
    return artifact.chunks


class VersionChain:
    """The policy versions that are known to be genuine, and the ways between them."""

    def __init__(self) -> None:
        self._manifests: dict[int, PolicyManifest] = {}

    def add(self, manifest: PolicyManifest) -> None:
        """Add a version; the caller has checked its signature.

        Raises WeightsError if the version is known with another state: call rewind() first, if the trainer's
        head says that it went back.
        """
        known = self._manifests.get(manifest.version)
        if known is not None and known.state != manifest.state:
            raise WeightsError(f"version {manifest.version} is known with another state")
        self._manifests[manifest.version] = manifest

    def rewind(self, version: int) -> None:
        """Forget `version` and everything after it: the trainer resumed from before."""
        self._manifests = {v: m for v, m in self._manifests.items() if v < version}

    def get(self, version: int) -> PolicyManifest | None:
        """Return the manifest of `version`; None if it is not known."""
        return self._manifests.get(version)

    @property
    def newest(self) -> int:
        """The newest known version, or NOTHING."""
        return max(self._manifests, default=NOTHING)

    def plan(
        self,
        have_version: int,
        have_state: bytes,
        target_version: int,
        *,
        stored: AbstractSet[bytes] = frozenset(),
        needs: Needs = all_chunks,
    ) -> list[Step]:
        """Plan the steps to `target_version` that fetch the fewest bytes, then the fewest steps.

        They start from the present state (`have_version` NOTHING: there is none) or from a snapshot. Empty if
        the target is already here. Only chunks in `needs` of an artifact cost anything, and none with a digest
        in `stored`. Raises NoPath, and the errors of `needs`.
        """
        start = None if have_version == NOTHING else (have_version, have_state)
        route = self._cheapest(start, target_version, self._manifests.keys(), stored, needs)
        if route is None:
            raise NoPath(
                f"nothing known leads from version {have_version} to {target_version}: "
                "wait for a snapshot or ask for older manifests"
            )
        return list(route)

    def gap(self, base: int, below: int) -> int | None:
        """Return the newest known version before `below`, or `base`, whose successor is not known.

        None if there is no such version: then no manifest is missing on the way from `base`.
        """
        known = {base, *self._manifests} - {NOTHING}
        return max((v for v in known if v < below and v + 1 not in self._manifests), default=None)

    def live(self, keep: int) -> list[Step]:
        """List the artifacts that must stay so that each of the `keep` newest versions can be reached.

        These are, for each version, the chain from the newest snapshot at or before it, for nodes that hold
        nothing, and its own artifacts, for nodes that follow: so deltas stay even where the snapshot before
        them is not known.
        """
        if keep < 1:
            raise ValueError("keep at least the newest version")
        newest = sorted(self._manifests)[-keep:]
        steps: dict[tuple[int, int], Step] = {}
        for version in newest:
            chain = self._from_newest_snapshot(version)
            own = [(a.reaches(version), a) for a in self._manifests[version].artifacts]
            for reached, artifact in [
                *chain,
                *(step for step in own if step[0] in self._manifests),
            ]:
                steps[reached, artifact.base_version] = (reached, artifact)
        return [steps[key] for key in sorted(steps)]

    def live_chunks(self, keep: int) -> set[bytes]:
        """Return the digests of the chunks of live(); all others may be collected."""
        return {chunk.digest for _, artifact in self.live(keep) for chunk in artifact.chunks}

    def forget(self, keep: int) -> int:
        """Drop the manifests that live() does not need; returns the oldest version that stays."""
        live = {version for version, _ in self.live(keep)}
        self._manifests = {v: m for v, m in self._manifests.items() if v in live}
        return min(live)

    def needs_snapshot(self, version: int, interval: int, *, outweigh: float = 1.0) -> bool:
        """Return whether a snapshot of `version`, the newest, is due.

        True if no snapshot leads to it, if the newest one is `interval` versions old, or if the deltas since
        then together exceed `outweigh` times its size, so that a late joiner fetches less with a new one.
        """
        chain = self._from_newest_snapshot(version)
        if not chain:
            return True
        newest, snapshot = chain[0]
        deltas = sum(artifact.size for _, artifact in chain[1:])
        return version - newest >= interval or deltas > outweigh * snapshot.size

    def is_reachable(self, version: int) -> bool:
        """Return whether a node that holds nothing can reach `version`."""
        return bool(self._from_newest_snapshot(version))

    def _from_newest_snapshot(self, version: int) -> list[Step]:
        """Return the cheapest chain to `version` from the newest snapshot that has one; empty if none."""
        for start, artifacts in sorted(self._artifacts().items(), reverse=True):
            if start <= version and any(artifact.kind == "anchor" for artifact in artifacts):
                route = self._cheapest(None, version, {start}, frozenset())
                if route is not None:
                    return list(route)
        return []

    def _artifacts(self) -> dict[int, list[Artifact]]:
        """Return the artifacts that make each known version; later manifests may have snapshots of it."""
        artifacts: dict[int, list[Artifact]] = {version: [] for version in self._manifests}
        for version, manifest in self._manifests.items():
            for artifact in manifest.artifacts:
                reached = artifact.reaches(version)
                if reached == version or (reached < version and artifact.kind == "anchor"):
                    artifacts.get(reached, []).append(artifact)
        return artifacts

    def _cheapest(
        self,
        start: tuple[int, bytes] | None,
        target: int,
        snapshots: Collection[int],
        stored: AbstractSet[bytes],
        needs: Needs = all_chunks,
    ) -> tuple[Step, ...] | None:
        """Find the shortest path from (version, state) `start` or from a snapshot at a version in `snapshots`.

        Deltas only go up, so one pass in version order settles every version.
        """
        routes: dict[tuple[int, bytes], _Route] = {} if start is None else {start: (0, 0, ())}
        artifacts = self._artifacts()
        for version in sorted(v for v in self._manifests if v <= target):
            manifest = self._manifests[version]
            here = (version, manifest.state)
            ways = [routes[here]] if here in routes else []
            for artifact in artifacts[version]:
                before = _before(artifact, version, routes, version in snapshots)
                if before is not None:
                    spent, count, steps = before
                    cost = sum(c.size for c in needs(manifest, artifact) if c.digest not in stored)
                    ways.append((spent + cost, count + 1, (*steps, (version, artifact))))
            if ways:
                routes[here] = min(ways, key=lambda way: way[:2])
        known = self._manifests.get(target)
        route = routes.get((target, known.state)) if known else None
        return route[2] if route else None


def _before(
    artifact: Artifact,
    version: int,
    routes: dict[tuple[int, bytes], _Route],
    allowed: bool,
) -> _Route | None:
    """Return the route to where `artifact` may be applied, or None."""
    if artifact.kind == "anchor":
        return (0, 0, ()) if allowed else None
    if artifact.base_version >= version:
        return None
    return routes.get((artifact.base_version, artifact.base_state))
