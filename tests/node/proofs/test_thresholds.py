import msgspec
import pytest
from protocol_cases import PROOFS

from primerl.node.config import RunConfig
from primerl.node.errors import UsageError
from primerl.node.proofs.judgement import REASONS, judge
from primerl.node.proofs.thresholds import BUILT_IN, FIELDS, check_bounds, proof_contract
from primerl.protocol.rollouts import Evidence


def config(fingerprint: str, dtype: str) -> RunConfig:
    return RunConfig.model_validate(
        {"verification": {"fingerprint": fingerprint}, "engine": {"dtype": dtype}}
    )


def test_what_is_suspect_comes_before_what_is_rejected() -> None:
    for reject, suspect in BUILT_IN.values():
        assert all(getattr(suspect, name) < getattr(reject, name) for name in FIELDS)


def test_built_in_bounds_say_that_no_sample_is_behind_them() -> None:
    contract = proof_contract(config("projection", "bfloat16"), "")
    assert (contract.honest_rollouts, contract.source) == (0, "built in for bfloat16")
    assert contract.other_scale == 0.0, "unmeasured noise bans nobody"


@pytest.mark.parametrize(
    ("fingerprint", "dtype"),
    [("projection", "float32"), ("projection", "bfloat16"), ("toploc", "float32")],
)
def test_these_start_without_a_calibration(fingerprint: str, dtype: str) -> None:
    check_bounds(config(fingerprint, dtype))


def test_toploc_in_bfloat16_wants_bounds_of_its_own() -> None:
    with pytest.raises(UsageError, match="run primerl-node calibrate"):
        check_bounds(config("toploc", "bfloat16"))


@pytest.mark.parametrize("name", REASONS)
def test_a_measurement_that_is_no_number_is_above_every_bound(name: str) -> None:
    clean = Evidence(0, 0, 64, 0.0, 0.0, 0.0, 0.0, 0.0, -10.0)
    assert judge(clean, PROOFS).reason is None
    found = judge(msgspec.structs.replace(clean, **{name: float("nan")}), PROOFS)
    assert (found.reason, found.suspect) == (REASONS[name], True)
