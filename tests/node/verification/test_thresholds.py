import msgspec
import pytest
from pydantic import ValidationError
from support.protocol_cases import PROOFS

from primerl.node.config.run import RunConfig
from primerl.node.verification.auditor import MEASURES
from primerl.node.verification.bounds import BUILT_IN, proof_contract
from primerl.node.verification.judge import REASONS, judge
from primerl.protocol.rollouts import Evidence


def config(fingerprint: str, dtype: str) -> RunConfig:
    return RunConfig.model_validate(
        {"verification": {"fingerprint": fingerprint}, "engine": {"dtype": dtype}}
    )


def test_what_is_suspect_comes_before_what_is_rejected() -> None:
    for reject, suspect in BUILT_IN.values():
        assert all(getattr(suspect, name) < getattr(reject, name) for name in MEASURES)


def test_built_in_bounds_say_that_no_sample_is_behind_them() -> None:
    contract = proof_contract(config("projection", "bfloat16"), "")
    assert (contract.honest_rollouts, contract.source) == (0, "built in for bfloat16")
    assert contract.other_scale == 0.0, "unmeasured noise bans nobody"


@pytest.mark.parametrize("name", REASONS)
def test_a_measurement_that_is_no_number_is_above_every_bound(name: str) -> None:
    clean = Evidence(0, 0, 64, 0.0, 0.0, 0.0, 0.0, 0.0, -10.0)
    assert judge(clean, PROOFS).reason is None
    found = judge(msgspec.structs.replace(clean, **{name: float("nan")}), PROOFS)
    assert (found.reason, found.suspect) == (REASONS[name], True)


def test_a_fingerprint_that_was_removed_says_what_to_set() -> None:
    with pytest.raises(
        ValidationError, match=r'removed: set verification\.fingerprint = "projection"'
    ):
        config("toploc", "float32")
    with pytest.raises(ValidationError, match="projection"):
        config("other", "float32")
