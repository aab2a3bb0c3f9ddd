"""One vLLM for all tests of a file; it is started when the first of them asks."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.vllm_cases import CONFIG, Case, make_case

from primerl.node.inference.hosted import HostedEngine


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
