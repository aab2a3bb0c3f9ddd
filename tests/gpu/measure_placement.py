"""What `primerl-node rl` gives to each process on this machine's GPUs, and what torch then sees in it.

    python tests/gpu/measure_placement.py

Needs torch with CUDA; starts no run. Prints a line for each process; ends with 1 if a process sees other GPUs
than it was given, or if two share one that should not.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from primerl.node.config.loader import load
from primerl.node.config.run import RunConfig
from primerl.node.launch.launcher import with_gpus
from primerl.node.launch.placement import GpuPlacement, place, planned_share
from primerl.node.ops.errors import UsageError
from primerl.node.ops.gpus import installed, usable

SEES = (
    "import json, torch; c = torch.cuda; print(json.dumps("
    "[str(c.get_device_properties(i).uuid) for i in range(c.device_count())]))"
)


def cases(count: int) -> list[list[str]]:
    """Options of `rl` for so many GPUs."""
    found: list[list[str]] = [[]]
    if count >= 2:
        half = count // 2
        split = ["--launch.trainer-gpus", str(half), "--launch.inference-gpus", str(count - half)]
        found += [split, [*split, "--engine.type", "vllm", "--engine.tp", "auto"]]
        found += [["--launch.trainer-gpus", f"{count - 1},", "--launch.inference-gpus", "0,"]]
    return found


def seen(names: Sequence[str] | None) -> list[str]:
    """UUIDs that torch finds in a process with these GPUs, in its order."""
    environment = with_gpus(os.environ, names)
    done = subprocess.run(
        [sys.executable, "-c", SEES], env=environment, capture_output=True, text=True, check=True
    )
    return [f"GPU-{uuid.removeprefix('GPU-')}" for uuid in json.loads(done.stdout)]


def show(options: list[str], placement: GpuPlacement, uuids: dict[str, str]) -> bool:
    """Print who sees what; whether that is right."""
    print(f"\nrl {' '.join(options)}")
    good = True
    taken: list[str] = []
    processes = [("trainer", placement.trainer)]
    processes += [(f"worker_{n}", names) for n, names in enumerate(placement.workers, start=1)]
    for name, names in processes:
        found = seen(names)
        right = found == [uuids.get(one, one) for one in names or ()]
        taken += found
        good &= right
        short = " ".join(uuid[:12] for uuid in found)
        print(f"  {name:10} {','.join(names or ()):12} {short:40} {'ok' if right else 'WRONG'}")
    shared = len(taken) != len(set(taken))
    if shared != any("share" in note for note in placement.notes):
        print("  WRONG: shared GPUs and the notes do not agree")
        good = False
    for note in placement.notes:
        print(f"  {note}")
    return good


def main() -> int:
    """0 if every process sees what it was given."""
    gpus = installed()
    uuids = {gpu.name: gpu.uuid for gpu in gpus}
    names = usable(os.environ)
    torch_sees = seen(None)
    print(f"nvidia-smi: {len(gpus)}, visible: {len(names)}, torch: {len(torch_sees)}")
    good = torch_sees == [uuids.get(name, name) for name in names]
    print(f"torch counts them in the same order: {'ok' if good else 'WRONG'}")
    for options in cases(len(names)):
        try:
            placement = place(load(RunConfig, options, {}), names, planned_share)
        except UsageError as error:
            print(f"\nrl {' '.join(options)}: {error}")
            good = False
            continue
        good &= show(options, placement, uuids)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
