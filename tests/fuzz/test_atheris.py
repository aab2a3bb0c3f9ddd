"""Coverage-guided fuzzing, a bounded number of cases. docs/fuzzing.md says how to run more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = 20_000
SEED = 1


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_atheris_finds_nothing_in_twenty_thousand_cases(tmp_path: Path) -> None:
    pytest.importorskip(
        "atheris", reason="atheris has no wheel for this Python: pip install .[fuzz]"
    )
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "fuzz.fuzz_codec", f"-runs={CASES}", f"-seed={SEED}"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tests)},
        capture_output=True,
        text=True,
        timeout=590,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"Done {CASES} runs" in done.stderr, done.stderr[-1000:]
    assert list(tmp_path.iterdir()) == []
