"""What must hold of rules and files whatever comes: heads, leaders, versions, tickets, a node's own files.

Each target reads `data` as a list of what others do, or as changes to valid bytes. It returns whether all of it
was taken, and raises AssertionError where a rule is broken. See targets.py.
"""

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
from support import weights_cases as cases
from support.protocol_cases import (
    LISTED,
    NOW,
    RUN,
    STRANGER,
    TICKET,
    TRAINER,
    USUAL_TICKET,
    WORKER,
    head,
    sealed_head,
)

from primerl.crypto.hashing import NO_DIGEST, digest
from primerl.node.environments.host import ANSWERS as ENVIRONMENT_ANSWERS
from primerl.node.environments.host import EnvironmentPong
from primerl.node.errors import StorageError
from primerl.node.inference.host_messages import ANSWERS as ENGINE_ANSWERS
from primerl.node.inference.host_messages import EngineFailed
from primerl.node.models.support import pack_support, split_support, support_fault, unpack_support
from primerl.node.process import frames
from primerl.node.storage.ledger import Ledger
from primerl.node.verification.audit_process import REPLIES as AUDIT_ANSWERS
from primerl.node.verification.audit_process import AuditError
from primerl.node.weights.chain import NOTHING, VersionChain
from primerl.node.weights.checkpoint import read_checkpoint, read_flat, write_checkpoint
from primerl.node.weights.state import NoPath, WeightsError
from primerl.protocol import tickets
from primerl.protocol.errors import RemoteProtocolError
from primerl.protocol.leaders import (
    EPOCHS_OF_PLACE,
    EPOCHS_OF_TURN,
    REMOVED,
    LeaderList,
    Leaders,
    certify,
)
from primerl.protocol.manifests import Artifact, ChunkRef, PolicyManifest
from primerl.protocol.trust import Equivocation, EquivocationProof, TrustedRun

SIGNERS = (TRAINER, STRANGER, WORKER)
MAX_ACTS = 24
FEW = 4
"""Versions, states and bases that heads and manifests are made of."""
SCRATCH = Path(
    tempfile.mkdtemp(prefix="primerl-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
)
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)


def acts(data: bytes, size: int) -> Iterator[bytes]:
    """Yield the first MAX_ACTS acts of `size` bytes each."""
    for at in range(0, min(len(data), MAX_ACTS * size) - size + 1, size):
        yield data[at : at + size]


# -- heads and leaders ---------------------------------------------------------------------------------


@functools.cache
def made_head(epoch: int, version: int, state: int, previous: int, signer: int) -> bytes:
    """Sign a head of few; `previous` is that of the state with that number one version before, or none."""
    base = NO_DIGEST
    if previous < FEW and version:
        base = digest(msgspec.msgpack.encode(plain_head(epoch, version - 1, previous)))
    what = head(version, term=epoch, previous=base, state=digest(b"state %d" % state))
    return sealed_head(what, SIGNERS[signer])


def plain_head(epoch: int, version: int, state: int) -> msgspec.Struct:
    """Return a head without a base."""
    return head(version, term=epoch, previous=NO_DIGEST, state=digest(b"state %d" % state))


@functools.cache
def made_list(number: int, second: int, third: int, signer: int) -> bytes:
    """Sign a list of leaders of few."""
    keys = (REMOVED, *(key.node_id for key in SIGNERS))
    listed = LeaderList(number, (TRAINER.node_id, keys[second], keys[third]), LISTED.lease_s)
    return certify(SIGNERS[signer], RUN, listed)


def epoch_of(number: int) -> int:
    """Return one of few epochs, of the first three places."""
    return number // 6 % 2 * EPOCHS_OF_TURN + number % 3 * EPOCHS_OF_PLACE + number // 3 % 2


def heads(data: bytes) -> bool:
    """Heads, leader lists and proofs from anybody: never back, never two of one version, never a stranger's."""
    run, taken = TrustedRun(RUN, TRAINER.node_id), 0
    for what, one, two, three in acts(data, 4):
        before, committed, listed = dict(run.heads), run.committed, run.leaders.listed
        try:
            if what % 8 == 0:
                run.admit_leaders(made_list(1 + one % FEW, two % 4, three % 4, what // 8 % 3))
            elif what % 8 == 1 and run.heads:
                run.commit(run.heads[sorted(run.heads)[one % len(run.heads)]])
            elif what % 8 == 2:
                contradict(run, one, two, three)
            else:
                place = epoch_of(one), two % FEW, what // 8 % FEW, three % (FEW + 1), three // 8 % 3
                run.admit(made_head(*place), now=NOW)
            taken += 1
        except Equivocation as error:
            check_contradiction(error.proof)
            assert run.heads == before
        except RemoteProtocolError:
            assert (run.heads, run.leaders.listed) == (before, listed)
        check_run(run, committed, listed)
    return taken > 0


def contradict(run: TrustedRun, one: int, two: int, three: int) -> None:
    """Show two heads as a proof."""
    first = made_head(epoch_of(one), two % FEW, three % FEW, FEW, one // 16 % 3)
    second = made_head(epoch_of(one), two // 16 % FEW, three // 16 % FEW, FEW, one // 16 % 3)
    run.check_proof(EquivocationProof(first, second))


def check_contradiction(proof: EquivocationProof) -> None:
    """Two heads of one version by one key are different."""
    first, second = (msgspec.msgpack.decode(it) for it in (proof.first, proof.second))
    assert first[3] == second[3], "of two keys"
    one, two = (msgspec.msgpack.decode(it[7]) for it in (first, second))
    assert (one["term"], one["version"]) == (two["term"], two["version"])
    assert one != two


def check_run(run: TrustedRun, committed: tuple[int, int], listed: LeaderList | None) -> None:
    """What a node believes is in order."""
    assert run.committed >= committed
    if listed is not None:
        now = run.leaders.listed
        assert now is not None
        assert now.number >= listed.number
        for old, new in zip(listed.leaders, now.leaders, strict=False):
            assert new in (old, REMOVED), "a place went to another key"
    for (epoch, version), admitted in run.heads.items():
        run.leaders.check_epoch(admitted.signer, epoch)
        after = run.heads.get((epoch, version + 1))
        assert after is None or after.head.previous in (admitted.digest, NO_DIGEST)


def leaders(data: bytes) -> bool:
    """Lists of leaders by the bytes of their places: an epoch belongs to one key for ever."""
    known, owners, taken = Leaders(RUN, TRAINER.node_id), dict[int, bytes](), 0
    for number, second, third, signer in acts(data, 4):
        try:
            taken += known.admit(made_list(1 + number % 16, second % 4, third % 4, signer % 3))
        except RemoteProtocolError:
            pass
        for key in SIGNERS:
            if key.node_id not in known:
                continue
            epoch = known.next_epoch(key.node_id, epoch_of(number))
            assert epoch > epoch_of(number)
            known.check_epoch(key.node_id, epoch)
            place = epoch % EPOCHS_OF_TURN // EPOCHS_OF_PLACE
            assert owners.setdefault(place, key.node_id) == key.node_id
    return taken > 0


# -- versions ------------------------------------------------------------------------------------------


def state_of(number: int) -> bytes:
    """Return the digest of one of few states."""
    return digest(b"fuzzed state %d" % (number % FEW))


def chain(data: bytes) -> bool:
    """Manifests of any bases, in any order: each plan leads from what a node has to its target."""
    versions, taken = VersionChain(), 0
    for what, one, two, three in acts(data, 4):
        version = one % 12
        if what % 8 == 0:
            versions.rewind(version)
        elif what % 8 == 1 and versions.newest != NOTHING:
            reachable = [v for v in range(12) if versions.is_reachable(v)]
            keep = 1 + one % FEW
            kept = sorted(v for v in range(12) if versions.get(v))[-keep:]
            versions.forget(keep)
            assert all(versions.is_reachable(v) for v in reachable if v in kept)
        elif what % 8 == 2:
            taken += planned(versions, one % 13 - 1, state_of(two), three % 12)
        else:
            artifacts = (delta(version, two), snapshot(three))[what // 8 % 2 :: 1 + what // 16 % 2]
            try:
                versions.add(PolicyManifest(RUN, version, state_of(what // 32), (), artifacts))
            except WeightsError:
                assert versions.get(version) is not None
    return taken > 0


def delta(version: int, number: int) -> Artifact:
    """Make a delta on any version and state."""
    chunk = ChunkRef(digest(bytes([number])), 1 + number)
    return Artifact("delta", number % 12, state_of(number // 16), "xor", 1 + number, (chunk,))


def snapshot(number: int) -> Artifact:
    """Make a snapshot, of its manifest's version or of an earlier one."""
    chunk = ChunkRef(digest(bytes([255, number])), 1 + number)
    return Artifact("anchor", NOTHING, NO_DIGEST, "xor", 1 + number, (chunk,))


def planned(versions: VersionChain, have: int, state: bytes, target: int) -> bool:
    """Plan, and check the plan; return whether there is one."""
    try:
        steps = versions.plan(have, state, target)
    except NoPath:
        return False
    at = (have, state)
    for version, artifact in steps:
        manifest = versions.get(version)
        assert manifest is not None
        assert artifact in manifest.artifacts
        if artifact.kind == "delta":
            assert (artifact.base_version, artifact.base_state) == at, "a delta on another state"
        at = (version, manifest.state)
    last = versions.get(target)
    assert last is not None
    assert at == (target, last.state)
    return True


# -- tickets, supports, what child processes say -------------------------------------------------------


def ticket(data: bytes) -> bool:
    """The text of a ticket: one text for one ticket, or RemoteProtocolError."""
    text = data.decode("latin-1")
    try:
        sealed = tickets.sealed_bytes(text)
    except RemoteProtocolError:
        return False
    assert "".join(text.split()) in (tickets.text_of(sealed), *whole_text(sealed))
    try:
        tickets.check(sealed, now=NOW)
    except RemoteProtocolError:
        return False
    return sealed in TICKETS


def whole_text(sealed: bytes) -> tuple[str, ...]:
    """Return the unpacked text of a ticket."""
    import base64

    return (tickets.WHOLE + base64.urlsafe_b64encode(sealed).rstrip(b"=").decode(),)


TEXTS = tuple(tickets.issue(TRAINER, it) for it in (TICKET, USUAL_TICKET))
TICKETS = tuple(tickets.sealed_bytes(text) for text in TEXTS)
"""All that the key has signed: any other that passes is a forgery."""


def support(data: bytes) -> bool:
    """Supports of a few tokens: a reason to refuse them, or the same bytes again."""
    if len(data) < 2:
        return False
    tokens = [number % 40 for number in range(data[0] % 9)]
    top_k, top_p = data[1] % 8, 1.0 if data[1] & 128 else 0.5
    stated = data[2:]
    if support_fault(stated, tokens, 40, top_k, top_p):
        return False
    rows = unpack_support(stated, tokens)
    assert sum(map(len, split_support(stated, len(tokens)))) == len(stated)
    assert pack_support(rows, tokens) == stated
    return True


CHILDREN = (ENGINE_ANSWERS, ENVIRONMENT_ANSWERS, AUDIT_ANSWERS)


def child(data: bytes) -> bool:
    """A frame of a child process: a message of its kind that is the same when said again, or DecodeError."""
    if len(data) < 1 + frames.HEAD_BYTES:
        return False
    decoder = CHILDREN[data[0] % len(CHILDREN)]
    try:
        size = frames.body_length(data[1 : 1 + frames.HEAD_BYTES], 1 << 16)
        message = decoder.decode(data[1 + frames.HEAD_BYTES :][:size])
    except (ValueError, msgspec.MsgspecError, RecursionError):
        return False
    again = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.encode(decoder.decode(again)) == again
    return True


# -- files ---------------------------------------------------------------------------------------------

STATE = {
    "a": cases.bf16(1, 2, 3),
    "b": cases.tensor("F32", (2, 2), bytes(16)),
    "empty": cases.tensor("F16", (0, 4), b""),
}


def checkpoint(data: bytes) -> bool:
    """A safetensors file: tensors that are the same when written again, or StorageError, by either reader."""
    path = SCRATCH / "model.safetensors"
    path.write_bytes(data)
    into = np.zeros(len(data), np.uint8)
    try:
        state = read_checkpoint(path)
    except StorageError:
        try:
            read_flat(path, into)
        except StorageError:
            return False
        raise AssertionError("one reader takes what the other refuses") from None
    for name, (dtype, shape, part) in read_flat(path, into).items():
        assert (dtype, shape) == (state[name].dtype, state[name].shape)
        assert into[part].tobytes() == state[name].data.tobytes()
    try:
        write_checkpoint(path, state)
    except StorageError:
        return False  # names that are no header's
    assert cases.same(read_checkpoint(path), state)
    return True


COMMITS = 6


@functools.cache
def kept_files() -> dict[str, bytes]:
    """Return the files of a ledger that was killed, and those of one that ended in order."""
    kept: dict[str, bytes] = {}
    for name in ("killed", "ended"):
        directory = SCRATCH / name
        ledger = Ledger(directory / "ledger.db", fsync=False)
        ledger.count_boot()
        for number in range(COMMITS):
            ledger.set("number", bytes([number]))
        if name == "killed":
            kept |= {f"killed/{it.name}": it.read_bytes() for it in directory.iterdir()}
        ledger.close()
        if name == "ended":
            kept |= {f"ended/{it.name}": it.read_bytes() for it in directory.iterdir()}
    return kept


def ledger(data: bytes) -> bool:
    """Changed bytes in a ledger's files: refused, or nothing is missing but the last commit of a killed node.

    Two are missing if the mark that ends the one before it was changed: the two look like one that was cut.
    Nobody can say what changed bytes in the database of a killed node mean, nor what is missing from a log that
    was cut; a file without a byte is a new ledger, which a checkpoint does not know; a changed number of starts
    looks like the work of a release that makes no checksums.
    """
    if len(data) < 6:
        return False
    ended, of_log = bool(data[0] & 1), not data[0] & 3
    directory = SCRATCH / "changed"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    names = {it: it.split("/")[1] for it in kept_files() if it.startswith("ended") == ended}
    changed = moved = empty = False
    for it, name in names.items():
        if name.endswith(("-shm", ".lock")):
            continue
        content = bytearray(kept_files()[it])
        if ended or name.endswith("-wal") == of_log:
            changed |= change(content, data[1:])
            moved |= len(content) != len(kept_files()[it])
            empty |= not content
        (directory / name).write_bytes(content)
    try:
        opened = Ledger(directory / "ledger.db", fsync=False)
    except StorageError:
        return False
    try:
        number = (opened.get("number") or b"\xff")[0]
        if ended and changed and not empty and opened.boots() == 1:
            raise AssertionError("changed bytes were believed")
        if of_log and not moved:
            assert COMMITS - 3 <= number < COMMITS, f"{number} is the last of {COMMITS}"
    finally:
        opened.close()
    return True


def change(content: bytearray, edits: bytes) -> bool:
    """Change, cut or double bytes of a file; return whether any but SQLite's bytes for others is different.

    There (60 to 72) is the checksum, and whether an older release wrote the file after it.
    """
    before = bytes(content)
    for how, high, middle, low, value in acts(edits, 5):
        at = int.from_bytes((high, middle, low), "big") % max(len(content), 1)
        if how % 16 == 15:
            del content[at:]
        elif how % 16 == 14:
            content[at:at] = content[at : at + 16 * value]
        elif content:
            content[at] ^= value
    return bytes(content[:60] + content[72:]) != before[:60] + before[72:]


TARGETS: tuple[Callable[[bytes], bool], ...] = (
    heads,
    leaders,
    chain,
    ticket,
    support,
    child,
    checkpoint,
    ledger,
)


def seeds() -> list[tuple[Callable[[bytes], bool], bytes]]:
    """Return valid inputs of every target."""
    path = SCRATCH / "seed.safetensors"
    write_checkpoint(path, STATE, metadata={"format": "pt"})
    draws = np.array([[5, 7, -1], [6, -1, -1]], np.int32)
    said: list[tuple[Callable[[bytes], bool], bytes]] = [
        (heads, bytes((3, 0, 0, 4, 3, 0, 1, 0, 1, 1, 0, 0, 11, 0, 1, 0))),
        (heads, bytes((0, 0, 2, 3, 3, 1, 0, 12, 2, 16, 0, 16, 0, 1, 0, 3, 3, 7, 1, 12))),
        (leaders, bytes((0, 2, 3, 0, 1, 0, 3, 0, 2, 0, 0, 0))),
        (chain, bytes((3, 0, 0, 9, 3 + 32, 1, 0, 9, 2, 0, 0, 1, 1, 1, 0, 0, 0, 1, 0, 0))),
        (checkpoint, path.read_bytes()),
        (support, bytes((2, 3)) + pack_support(draws, [0, 1])),
        (ledger, bytes((0, 0, 0, 0, 0, 0))),
        (ledger, bytes((1, 0, 0, 0, 0, 0))),
        (ledger, bytes((2, 0, 0, 0, 0, 0))),
        (ledger, bytes((0, 0, 0, 0, 40, 0))),
    ]
    said += [(ticket, text.encode()) for text in TEXTS]
    said += [(ticket, it.encode()) for sealed in TICKETS for it in whole_text(sealed)]
    answers = (
        EngineFailed("out of memory", "engine"),
        EnvironmentPong("plays 3"),
        AuditError("no", False),
    )
    for number, answer in enumerate(answers):
        framed = frames.frame(frames.ProcessMessage(1, answer), 1 << 16)
        said.append((child, bytes([number]) + framed))
    return said
