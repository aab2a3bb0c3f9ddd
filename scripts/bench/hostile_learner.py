"""Run `join --role learner` as a learner that cheats, for scripts/bench/learners.py.

    python -m primerl.scripts.bench.hostile_learner KIND join --role learner ...

All of it is the product's learner; only what it contributes is changed, by the KIND in CHEATS.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import structs

from primerl.cli.main import main as run_program
from primerl.crypto.hashing import digest
from primerl.node.p2p.services import NodeServices
from primerl.node.training.outer import Gated, OuterState
from primerl.node.training.rounds import InnerLoop
from primerl.node.weights.state import Tensor, floats
from primerl.protocol.contributions import Contribution
from primerl.protocol.envelope import Purpose

FLIPPED = -100.0
Change = Callable[[np.ndarray], np.ndarray]


def main() -> None:
    """Cheat as the first argument says; the others are those of `primerl-node`."""
    kind, *arguments = sys.argv[1:]
    CHEATS[kind]()
    sys.argv = ["primerl-node", *arguments]
    run_program()


def flip() -> None:
    """Contribute the opposite of what was learned, a hundred times."""
    _contribute(lambda change: FLIPPED * change)


def send_nan() -> None:
    """Contribute numbers that are none."""
    _contribute(lambda change: np.full_like(change, np.nan))


def stay_behind() -> None:
    """State the version and outer state of the first contribution in all later ones."""
    first: list[Contribution] = []

    def stated(body: Contribution) -> Contribution:
        first.append(body)
        return structs.replace(body, version=first[0].version, outer=first[0].outer)

    _seal(stated)


def replay() -> None:
    """Contribute what the first assignment gave again and again."""
    first: list[Contribution] = []

    def repeated(body: Contribution) -> Contribution:
        first.append(body)
        return first[0]

    _seal(repeated)


def claim() -> None:
    """Claim to have trained on another learner's samples."""
    _seal(lambda body: structs.replace(body, assignment=digest(body.assignment)))


CHEATS: Mapping[str, Callable[[], None]] = {
    "sign flip x 100": flip,
    "not a number": send_nan,
    "stale base": stay_behind,
    "replay": replay,
    "another's samples": claim,
}


def _contribute(changed: Change) -> None:
    """Let learners contribute `changed(change)` of each tensor where they would contribute `change`."""
    honest = InnerLoop.change

    async def change(self: InnerLoop, outer: OuterState) -> Gated:
        gated = await honest(self, outer)
        masters = dict(gated.masters)
        for name in gated.changed:
            before = floats(outer.masters[name])
            made = (before + changed(floats(masters[name]) - before)).astype(np.float32)
            masters[name] = Tensor("F32", outer.masters[name].shape, made.view("<u4"))
        return replace(gated, masters=masters)

    InnerLoop.change = change  # type: ignore[method-assign]


def _seal(stated: Callable[[Contribution], Contribution]) -> None:
    """Let nodes sign `stated(body)` in place of each contribution."""
    honest = NodeServices.seal

    def seal(self: NodeServices, purpose: Purpose, body: Any, **options: Any) -> bytes:
        if purpose == Purpose.CONTRIBUTION:
            body = stated(body)
        return honest(self, purpose, body, **options)

    NodeServices.seal = seal  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
