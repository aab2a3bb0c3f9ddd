import math
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.protocol_cases import BRANCH, SUBMISSION, VERDICT, refuses

from primerl.protocol import rollouts
from primerl.protocol.errors import LocalProtocolError, Reason
from primerl.protocol.manifests import encode
from primerl.protocol.session import decode
from primerl.protocol.version import MAX_LEASE

F32_MAX = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_tokens_come_back_as_they_were(values: list[int]) -> None:
    packed = rollouts.pack_u32(values)
    assert packed == struct.pack(f"<{len(values)}I", *values)
    assert rollouts.unpack_u32(packed) == values


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=50))
def test_logprobs_come_back_as_they_were(values: list[float]) -> None:
    packed = rollouts.pack_f32(values)
    assert packed == struct.pack(f"<{len(values)}f", *values)
    assert rollouts.unpack_f32(packed) == values


@pytest.mark.parametrize("value", [-1, 2**32])
def test_a_token_that_is_no_u32_is_our_own_bug(value: int) -> None:
    with pytest.raises(OverflowError):
        rollouts.pack_u32([5, value])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e39, 3.5e38])
def test_a_logprob_that_is_not_finite_is_never_returned(value: float) -> None:
    with pytest.raises(LocalProtocolError, match="finite"):
        rollouts.pack_f32([-0.5, value, -0.5])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_logprob_that_is_not_finite_is_refused(value: float) -> None:
    with refuses(Reason.MALFORMED):
        rollouts.unpack_f32(struct.pack("<3f", -0.5, value, -0.5))


def test_signalling_nans_are_refused_too() -> None:
    for bits in (0x7F800001, 0xFF800001, 0x7FC00000, 0xFFFFFFFF):
        with refuses(Reason.MALFORMED):
            rollouts.unpack_f32(struct.pack("<I", bits))
    assert rollouts.unpack_f32(rollouts.pack_f32([-F32_MAX, -0.0])) == [-F32_MAX, 0.0]


@given(st.binary(max_size=64))
def test_an_array_that_is_cut_short_is_refused(data: bytes) -> None:
    if len(data) % 4 == 0:
        assert len(rollouts.unpack_u32(data)) == len(data) // 4
        return
    with refuses(Reason.MALFORMED):
        rollouts.unpack_u32(data)
    with refuses(Reason.MALFORMED):
        rollouts.unpack_f32(data)


def test_a_submission_and_its_verdict_come_back() -> None:
    assert decode(encode(SUBMISSION), rollouts.Submission) == SUBMISSION
    assert decode(encode(VERDICT), rollouts.Verdict) == VERDICT


def branch(**changes: object) -> bytes:
    return encode(msgspec.structs.replace(BRANCH, **changes))


@pytest.mark.parametrize("field", ["tokens", "sampled", "logprobs"])
def test_the_tokens_of_a_branch_are_limited(field: str) -> None:
    assert decode(branch(**{field: bytes(4 * rollouts.MAX_BRANCH_TOKENS)}), rollouts.BranchRecord)
    with refuses(Reason.MALFORMED):
        decode(branch(**{field: bytes(4 * rollouts.MAX_BRANCH_TOKENS + 1)}), rollouts.BranchRecord)


@pytest.mark.parametrize(
    "changes",
    [{"finish": "error"}, {"policy_first": -1}, {"policy_last": 2**53 + 1}, {"tokens": "text"}],
)
def test_a_branch_has_limits(changes: dict[str, object]) -> None:
    with refuses(Reason.MALFORMED):
        decode(branch(**changes), rollouts.BranchRecord)


@pytest.mark.parametrize(
    "wrong",
    [
        rollouts.RolloutRecord((BRANCH,) * 65, 0.0, ""),
        rollouts.RolloutRecord((), 0.0, "x" * 513),
        rollouts.GroupRecord(0, bytes(31), ()),
        rollouts.GroupRecord(-1, bytes(32), ()),
        rollouts.GroupRecord(0, bytes(32), (rollouts.RolloutRecord((), 0.0, ""),) * 4097),
        msgspec.structs.replace(SUBMISSION, lease=bytes(MAX_LEASE + 1)),
        msgspec.structs.replace(SUBMISSION, groups=(SUBMISSION.groups[1],) * 4097),
        msgspec.structs.replace(SUBMISSION, engine="x" * 257),
        msgspec.structs.replace(VERDICT, rejections=(VERDICT.rejections[0],) * 4097),
        msgspec.structs.replace(VERDICT, submission=b""),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_submission_has_limits(wrong: msgspec.Struct) -> None:
    with refuses(Reason.MALFORMED):
        decode(encode(wrong), type(wrong))


def test_a_verdict_names_only_known_reasons() -> None:
    said = encode(VERDICT)
    assert b"environment_error" in said
    with refuses(Reason.MALFORMED):
        decode(said.replace(b"environment_error", b"environment_errxx"), rollouts.Verdict)
