"""How a learner trains is the run's, where it does its own; code and files of the trainer are neither."""

import pytest

from primerl.node.config.training import ComputeConfig, FsdpConfig, LossConfig, TrainingConfig
from primerl.node.errors import EngineError
from primerl.node.training.backend import SampleTerms
from primerl.node.training.rounds import LearnerSettings


def settings(**changes: object) -> LearnerSettings:
    """Settings of a run."""
    training = TrainingConfig(lr=3e-6, device="cuda:3", fsdp=FsdpConfig(ranks=4))
    training = training.model_copy(update=changes)
    return LearnerSettings(training.model_dump_json(), 100, 0, 1.0)


def test_a_learner_computes_where_it_says_and_trains_as_the_run_says() -> None:
    config = settings().config(ComputeConfig(device="cpu", threads=1))
    assert (config.device, config.threads, config.fsdp.ranks) == ("cpu", 1, 0)
    assert config.lr == 3e-6


@pytest.mark.parametrize(
    "loss",
    [
        LossConfig(type="custom", custom="somewhere.of_theirs:loss"),
        LossConfig(type="reverse_kl", reference="/etc"),
    ],
    ids=["code", "a file"],
)
def test_a_loss_that_is_code_or_reads_files_is_refused(loss: LossConfig) -> None:
    with pytest.raises(EngineError, match="no learner does"):
        settings(loss=loss).config(ComputeConfig())
    terms = {"one": SampleTerms(1.0, loss.model_dump_json())}
    own = LearnerSettings(settings().training, 100, 0, 1.0, terms)
    with pytest.raises(EngineError, match="no learner does"):
        own.config(ComputeConfig())


def test_settings_of_a_later_release_are_an_error_in_words() -> None:
    unknown = LearnerSettings('{"not_yet": 1}', 100, 0, 1.0)
    with pytest.raises(EngineError, match="of another release"):
        unknown.config(ComputeConfig())
