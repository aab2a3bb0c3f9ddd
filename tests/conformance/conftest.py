"""One engine of each kind for all tests of engines: vLLM takes its time to start."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from conformance.engine_factories import PARAMS, Case, make_case
from support.engine_cases import started

from primerl.node.inference.engine import Engine


@pytest.fixture(scope="session", params=PARAMS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Each engine in turn, with a model and two policies for it."""
    return make_case(request.param, tmp_path_factory)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared(case: Case) -> AsyncIterator[Engine]:
    """Started once for all tests of a case."""
    engine = case.factory.engine()
    try:
        yield await started(engine, case.model_dir)
    finally:
        await engine.close()


@pytest_asyncio.fixture(loop_scope="session")
async def engine(shared: Engine, case: Case) -> Engine:
    """Holds the first policy as version 0, whatever it held before. No test closes it."""
    await shared.load(0, case.states[0])
    return shared
