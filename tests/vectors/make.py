"""Golden bytes of all that is signed or framed: `cd tests && python -m vectors.make` writes them.

wire_N.json has those of wire version N. Run it by hand, and only together with a new line in
protocol/version.py: other nodes speak these bytes. When WIRE_VERSION rises to N + 1 it writes a file of that
number, and wire_N.json, which stays as it is, has what the release before says. The tests read the files of all
versions that this release speaks; a file goes when OLDEST_WIRE_VERSION passes its number.
"""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
from support import protocol_cases as cases
from support import weights_cases

from primerl.crypto.hashing import derive, digest
from primerl.node.weights.codec import encode_delta, encode_full
from primerl.node.weights.state import Tensor, digests, state_digest
from primerl.protocol import tickets
from primerl.protocol.envelope import Purpose
from primerl.protocol.leases import sample_seed
from primerl.protocol.manifests import encode, run_id
from primerl.protocol.retirement import retire
from primerl.protocol.session import frame
from primerl.protocol.version import ALPN_BLOBS, ALPN_CONTROL, ALPN_PIPELINE, WIRE_VERSION

FOLDER = Path(__file__).parent


def file_of(version: int) -> Path:
    """The golden bytes of a wire version."""
    return FOLDER / f"wire_{version}.json"


STATES: dict[str, dict[str, Tensor]] = {
    "empty": {},
    "one": {"w": Tensor("BF16", (2, 2), np.array([0, 0x8000, 0x7FC0, 0x3F80], "<u2"))},
    "two": {
        "b": Tensor("F32", (), np.array([0x80000000], "<u4")),
        "a": Tensor("I64", (0, 3), np.array([], "<u8")),
    },
}
"""State by name: -0.0, NaN, a scalar, an empty tensor, and names out of order."""

SEEDS = [
    (task, index, turn) for task in (b"task 11", b"task 12") for index in (0, 1) for turn in (0, 1)
]


def samples() -> dict[str, int]:
    """The sampling seed of each (task, index, turn) of SEEDS under the example lease."""
    return {
        f"{task.decode()} / {index} / {turn}": sample_seed(
            cases.RUN, cases.LEASE, cases.WORKER.node_id, digest(task), index, turn
        )
        for task, index, turn in SEEDS
    }


def whole(sealed: bytes) -> str:
    """A ticket as text that leaves nothing out."""
    return tickets.WHOLE + base64.urlsafe_b64encode(sealed).rstrip(b"=").decode()


def build() -> dict[str, Any]:
    """What today's code says of the fixed documents in protocol_cases."""
    return {
        "wire_version": WIRE_VERSION,
        "alpns": [ALPN_CONTROL.decode(), ALPN_BLOBS.decode(), ALPN_PIPELINE.decode()],
        "keys": {
            name: {"seed": key.seed().hex(), "node_id": key.node_id.hex()}
            for name, key in (("trainer", cases.TRAINER), ("worker", cases.WORKER))
        },
        "digest": {"": digest(b"").hex(), "primerl": digest(b"primerl").hex()},
        "derive": {"test / a / bc": derive("test", b"a", b"bc").hex()},
        "run_manifest": encode(cases.MANIFEST).hex(),
        "run_id": run_id(encode(cases.MANIFEST)).hex(),
        "mixed_run_manifest": encode(cases.MIXED).hex(),
        "narrowed_run_manifest": encode(cases.NARROWED).hex(),
        "mixed_lease": encode(cases.MIXED_LEASE).hex(),
        "prompted_lease": encode(cases.PROMPTED_LEASE).hex(),
        "adapted_run_manifest": encode(cases.ADAPTED).hex(),
        "routed_branch": encode(cases.ROUTED_BRANCH).hex(),
        "supported_branch": encode(cases.SUPPORTED_BRANCH).hex(),
        "named_peer_record": encode(cases.NAMED_RECORD).hex(),
        "rotation": retire(cases.WORKER, cases.NOW, cases.NEW_KEY).hex(),
        "policy_manifest": encode(cases.POLICY_MANIFEST).hex(),
        "located_policy_manifest": encode(cases.LOCATED).hex(),
        "policy_manifest_with_earlier": encode(cases.WITH_EARLIER).hex(),
        "split_submission": encode(cases.SPLIT_SUBMISSION).hex(),
        "split_verdict": encode(cases.SPLIT_VERDICT).hex(),
        "split_report": encode(cases.SPLIT_REPORT).hex(),
        "quantized_run_manifest": encode(cases.QUANTIZED).hex(),
        "measured_run_manifest": encode(cases.MEASURED).hex(),
        "classed_submission": encode(cases.CLASSED_SUBMISSION).hex(),
        "classed_verdict": encode(cases.CLASSED_VERDICT).hex(),
        "ticket": tickets.issue(cases.TRAINER, cases.TICKET),
        "usual_ticket": tickets.issue(cases.TRAINER, cases.USUAL_TICKET),
        "whole_ticket": whole(cases.sealed(Purpose.TICKET)),
        "envelopes": {purpose.value: cases.sealed(purpose).hex() for purpose in cases.ENVELOPES},
        "frames": {type(one).__name__: frame(one).hex() for one in cases.MESSAGES},
        "frames_with_successors": {type(one).__name__: frame(one).hex() for one in cases.LED},
        "frame_of_a_trial": frame(cases.TRIED).hex(),
        "sample_seeds": samples(),
        "states": {name: state_digest(digests(state)).hex() for name, state in STATES.items()},
    }


def payloads() -> dict[str, bytes]:
    """Weight payloads by file name. zstd may code them otherwise in another version, never less readably."""
    base, new = weights_cases.golden_pair()
    return {
        "weights_full.bin": b"".join(encode_full(new)),
        "weights_delta.bin": b"".join(encode_delta(base, new)),
    }


def main() -> None:
    """Write the files."""
    file = file_of(WIRE_VERSION)
    file.write_text(json.dumps(build(), indent=1) + "\n")
    print(f"wrote {file}")
    for name, payload in payloads().items():
        (FOLDER / name).write_bytes(payload)
        print(f"wrote {FOLDER / name}, {len(payload)} B")


if __name__ == "__main__":
    main()
