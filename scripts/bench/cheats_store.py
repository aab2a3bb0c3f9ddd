"""What was measured in one setting, in memory and on disk: tables are made of it anywhere, with any bounds."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from cheats_measure import Sample

from primerl.node.verification.bounds import BUILT_IN, BUILT_IN_SCALE
from primerl.protocol.errors import Reason
from primerl.protocol.manifests import ProofContract
from primerl.protocol.rollouts import Evidence
from primerl.tests.attacks.cheat_world import Outcome


@dataclass(frozen=True)
class Setting:
    """One model, dtype and fingerprint; outcomes are judged by `contract`."""

    label: str
    contract: ProofContract
    honest: list[Sample]
    cheats: list[Sample]


def save(path: Path, settings: list[Setting]) -> None:
    """Write everything that was measured."""
    path.write_text(json.dumps([_plain(one) for one in settings]))


def load(path: Path) -> list[Setting]:
    """What save() wrote, with the bounds that are built in today."""
    return [
        Setting(
            plain["label"],
            _today(plain["contract"]),
            [_sample(one) for one in plain["honest"]],
            [_sample(one) for one in plain["cheats"]],
        )
        for plain in json.loads(path.read_text())
    ]


def _today(contract: dict[str, Any]) -> ProofContract:
    dtype = contract["dtype"]
    reject, suspect = BUILT_IN[dtype]
    scale = {"other_scale": BUILT_IN_SCALE[dtype]}  # files of before have none
    read = msgspec.convert(contract | scale, ProofContract)
    return msgspec.structs.replace(read, reject=reject, suspect=suspect)


def _plain(setting: Setting) -> dict[str, Any]:
    return {
        "label": setting.label,
        "contract": msgspec.to_builtins(setting.contract),
        "honest": [_plain_sample(one) for one in setting.honest],
        "cheats": [_plain_sample(one) for one in setting.cheats],
    }


def _plain_sample(sample: Sample) -> dict[str, Any]:
    outcomes = [
        [
            one.reason.value if one.reason else "",
            one.suspect,
            None if one.evidence is None else msgspec.structs.astuple(one.evidence),
        ]
        for one in sample.outcomes
    ]
    return {
        "name": sample.name,
        "seconds": [sample.generating, sample.verifying],
        "outcomes": outcomes,
    }


def _sample(plain: dict[str, Any]) -> Sample:
    outcomes = [
        Outcome(Reason(reason) if reason else None, suspect, Evidence(*seen) if seen else None)
        for reason, suspect, seen in plain["outcomes"]
    ]
    return Sample(plain["name"], outcomes, *plain["seconds"])
