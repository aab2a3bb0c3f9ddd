"""The envelope: a reading in float32 stands for a worker that rounds nothing."""

from collections.abc import AsyncGenerator
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio
from msgspec import structs
from support.auditor_cases import OWN, TEMPERATURE, Case, coarse, generate, make_case, measured
from support.noise_cases import honest_4b
from support.prefill_core import PrefillCore
from support.protocol_cases import PROOFS

from primerl.node.config.run import EngineConfig
from primerl.node.verification.auditor import Measured, Reading, Unreadable
from primerl.node.verification.bounds import PROVISIONAL
from primerl.node.verification.class_bounds import Reference
from primerl.node.verification.envelope import (
    FIRST,
    PAIR,
    WINDOWS,
    NoiseEnvelope,
    envelope_bounds,
    first_version,
    mean_bounds,
)
from primerl.node.verification.hf_auditor import HfAuditor
from primerl.node.verification.judgement import first_above
from primerl.node.verification.reader import has_room
from primerl.protocol.reputation import WINDOW
from primerl.protocol.rollouts import MEASURES, Evidence

CPU = EngineConfig(type="hf", device="cpu", dtype="bfloat16")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return await make_case(tmp_path_factory.mktemp("envelope"), "bfloat16")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def parts(case: Case) -> AsyncGenerator[tuple[PrefillCore, HfAuditor]]:
    """The run's auditor in this process, and the reader in its own."""
    auditor = PrefillCore(CPU)
    reader = HfAuditor(CPU, timeout_s=60.0, threads=1, dtype="float32")
    for one in (auditor, reader):
        await one.start(case.model_dir, case.run)
    yield auditor, reader
    for one in (auditor, reader):
        await one.close()


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_reading_is_what_a_worker_in_float32_claims(
    case: Case, parts: tuple[PrefillCore, HfAuditor]
) -> None:
    honest = await generate(case.model_dir, case.states[OWN], "float32")
    readings = await parts[1].read(honest, case.states)
    for item, reading in zip(honest, readings, strict=True):
        assert isinstance(reading, Reading)
        drawn = [item.token_ids[at] for one in item.replies for at in range(one.start, one.end)]
        assert reading.drawn == drawn
        assert np.allclose(reading.logprobs, item.logprobs, atol=2e-4)
    claims = [
        replace(item, drawn=one.drawn, logprobs=one.logprobs, proof=one.proof)
        for item, one in zip(honest, readings, strict=True)
        if isinstance(one, Reading)
    ]
    for one in measured(await parts[0].audit(claims, case.states)):
        assert 0 < one.fingerprint < 0.05
        assert one.sampling_max < 1


async def test_the_auditor_is_as_far_from_float32_as_another_rounding_is(
    case: Case, parts: tuple[PrefillCore, HfAuditor]
) -> None:
    auditor, reader = parts
    read = measured(await NoiseEnvelope(auditor, reader).measure(case.honest, case.states))
    # the bf16 worker of the same kind, seen by the reader's network: its own noise
    own = measured(await reader.audit(case.honest, case.states))
    ratio = np.mean([one.fingerprint for one in own]) / np.mean([one.fingerprint for one in read])
    assert 0.8 < ratio < 1.25
    noise = np.mean([one.logprob for one in own]) / np.mean([one.logprob for one in read])
    assert 0.6 < noise < 1.6


async def test_weights_of_four_bits_are_beyond_the_envelope_and_honest_work_is_not(
    case: Case, parts: tuple[PrefillCore, HfAuditor]
) -> None:
    auditor, reader = parts
    honest = await generate(case.model_dir, case.states[OWN], "bfloat16")
    read = measured(await NoiseEnvelope(auditor, reader).measure(honest, case.states))
    seen = [Reference(b"", OWN, _evidence(number, one)) for number, one in enumerate(read * 2)]
    bounds = envelope_bounds(seen, PROOFS)
    cheats = await generate(case.model_dir, coarse(case.states[OWN], 4), "bfloat16")
    found = measured(await auditor.audit(cheats, case.states))
    suspects = [first_above(_evidence(0, one), bounds.suspect) for one in found]
    assert sum(map(bool, suspects)) >= len(found) // 2
    in_float32 = await generate(case.model_dir, case.states[OWN], "float32")
    fine = measured(await auditor.audit(in_float32, case.states))
    assert [first_above(_evidence(0, one), bounds.suspect) for one in fine] == [""] * len(fine)


async def test_a_branch_of_two_versions_is_read_up_to_the_second(case: Case) -> None:
    item = case.honest[3]
    count = len(item.versions)
    half = count // 2
    mixed = replace(item, versions=[OWN] * half + [OWN + 1] * (count - half), others=[OWN, OWN - 1])
    cut = first_version(mixed)
    assert cut.versions == [OWN] * half
    assert sum(one.end - one.start for one in cut.replies) == half
    assert len(cut.logprobs) == half
    assert len(cut.proof) == 8 * half
    assert cut.others == [OWN - 1]
    assert len(cut.token_ids) == cut.replies[-1].end
    assert first_version(item).token_ids == item.token_ids[: item.replies[-1].end]


async def test_what_cannot_be_read_is_told_and_the_rest_is_read(
    case: Case, parts: tuple[PrefillCore, HfAuditor]
) -> None:
    broken = replace(case.honest[0], token_ids=[10**9, *case.honest[0].token_ids[1:]])
    found = await NoiseEnvelope(*parts).measure([broken, case.honest[1]], case.states)
    assert isinstance(found[0], Unreadable)
    assert measured(found[1:])


async def test_bounds_add_the_noise_of_a_second_rounding_and_are_never_beyond_provisional() -> None:
    seen = honest_4b(np.random.default_rng(0), 4 * FIRST)
    bounds = envelope_bounds([Reference(b"", 1, one) for one in seen], PROOFS)
    most = max(one.fingerprint for one in seen)
    assert bounds.suspect.fingerprint >= 1.8 * np.quantile([one.fingerprint for one in seen], 0.99)
    assert bounds.reject.fingerprint > 1.8 * most
    assert bounds.reject.other_policy == PROVISIONAL.other_policy
    wide = [Reference(b"", 1, one) for one in honest_4b(np.random.default_rng(0), FIRST, 100.0)]
    assert envelope_bounds(wide, PROOFS).reject == PROVISIONAL


def _with_means(count: int, shift: float = 0.0) -> list[Evidence]:
    """Honest rollouts whose means scatter about 0, but for the mean of logprobs."""
    rng = np.random.default_rng(3)
    return [
        structs.replace(one, means=(shift + rng.normal() * 0.01, *(rng.normal(size=8) * 0.01)))
        for one in honest_4b(rng, count)
    ]


async def test_means_have_bounds_once_there_are_four_windows_of_readings() -> None:
    assert mean_bounds(_with_means(WINDOWS * WINDOW - 1)) is None
    assert mean_bounds(honest_4b(np.random.default_rng(0), 256)) is None, "none were measured"
    bounds = mean_bounds(_with_means(1024))
    assert bounds is not None
    assert bounds.logprob_trend == pytest.approx(4 * PAIR * 0.01 / 4 + 0.003, rel=0.15)
    honest = np.array([(*one.means, one.fingerprint) for one in _with_means(1024)])
    windows = honest.reshape(-1, WINDOW, 10).mean(axis=1)
    assert [bounds.first_above(window.tolist()) for window in windows] == [""] * len(windows)
    assert bounds.first_above([-0.05, *windows[0][1:]]).startswith("logprob_shift 0.05")
    assert bounds.first_above([0.0] * 9 + [float("nan")]).startswith("fingerprint nan")
    seen = [Reference(b"", 1, one) for one in _with_means(WINDOWS * WINDOW)]
    assert envelope_bounds(seen, PROOFS).means is not None


async def test_what_the_auditors_kernels_leave_in_a_mean_others_may_leave_too() -> None:
    steady, scattered = mean_bounds(_with_means(64, 0.02)), mean_bounds(_with_means(64))
    assert steady is not None
    assert scattered is not None
    assert steady.logprob_shift > 4 * scattered.logprob_shift
    assert steady.logprob_trend == scattered.logprob_trend


async def test_a_temperature_that_no_rollout_shows_is_in_the_mean_of_sixteen(
    case: Case, parts: tuple[PrefillCore, HfAuditor]
) -> None:
    auditor, reader = parts
    read = measured(await NoiseEnvelope(auditor, reader).measure(case.honest, case.states))
    seen = [_evidence(number, one) for number, one in enumerate(read * 6)]
    bounds = envelope_bounds([Reference(b"", OWN, one) for one in seen], PROOFS)
    assert bounds.means is not None
    found: list[str] = []
    for warmer in (1.0, 1.05):
        items = await generate(case.model_dir, case.states[OWN], "bfloat16", TEMPERATURE * warmer)
        measures = [_evidence(0, one) for one in measured(await auditor.audit(items, case.states))]
        window = [(*one.means, one.fingerprint) for one in measures]
        found.append(bounds.means.first_above(np.mean(window, axis=0).tolist()))
    assert found[0] == ""
    assert found[1].startswith("logprob_trend 0.04")


async def test_a_model_is_read_on_the_cpu_where_a_trainer_would_have_no_room_left_beside_it() -> (
    None
):
    total = 140 * 2**30
    assert has_room(600_000_000, 20 * 2**30, total)
    assert not has_room(4_000_000_000, 20 * 2**30, total)
    assert not has_room(600_000_000, 10 * 2**30, total), "5 % stay free"


def _evidence(number: int, one: Measured) -> Evidence:
    measures = (getattr(one, name) for name in MEASURES)
    return Evidence(0, number, one.tokens, *measures, means=one.means)


async def test_other_kernels_may_shift_the_states_of_a_model_by_half_of_its_noise() -> None:
    """As those of a 4B model do by 0.42: in long texts all else averages out, in readings and in workers."""
    long = [
        structs.replace(one, means=(0.0,) * 9) for one in honest_4b(np.random.default_rng(0), 64)
    ]
    bounds = mean_bounds(long)
    assert bounds is not None
    distance = float(np.mean([one.fingerprint for one in long]))
    shifted = [0.0, 0.0, 0.45 * distance, *[0.0] * 6, PAIR * distance]
    assert bounds.first_above(shifted) == ""
    assert bounds.first_above([0.0, 0.0, 0.6 * distance, *[0.0] * 7]).startswith(
        "fingerprint_shift"
    )
