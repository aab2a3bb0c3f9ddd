from pathlib import Path

import pytest
from support.training_cases import MIXTURE, make_model

from primerl.node.models import huggingface


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("experts")
    huggingface.create(directory, MIXTURE, 7)
    return directory
