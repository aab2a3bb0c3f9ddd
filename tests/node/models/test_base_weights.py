"""The base of a run with adapters: from a trainer's model directory to a worker's; what a worker refuses."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.memory_store import MemoryStore
from support.protocol_cases import ADAPTED
from support.training_cases import make_model

from primerl.crypto.hashing import NO_DIGEST, digest
from primerl.node.config.training import LoraConfig
from primerl.node.errors import EngineError, StorageError
from primerl.node.models import base_weights, huggingface
from primerl.node.models.model_files import base_layout, read_base
from primerl.node.weights.state import digests, state_digest
from primerl.node.weights.state_history import layout
from primerl.protocol.errors import RemoteProtocolError
from primerl.protocol.manifests import ChunkRef, PolicyManifest, RunManifest, TensorInfo, encode

CONFIG = LoraConfig(rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def published(model_dir: Path) -> tuple[RunManifest, MemoryStore]:
    store = MemoryStore(max_bytes=2**30)
    state, contract = base_weights.publish(CONFIG, store, model_dir)
    model = msgspec.structs.replace(ADAPTED.model, base_state=state)
    return msgspec.structs.replace(ADAPTED, model=model, adapters=contract), store


def with_table(run: RunManifest, store: MemoryStore, **changes: Any) -> RunManifest:
    """The run with another table of its base."""
    table = msgspec.structs.replace(base_weights.read_table(run, store), **changes)
    return named(run, store, encode(table))


def named(run: RunManifest, store: MemoryStore, document: bytes) -> RunManifest:
    reference = ChunkRef(store.put(document), len(document))
    adapters = msgspec.structs.replace(run.adapters, base=reference)  # type: ignore[arg-type]
    return msgspec.structs.replace(run, adapters=adapters)


def test_a_worker_gets_the_weights_that_the_trainer_has(model_dir: Path, tmp_path: Path) -> None:
    run, store = published(model_dir)
    state = huggingface.policy_state(huggingface.load_model(model_dir))
    assert run.model.base_state == state_digest(digests(state))
    base_weights.write(run, store, tmp_path)
    assert digests(read_base(tmp_path, run.model.base_state)) == digests(state)
    assert run.adapters is not None
    assert (run.adapters.rank, run.adapters.alpha) == (4, 8.0)


def test_the_layout_of_a_base_is_given_out_once_its_weights_are_checked(
    model_dir: Path, tmp_path: Path
) -> None:
    run, store = published(model_dir)
    base_weights.write(run, store, tmp_path)
    state = read_base(tmp_path, run.model.base_state)
    assert base_layout(tmp_path, run.model.base_state) == layout(state)
    with pytest.raises(EngineError, match=r"have digest \w+, but the run needs"):
        base_layout(tmp_path, bytes(32))


def test_every_chunk_of_the_base_is_named(model_dir: Path) -> None:
    run, store = published(model_dir)
    found = {chunk.digest for chunk in base_weights.chunks(run, store)}
    assert found == set(store.names())
    whole = msgspec.structs.replace(run, adapters=None)
    assert base_weights.chunks(whole, store) == []


def test_a_missing_chunk_is_named(model_dir: Path, tmp_path: Path) -> None:
    run, store = published(model_dir)
    store.delete(base_weights.chunks(run, store)[-1].digest)
    with pytest.raises(StorageError, match="lost"):
        base_weights.write(run, store, tmp_path)
    assert list(tmp_path.iterdir()) == []
    store.delete(base_weights.chunks(run, store)[0].digest)
    with pytest.raises(StorageError, match="lost"):
        base_weights.read_table(run, store)


def test_a_model_that_cannot_have_the_adapters_is_refused_before_a_run_begins(
    model_dir: Path,
) -> None:
    wrong = CONFIG.model_copy(update={"target_modules": ("qkv_proj",)})
    with pytest.raises(EngineError, match="no layers qkv_proj"):
        base_weights.publish(wrong, MemoryStore(max_bytes=2**30), model_dir)


def test_tables_that_make_no_sense_are_refused_unread(model_dir: Path) -> None:
    run, store = published(model_dir)
    table = base_weights.read_table(run, store)
    snapshot = table.artifacts[0]
    delta = msgspec.structs.replace(snapshot, kind="delta")
    for wrong in (
        named(run, store, b"nonsense"),
        named(run, store, encode(ADAPTED)),
        with_table(run, store, state=digest(b"other")),
        with_table(run, store, artifacts=(delta,)),
        with_table(run, store, artifacts=(snapshot, snapshot)),
        with_table(run, store, tensors=table.tensors[:2]),
    ):
        with pytest.raises(RemoteProtocolError, match="the base model"):
            base_weights.read_table(wrong, store)


def test_tensors_beyond_all_bounds_are_refused_before_they_are_allocated(
    model_dir: Path, tmp_path: Path
) -> None:
    run, store = published(model_dir)
    table: PolicyManifest = base_weights.read_table(run, store)
    huge = TensorInfo("huge.weight", "BF16", (2**40, 2**40), NO_DIGEST)
    with pytest.raises(RemoteProtocolError, match="out of bounds"):
        base_weights.write(with_table(run, store, tensors=(*table.tensors, huge)), store, tmp_path)


def test_a_base_that_is_not_what_its_table_says_is_never_written(
    model_dir: Path, tmp_path: Path
) -> None:
    run, store = published(model_dir)
    table = base_weights.read_table(run, store)
    first, *others = table.tensors
    wrong = msgspec.structs.replace(first, digest=digest(b"other"))
    with pytest.raises(RemoteProtocolError, match="the manifest says"):
        base_weights.write(with_table(run, store, tensors=(wrong, *others)), store, tmp_path)
    assert list(tmp_path.iterdir()) == []
