"""Stages in child processes, without vLLM: their requests, and refused starts."""

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.engine_cases import SHAPE as MODEL
from support.engine_cases import request
from support.ring_cases import SHAPE, plan

from primerl.node.config.engine import EngineConfig
from primerl.node.errors import EngineError, UsageError
from primerl.node.inference.engine import Completion, EngineStats
from primerl.node.inference.host import EngineHost
from primerl.node.inference.host_messages import (
    ANSWERS,
    EngineDrawn,
    EngineRejoin,
    EngineRequest,
    EngineSetUp,
)
from primerl.node.inference.place import (
    HEAD_EXTENSION,
    PROGRAM_MODULE,
    STAGE_EXTENSION,
    WORKER,
    StagePlace,
    encode_place,
)
from primerl.node.models import huggingface
from primerl.node.pipeline.hosted_stage import HEAD_PROGRAM, HostedHead, HostedStage
from primerl.node.process.frames import HEAD_BYTES, MAX_FRAME, ProcessMessage, body_length
from primerl.node.process.serve import Outbox

WAIT_S = 60.0


def place(rank: int = 0, **fields: Any) -> StagePlace:
    """Make a place in a plan of two layers."""
    found = plan([bytes([one]) * 32 for one in range(2)])
    given = {"hidden_size": MODEL["hidden_size"], "kv_tokens": 4 * SHAPE.max_model_len} | fields
    shape = msgspec.structs.replace(found.shape, **given)
    return StagePlace(msgspec.structs.replace(found, shape=shape), rank, "/nowhere")


def test_the_programs_of_stages_are_where_they_are_looked_for() -> None:
    """They are named, not imported: a move of theirs would be noticed by the first pipeline alone."""
    for name in (HEAD_EXTENSION, STAGE_EXTENSION, WORKER):
        module, _, kind = name.rpartition(".")
        found = find_spec(module)
        assert found is not None
        assert f"class {kind}(" in Path(found.origin or "").read_text().replace(":", "(")
    assert HEAD_PROGRAM[3:] == (PROGRAM_MODULE, "head")
    assert find_spec(PROGRAM_MODULE) is not None


class Core:
    """An EngineCore with the methods that these tests call."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        pass

    def stats(self) -> EngineStats:
        return EngineStats(running=3)

    async def close(self) -> None:
        pass


class Head(Core):
    """Stage 0."""

    def __init__(self, config: EngineConfig, where: StagePlace) -> None:
        super().__init__(config)
        self.where = where

    async def rejoin(self, epoch: int) -> None:
        if epoch < 5:
            raise EngineError("this chain is over")


async def answers(make: Any, *requests: EngineRequest) -> list[Any]:
    """Return a host's answers to these messages, in order."""
    written: asyncio.Queue[Any] = asyncio.Queue()

    def write(data: bytes) -> None:
        """Write several frames at once."""
        while data:
            end = HEAD_BYTES + body_length(data[:HEAD_BYTES], MAX_FRAME)
            written.put_nowait(msgspec.msgpack.decode(data[HEAD_BYTES:end]))
            data = data[end:]

    host = EngineHost(Outbox(write), make, lambda: None)
    found: list[Any] = []
    try:
        for number, one in enumerate(requests, 1):
            host.take(ProcessMessage(number, one))
            async with asyncio.timeout(WAIT_S):
                while (answer := await written.get())[0] != number:
                    pass  # how busy it is
            found.append(answer)
    finally:
        await host.close()
    return found


def setup(where: bytes = b"") -> EngineSetUp:
    return EngineSetUp(EngineConfig().model_dump_json().encode(), "/model", "", where)


async def test_a_host_makes_a_stage_where_it_is_given_a_place() -> None:
    made: list[Head] = []

    def make(config: EngineConfig, where: StagePlace) -> Head:
        made.append(Head(config, where))
        return made[-1]

    found = await answers(make, setup(encode_place(place())), EngineRejoin(7), EngineRejoin(1))
    assert found[:2] == [[1, ["done"]], [2, ["done"]]]
    assert found[2] == [3, ["failed", "this chain is over", "fault"]]
    assert made[0].where == place()


async def test_a_whole_engine_has_no_chain_to_begin() -> None:
    found = await answers(Core, setup(), EngineRejoin(7))
    assert found[1][1][0] == "failed"


def test_fingerprints_of_boundaries_come_along() -> None:
    found = Completion([1, 2], [-1.0, -2.0], "stop", 3, 3, proof=b"p" * 16, boundaries=(b"a", b"b"))
    body = msgspec.msgpack.encode(ProcessMessage(4, EngineDrawn(found)))
    assert ANSWERS.decode(body) == ProcessMessage(4, EngineDrawn(found))


async def test_a_later_stage_answers_no_requests() -> None:
    stage = HostedStage(EngineConfig(type="vllm"), place(1))
    with pytest.raises(EngineError, match="only stage 0"):
        await stage.generate(request())


async def test_what_cannot_be_a_stage_does_not_start(tmp_path: Path) -> None:
    huggingface.create(tmp_path, MODEL, 0)
    head = HostedHead(EngineConfig(type="vllm", pp=2), place())
    with pytest.raises(UsageError, match=r"engine\.pp is 2"):
        await head.start(tmp_path)
    whole = msgspec.structs.replace(place().plan, stages=place().plan.stages[:1])
    stage = HostedStage(EngineConfig(type="vllm"), StagePlace(whole, 0, ""))
    with pytest.raises(EngineError, match="another model"):
        await stage.start(tmp_path)


async def test_a_head_that_was_not_started_begins_no_chain() -> None:
    head = HostedHead(EngineConfig(type="vllm"), place())
    with pytest.raises(EngineError, match="not started"):
        await head.rejoin(1)
    assert head.lanes().lanes == 0
