"""`primerl-node explain FILE`: a learner's proof that the trainer merged wrongly."""

import json
from pathlib import Path

import msgspec
from support.protocol_cases import OUTER_STEP, RUN, TRAINER, WORKER, sealed

from primerl.crypto.hashing import digest
from primerl.protocol.contributions import WrongMerge
from primerl.protocol.envelope import Purpose

from .conftest import Cli


def proof(directory: Path, **changes: bytes) -> Path:
    """Write a proof."""
    path = directory / "wrong_merge.msgpack"
    step = changes.get("step", sealed(Purpose.OUTER_STEP))
    found = WrongMerge(step, digest(b"what follows"), "version 8 is another")
    path.write_bytes(msgspec.msgpack.encode(found))
    return path


def test_a_proof_names_who_signed_what_and_whose_contributions_it_should_be(
    tmp_path: Path, cli: Cli
) -> None:
    path = proof(tmp_path)
    out = cli("explain", str(path)).out
    assert "version 8 of epoch 1 was merged wrongly" in out
    for shown in (
        TRAINER.node_id.hex(),
        RUN.hex(),
        OUTER_STEP.after.hex(),
        WORKER.node_id.hex()[:10],
    ):
        assert shown in out
    told = json.loads(cli("explain", str(path), "--json").out)
    assert told["computed"] == digest(b"what follows").hex()
    assert told["contributions"][0]["node"] == WORKER.node_id.hex()


def test_a_file_that_is_no_proof_or_was_forged_is_refused_in_one_line(
    tmp_path: Path, cli: Cli
) -> None:
    step = sealed(Purpose.OUTER_STEP)
    forged = proof(tmp_path, step=step[:-1] + bytes([step[-1] ^ 1]))
    cli("explain", str(forged)).refused(2, "proves nothing")
    other = tmp_path / "other"
    other.write_bytes(b"no proof")
    cli("explain", str(other)).refused(2, "proves nothing")
