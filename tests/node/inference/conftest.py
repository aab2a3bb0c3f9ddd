"""Models, and one vLLM for all tests of a file; each is made when the first of them asks."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from support.engine_cases import make_llama, make_qwen3
from support.vllm_cases import CONFIG, Case, make_case

from primerl.node.inference.hosted import HostedEngine
from primerl.node.weights.state import State


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("tied")
    return directory, make_qwen3(directory, 3)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    directory = tmp_path_factory.mktemp("llama")
    return directory, make_llama(directory, 5)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(case: Case) -> AsyncIterator[HostedEngine]:
    """Each test loads what it needs."""
    engine = HostedEngine(CONFIG)
    try:
        await engine.start(case.model_dir)
        yield engine
    finally:
        await engine.close()
