"""Coverage-guided fuzzing of every decoder with atheris; the options are libFuzzer's.

    cd tests && python -m fuzz.fuzz_codec [TARGET] -runs=20000 -seed=1 [FOLDER]

With TARGET only that one is given inputs, else all are. Ends with 0 after so many inputs, and with another code
the input in a file at the first finding. Inputs that reach something new are kept in FOLDER, if there is one.
"""

import os
import random
import sys
import tempfile
from pathlib import Path

import atheris
from atheris.import_hook import instrument_imports

with instrument_imports(
    include=[
        "primerl.node.inference.fingerprint",
        "primerl.node.models.support",
        "primerl.node.process.frames",
        "primerl.node.storage.sqlite_file",
        "primerl.node.weights",
        "primerl.protocol",
    ]
):
    from fuzz import targets

from fuzz.mutating import SEEDS, mutated

MAX_BYTES = 1 << 14


def fuzz(names: list[str], options: list[str]) -> None:
    """Fuzz the targets of these names, or all; the corpus is kept only while this runs, unless one is named."""
    numbers = [it.__name__ for it in targets.TARGETS]
    prefix = bytes([numbers.index(names[0])]) if names else b""

    def test_one_input(data: bytes) -> None:
        targets.run(prefix + data)

    def custom_mutator(data: bytes, max_size: int, seed: int) -> bytes:
        """Return a plausible relative of `data`, or of a valid input.

        libFuzzer drops valid inputs that run the same lines as another: those of decoders in C all do.
        """
        rng = random.Random(seed)
        made = rng.choice(own) if rng.random() < 0.5 else prefix + data
        for _ in range(rng.choice((1, 1, 2, 4))):
            made = mutated(rng, made, lambda part: atheris.Mutate(part, len(part) + 16))
        if not made.startswith(prefix):
            made = rng.choice(own)
        return made[len(prefix) :][:max_size]

    own = [seed for seed in (*SEEDS, *targets.kept()) if seed.startswith(prefix)]
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(own):
            (Path(corpus) / f"seed_{number:02}").write_bytes(seed[len(prefix) :])
        fixed = [f"-max_len={MAX_BYTES}", f"-artifact_prefix={os.getcwd()}/finding-"]
        arguments = [sys.argv[0], *fixed, *options, corpus]
        atheris.Setup(arguments, test_one_input, custom_mutator=custom_mutator)
        atheris.Fuzz()


def main() -> None:
    """Read the command line."""
    named = [it for it in sys.argv[1:2] if it.isidentifier()]
    fuzz(named, sys.argv[1 + len(named) :])


if __name__ == "__main__":
    main()
