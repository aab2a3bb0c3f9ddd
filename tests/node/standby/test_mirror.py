"""A trainer's backups and a standby's copy of them, without a network between."""

import os
import shutil
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest
from support.counting_backend import CountingBackend
from support.machine import fill, small_disk

from primerl.crypto.hashing import NO_DIGEST, digest
from primerl.node.errors import NetworkError, StorageError
from primerl.node.standby.mirror import Mirror
from primerl.node.storage.chunk_store import FileStore
from primerl.node.storage.ledger import Ledger
from primerl.node.storage.run_files import COPY_MARK
from primerl.node.trainer import backups
from primerl.node.trainer.backups import Backups
from primerl.node.trainer.succession import HandOver
from primerl.node.training.checkpoint import Checkpoints
from primerl.node.training.resume_points import ResumePoints
from primerl.protocol.errors import Reason, RemoteProtocolError
from primerl.protocol.manifests import ChunkRef
from primerl.protocol.messages import Backup, BackupFile, BackupWait, GetBackup

STANDBY, STRANGER = bytes(31) + b"s", bytes(31) + b"x"


class Run:
    """A trainer's directory, and a standby that fetches from its store."""

    def __init__(self, directory: Path) -> None:
        self.now = 0.0
        self.announced = 5
        self.run_dir = directory / "run"
        data_dir = self.run_dir / "trainer"
        self.ledger = Ledger(data_dir / "ledger.db", fsync=False)
        self.store = FileStore(data_dir / "chunks", max_bytes=1 << 30, fsync=False)
        folder = self.run_dir / "checkpoints"
        self.checkpoints = Checkpoints(folder, keep_last=1, fsync=False)
        self.resume_points = ResumePoints(folder, fsync=False)
        (data_dir / "key.pem").write_text("a secret")
        (self.run_dir / "config.json").write_text("{}")
        (self.run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
        self.backend = CountingBackend()
        self.backups = Backups(
            self.run_dir,
            checkpoints=self.checkpoints,
            resume_points=self.resume_points,
            ledger=self.ledger,
            store=self.store,
            hand_over=HandOver(lambda: [STANDBY]),
            announced=lambda: self.announced,
            clock=lambda: self.now,
        )
        self.own = FileStore(directory / "standby/chunks", max_bytes=1 << 30, fsync=False)
        self.mirror = Mirror(directory / "standby/run", fsync=False)
        self.asked: list[ChunkRef] = []

    async def checkpoint(self, step: int) -> None:
        """Write a checkpoint."""
        await self.checkpoints.write(step, {"buffer": b"%d" % step * 100}, self.backend)

    async def newest(self) -> Backup:
        """Return the newest backup, made now."""
        self.now += backups.LEAST_AGE_S
        reply = await self.backups.answer(STANDBY, GetBackup(NO_DIGEST))
        assert isinstance(reply, Backup)
        return reply

    async def fetch(self, chunks: Sequence[ChunkRef]) -> None:
        """Bring chunks from the trainer's store, as BlobFetcher does over a network."""
        for chunk in chunks:
            data = self.store.get(chunk.digest)
            if data is None:
                raise NetworkError("nobody has it")
            self.asked.append(chunk)
            self.own.put(data)

    async def bring(self, backup: Backup) -> None:
        """Replace the copy."""
        self.asked.clear()
        await self.mirror.bring(backup, self.own, self.fetch)


@pytest.fixture
async def run(tmp_path: Path) -> AsyncGenerator[Run]:
    made = Run(tmp_path)
    await made.backend.start(tmp_path / "model")
    yield made
    made.ledger.close()


def tree(directory: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


async def test_a_copy_has_what_a_resume_reads_and_not_the_key(run: Run) -> None:
    chunk = run.store.put(b"a chunk of a version")
    run.ledger.set("fact", b"true")
    await run.checkpoint(3)
    run.resume_points.begin(5, {"buffer": b"five"})
    await run.resume_points.finish()
    backup = await run.newest()
    await run.bring(backup)
    copy = run.mirror.directory
    assert run.mirror.step == backup.step == 5
    assert Checkpoints(copy / "checkpoints", keep_last=1).is_intact(3)
    assert ResumePoints(copy / "checkpoints").read(5).parts == {"buffer": b"five"}
    shutil.copytree(copy, copy.with_name("opened"))
    ledger = Ledger(copy.with_name("opened") / "trainer/ledger.db", fsync=False)
    assert ledger.get("fact") == b"true"
    ledger.close()
    kept = FileStore(copy / "trainer/chunks", max_bytes=1 << 20)
    assert kept.get(chunk) == b"a chunk of a version"
    assert (copy / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert (copy / COPY_MARK).exists()
    assert not list(copy.rglob("key.pem"))
    assert run.own.names() == set()


async def test_the_step_of_a_backup_is_one_whose_version_was_announced(run: Run) -> None:
    await run.checkpoint(3)
    for step in (5, 6):
        run.resume_points.begin(step, {"buffer": b"five"})
        await run.resume_points.finish()
    assert (await run.newest()).step == 5


async def test_what_did_not_change_is_not_fetched_again(run: Run) -> None:
    await run.checkpoint(3)
    run.ledger.set("large", os.urandom(3_000_000))
    await run.bring(await run.newest())
    first = sum(chunk.size for chunk in run.asked)
    run.ledger.set("fact", b"true")
    await run.bring(await run.newest())
    again = sum(chunk.size for chunk in run.asked)
    assert first > 3_000_000
    assert 0 < again < first / 4


async def test_the_ledger_of_a_backup_is_never_older_than_its_checkpoint(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.checkpoint(3)
    copy_to = Ledger.copy_to

    def later(ledger: Ledger, path: Path) -> None:
        ledger.set("submission", b"stored while the backup was made")
        copy_to(ledger, path)

    monkeypatch.setattr(Ledger, "copy_to", later)
    await run.bring(await run.newest())
    ledger = Ledger(run.mirror.directory / "trainer/ledger.db", fsync=False)
    assert ledger.get("submission") is not None
    ledger.close()


async def test_a_backup_can_be_fetched_while_the_next_one_is_there(run: Run) -> None:
    await run.checkpoint(3)
    old = await run.newest()
    await run.checkpoint(6)  # which removes the one before
    assert (await run.newest()).step == 6
    await run.bring(old)
    assert run.mirror.step == 3
    await run.checkpoint(9)
    await run.newest()
    with pytest.raises(NetworkError):
        await Run.fetch(run, [chunk for file in old.files for chunk in file.chunks])
    assert len(list((run.run_dir / "trainer/backup").iterdir())) == 2


async def test_a_standby_with_the_newest_backup_waits_and_others_are_refused(run: Run) -> None:
    with pytest.raises(RemoteProtocolError) as refused:
        await run.backups.answer(STRANGER, GetBackup(NO_DIGEST))
    assert refused.value.reason == Reason.NOT_ADMITTED
    assert isinstance(await run.backups.answer(STANDBY, GetBackup(NO_DIGEST)), BackupWait)
    await run.checkpoint(3)
    await run.bring(await run.newest())
    known = GetBackup(run.mirror.known)
    assert isinstance(await run.backups.answer(STANDBY, known), BackupWait)
    assert run.mirror.known == Mirror(run.mirror.directory, fsync=False).known


async def test_a_chunk_that_is_lent_is_kept_all_the_same_where_it_is_put(run: Run) -> None:
    await run.checkpoint(3)
    file = next(file for file in (await run.newest()).files if file.path == "config.json")
    name = run.store.put(b"{}")
    assert name == file.chunks[0].digest
    run.store.lend({})
    assert run.store.get(name) == b"{}"


async def test_a_failed_fetch_leaves_the_copy_as_it_was(run: Run) -> None:
    await run.checkpoint(3)
    await run.bring(await run.newest())
    before = tree(run.mirror.directory)
    await run.checkpoint(6)
    backup = await run.newest()
    run.store.lend({})
    with pytest.raises(NetworkError):
        await run.bring(backup)
    assert tree(run.mirror.directory) == before
    assert run.mirror.step == 3


async def test_a_damaged_copy_is_mended_by_the_next_backup(run: Run) -> None:
    await run.checkpoint(3)
    await run.bring(await run.newest())
    (run.mirror.directory / "trainer/ledger.db").write_bytes(b"something else")
    run.ledger.set("fact", b"true")
    await run.bring(await run.newest())
    ledger = Ledger(run.mirror.directory / "trainer/ledger.db", fsync=False)
    assert ledger.get("fact") == b"true"
    ledger.close()


@pytest.mark.parametrize(
    "path",
    [
        "../outside",
        "/etc/passwd",
        "trainer/key.pem",
        "trainer/control.sock",
        "trainer/../../outside",
        "checkpoints/step_1/backend/../../../x.json",
        "metrics.jsonl\n",
        "model/run.py",
    ],
)
async def test_a_trainer_cannot_write_other_files_to_a_standby(run: Run, path: str) -> None:
    data = b"not yours"
    run.store.put(data)
    backup = Backup(1, (BackupFile(path, (ChunkRef(digest(data), len(data)),)),), ())
    with pytest.raises(RemoteProtocolError) as refused:
        await run.bring(backup)
    assert refused.value.reason == Reason.MALFORMED
    assert not run.mirror.directory.exists()
    assert run.asked == []


async def test_a_file_that_is_named_twice_is_refused(run: Run) -> None:
    file = BackupFile("config.json", ())
    with pytest.raises(RemoteProtocolError):
        await run.bring(Backup(1, (file, file), ()))


async def test_a_full_disk_leaves_the_copy_as_it_was(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.checkpoint(3)
    await run.bring(await run.newest())
    before = tree(run.mirror.directory)
    await run.checkpoint(6)
    backup = await run.newest()

    async def full(chunks: Sequence[ChunkRef]) -> None:
        raise StorageError("the disk is full")

    with pytest.raises(StorageError):
        await run.mirror.bring(backup, run.own, full)
    assert tree(run.mirror.directory) == before


async def test_a_full_disk_of_the_trainer_costs_a_backup_and_keeps_no_half_of_one(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "disk", kib=4096) as disk:
        run = Run(disk)
        await run.backend.start(tmp_path / "model")
        await run.checkpoint(3)
        backup = await run.newest()
        run.ledger.set("fact", os.urandom(1 << 20))
        filling = fill(disk)
        with pytest.raises(StorageError, match=r"no backup can be made.* full"):
            await run.newest()
        assert [path.name for path in (run.run_dir / "trainer/backup").iterdir()] == ["1"]
        # until it is old enough to be made anew, the last one is given
        assert await run.backups.answer(STANDBY, GetBackup(NO_DIGEST)) == backup
        filling.unlink()
        assert await run.newest() != backup
        run.ledger.close()
