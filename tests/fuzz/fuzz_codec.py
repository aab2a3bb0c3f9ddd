"""Coverage-guided fuzzing of every decoder with atheris; the options are libFuzzer's.

    cd tests && python -m fuzz.fuzz_codec -runs=20000 -seed=1

Ends with 0 after so many inputs, and with another code and the input in a file at the first finding.
"""

import os
import random
import sys
import tempfile
from pathlib import Path

import atheris
from atheris.import_hook import instrument_imports

with instrument_imports(
    include=["primerl.node.inference.fingerprint", "primerl.node.weights", "primerl.protocol"]
):
    from fuzz import targets

from fuzz.mutating import SEEDS, mutated

MAX_BYTES = 1 << 14


def test_one_input(data: bytes) -> None:
    """What libFuzzer calls."""
    targets.run(data)


def custom_mutator(data: bytes, max_size: int, seed: int) -> bytes:
    """A plausible relative of `data`."""
    rng = random.Random(seed)
    return mutated(rng, data, lambda part: atheris.Mutate(part, len(part) + 16))[:max_size]


def main() -> None:
    """Fuzz from the valid inputs on; the corpus is kept only while this runs, unless one is named."""
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(SEEDS):
            (Path(corpus) / f"seed_{number:02}").write_bytes(seed)
        options = [f"-max_len={MAX_BYTES}", f"-artifact_prefix={os.getcwd()}/finding-"]
        atheris.Setup(
            [sys.argv[0], *options, *sys.argv[1:], corpus],
            test_one_input,
            custom_mutator=custom_mutator,
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
