"""The base model of a run with adapters: how its weights become chunks, and how they come to a node.

Workers need nothing but the ticket: the run's manifest names a table, the table names tensors and chunks, and
nothing is written before all of it was proved.
"""

import os
from pathlib import Path

import msgspec

from ...crypto.hashing import NO_DIGEST, short
from ...protocol.errors import Reason, RemoteProtocolError
from ...protocol.manifests import (
    AdapterContract,
    ChunkRef,
    PolicyManifest,
    RunManifest,
    check_sizes,
    encode,
)
from ...protocol.version import MAX_CHUNK
from ..config.training import LoraConfig
from ..errors import BAD_FILE, EngineError
from ..storage.chunk_store import Store, read_chunk
from ..weights.adapters import adapter_shapes
from ..weights.artifacts import store_artifact
from ..weights.checkpoint import write_checkpoint
from ..weights.codec import encode_full
from ..weights.replica import WeightReplica, prove, tensor_table
from ..weights.state import WeightsError

FILE = "model.safetensors"
MAX_THREADS = 16


def publish(config: LoraConfig, store: Store, model_dir: Path) -> tuple[bytes, AdapterContract]:
    """Put the weights of a model, in bf16, into the store: their state digest, and how workers find them.

    Raises EngineError if the model cannot have these adapters, StorageError.
    """
    from . import huggingface

    # as an engine names and a policy holds them: files may repeat tied weights, or have others than the model
    model = huggingface.load_model(model_dir, dtype="bfloat16")
    state = huggingface.policy_state(model, view=True)
    adapter_shapes({name: tensor.shape for name, tensor in state.items()}, config)
    policy = prove(0, state, threads=_threads())
    snapshot = store_artifact(store, encode_full(state, threads=_threads()))
    table = PolicyManifest(NO_DIGEST, 0, policy.digest, tensor_table(policy), (snapshot,))
    document = check_sizes(encode(table), MAX_CHUNK)
    return policy.digest, AdapterContract(
        rank=config.rank,
        alpha=config.alpha,
        target_modules=config.target_modules,
        base=ChunkRef(store.put(document), len(document)),
    )


def read_table(run: RunManifest, store: Store) -> PolicyManifest:
    """Read the table of the base of `run`; allocates none of its tensors.

    Raises:
        RemoteProtocolError: it is no such table, or its tensors cannot have the run's adapters.
        LostChunk: it is not in the store.
    """
    assert run.adapters is not None
    document = read_chunk(store, run.adapters.base.digest)
    try:
        table = msgspec.msgpack.decode(document, type=PolicyManifest)
        adapter_shapes({tensor.name: tensor.shape for tensor in table.tensors}, run.adapters)
    except (*BAD_FILE, EngineError) as error:
        raise RemoteProtocolError(Reason.MALFORMED, f"the base model: {error}") from error
    kinds = [artifact.kind for artifact in table.artifacts]
    if table.state != run.model.base_state or kinds != ["anchor"]:
        raise RemoteProtocolError(
            Reason.MALFORMED,
            f"the base model is to be {short(run.model.base_state)}, its table is of "
            f"{short(table.state)} in {', '.join(kinds)}",
        )
    return table


def chunks(run: RunManifest, store: Store) -> list[ChunkRef]:
    """List all chunks of the base of `run`, its table first; none without adapters. Raises as read_table()."""
    if run.adapters is None:
        return []
    return [run.adapters.base, *read_table(run, store).artifacts[0].chunks]


def write(run: RunManifest, store: Store, directory: Path) -> None:
    """Write the base of `run`, if it has one, as safetensors beside the model's files in `directory`.

    Everything is hashed on the way. Raises as read_table(), and RemoteProtocolError for a base that is not
    what its table says.
    """
    if run.adapters is None:
        return
    table = read_table(run, store)
    payload = (read_chunk(store, chunk.digest) for chunk in table.artifacts[0].chunks)
    try:
        base = WeightReplica(threads=_threads()).prepare(table, table.artifacts[0], payload).policy
    except WeightsError as error:
        raise RemoteProtocolError(Reason.MALFORMED, f"the base model: {error}") from error
    write_checkpoint(directory / FILE, base.state, metadata={"format": "pt"})


def _threads() -> int:
    return min(MAX_THREADS, os.cpu_count() or 1)
