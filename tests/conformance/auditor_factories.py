"""The auditors that the suite of the auditor seam runs on."""

from collections.abc import Callable

from support.engine_cases import FP32
from support.prefill_core import PrefillCore

from primerl.node.verification.auditor import Auditor
from primerl.node.verification.hf_auditor import HfAuditor
from primerl.node.verification.vllm_auditor import VllmAuditor

AUDITORS: dict[str, Callable[[], Auditor]] = {
    "core": lambda: PrefillCore(FP32),
    "child": lambda: HfAuditor(FP32, timeout_s=60.0, threads=1),
    "vllm": lambda: VllmAuditor(FP32, timeout_s=120.0),
}
