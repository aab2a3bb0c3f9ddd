from collections.abc import AsyncIterator

import pytest
from conformance.engine_factories import Case
from support.engine_cases import started

from primerl.node.inference.engine import Engine


@pytest.fixture
async def engine(case: Case) -> AsyncIterator[Engine]:
    """Of the `case` that a suite of engines has; it holds the first policy as version 0."""
    engine = case.factory.engine()
    try:
        yield await started(engine, case.model_dir, case.states[0])
    finally:
        await engine.close()
