"""Checkpoints of several ranks: real gloo processes, a toy model sharded by FSDP2, changes of world size."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ranks_cases
from support.training_cases import FAST, batch, make_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from primerl.crypto.hashing import digest
from primerl.node.config.run import TrainingConfig
from primerl.node.errors import StorageError
from primerl.node.training.learner import Learner
from primerl.node.training.learner_state import (
    ALONE,
    SavedLearner,
    read_saved,
    rng_state,
    set_rng_state,
)
from primerl.node.training.world import RankChannel, World

pytestmark = pytest.mark.slow

TIMEOUT_S = 120
WIDTH = 5
EXACT = FAST.model_copy(update={"dtype": "float32"})


class Toy(torch.nn.Module):
    """Odd sizes, a tied weight, and a bias of one element: shards are uneven, and some are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, WIDTH)
        self.gate = torch.nn.Linear(WIDTH, 1)
        self.head = torch.nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        return self.head(hidden * torch.sigmoid(self.gate(hidden)))


class Trainer:
    """What a learner does with FSDP2, on every rank with the same data."""

    def __init__(self, ranks: RankChannel, *, replicas: int = 1) -> None:
        torch.manual_seed(5)
        model = Toy()
        if ranks.size > 1:
            shape = (replicas, ranks.size // replicas) if replicas > 1 else (ranks.size,)
            names = ("copy", "shard") if replicas > 1 else ("shard",)
            fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
        self.ranks = ranks
        self.step_done = 0
        self.model = model
        self.parameters = dict(model.named_parameters())
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=0.05)

    def step(self) -> None:
        self.step_done += 1
        ids = torch.arange(6).view(2, 3) % (2 + self.step_done % 5)
        self.model(ids).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def saved(self) -> SavedLearner:
        moments = {
            f"{name}:{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state[parameter].items()
        }
        return SavedLearner(self.step_done, self.parameters, moments, rng_state())

    def load(self, directory: Path) -> None:
        saved = read_saved(directory, self.parameters, self.ranks)
        state: dict[int, dict[str, torch.Tensor]] = {}
        index = {name: number for number, name in enumerate(self.parameters)}
        for key, value in saved.moments.items():
            name, _, moment = key.rpartition(":")
            state.setdefault(index[name], {})[moment] = value
        with torch.no_grad():
            for name, tensor in saved.weights.items():
                self.parameters[name].copy_(tensor)
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        set_rng_state(saved.rng)
        self.step_done = saved.step

    def everything(self) -> dict[str, list[float]]:
        """All weights and moments, whole."""
        saved = self.saved()
        tables = {**saved.weights, **saved.moments}
        return {name: _whole(tensor).flatten().tolist() for name, tensor in tables.items()}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    gathered = getattr(tensor, "full_tensor", None)
    return tensor.detach() if gathered is None else gathered().detach()


Job = Callable[[RankChannel, Path], Any]


def joined(job: Job, place: Path) -> Any:
    """`job` on one of the ranks, which leave together."""
    world = ranks_cases.join(TrainingConfig(device="cpu"))
    found = job(RankChannel.open(TIMEOUT_S), place)
    dist.barrier()
    world.close()
    return found


def on_ranks(size: int, place: Path, job: Job) -> list[Any]:
    """What `job` returns on each rank."""
    return ranks_cases.on_ranks(size, joined, job, place)


def train_and_save(ranks: RankChannel, directory: Path) -> Any:
    trainer = Trainer(ranks)
    trainer.step()
    trainer.step()
    torch.manual_seed(100 + ranks.rank)
    staged = trainer.saved().staged(ranks)
    expected = trainer.everything()
    drawn = torch.rand(2).tolist()
    trainer.step()  # what comes after staging is not in the checkpoint
    staged.write(directory, ranks)
    return expected, drawn, trainer.everything()


def load_and_train(ranks: RankChannel, directory: Path) -> Any:
    trainer = Trainer(ranks)
    trainer.step()  # moments that load() has to replace
    trainer.load(directory)
    expected = trainer.everything()
    drawn = torch.rand(2).tolist()
    trainer.step()
    return expected, drawn, trainer.everything()


def copies_and_save(ranks: RankChannel, directory: Path) -> Any:
    trainer = Trainer(ranks, replicas=2)
    trainer.step()
    trainer.saved().write(directory, ranks)
    return trainer.everything()


def fail_in_turn(ranks: RankChannel, directory: Path) -> Any:
    """One rank has no checkpoint, then another model, then a full disk; what the others are told."""
    trainer = Trainer(ranks)
    trainer.saved().write(directory / "saved", ranks)
    before = trainer.everything()
    told: list[str] = []
    strangers = {**trainer.parameters, "more": torch.zeros(1)}
    attempts: list[Callable[[], object]] = [
        lambda: read_saved(
            directory / f"saved{'' if ranks.rank else 'x'}", trainer.parameters, ranks
        ),
        lambda: read_saved(
            directory / "saved", strangers if ranks.rank else trainer.parameters, ranks
        ),
        lambda: trainer.saved().write(directory / "nowhere" / "\0", ranks),
    ]
    for attempt in attempts:
        try:
            attempt()
            told.append("nothing")
        except StorageError as error:
            told.append(str(error))
    trainer.load(directory / "saved")
    return told, trainer.everything() == before


def learner_of(model_dir: Path, ranks: RankChannel) -> Learner:
    """A real one, sharded over the ranks if there are more than one."""
    mesh = (
        init_device_mesh("cpu", (ranks.size,), mesh_dim_names=("shard",)) if ranks.group else None
    )
    world = World(ranks.rank, ranks.size, torch.device("cpu"), mesh)
    return Learner.build(model_dir, EXACT, max_steps=9, seed=0, temperature=1.0, world=world)


def digest_of(learner: Learner) -> dict[str, bytes]:
    """All weights and moments of a learner, whole."""
    saved = learner.saved()
    tables = {**saved.weights, **saved.moments}
    return {name: digest(_whole(one).numpy().tobytes()) for name, one in tables.items()}


def figures_of(learner: Learner, steps: range) -> list[list[float]]:
    """What is learned from the batches of some steps."""
    names = ("loss/mean", "optim/grad_norm", "optim/lr", "tokens")
    values = [learner.step(batch(step)).values for step in steps]
    return [[one[name] for name in names] for one in values]


def learn_in_turn(ranks: RankChannel, place: Path) -> Any:
    """Load what one process saved after step 2, go on to step 4, save in the middle of step 5."""
    learner = learner_of(place / "model", ranks)
    learner.load(place / "learner alone")
    loaded = digest_of(learner)
    figures = figures_of(learner, range(3, 5))
    learner.stage()
    expected = digest_of(learner)
    with ThreadPoolExecutor(1) as writer:
        writing = writer.submit(learner.write_staged, place / "learner both")
        figures += figures_of(learner, range(5, 6))
        writing.result()
    return loaded, expected, figures


def every_job(ranks: RankChannel, place: Path) -> Any:
    """Processes start slowly: one start for all tests."""
    return {
        "alone read by both": load_and_train(ranks, place / "alone"),
        "both": train_and_save(ranks, place / "both"),
        "both read by both": load_and_train(ranks, place / "both"),
        "copies": copies_and_save(ranks, place / "copies"),
        "failures": fail_in_turn(ranks, place),
        "learner": learn_in_turn(ranks, place),
    }


@dataclass(frozen=True)
class Results:
    """What one process and what two ranks made of each other's checkpoints."""

    place: Path
    alone: Any
    learner: Any
    ranks: list[Any]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    place = tmp_path_factory.mktemp("ranks")
    before = torch.get_rng_state()
    alone = train_and_save(ALONE, place / "alone")
    learner = learner_of(make_model(place / "model"), ALONE)
    learner.step(batch(1))
    learner.step(batch(2))
    learner.save(place / "learner alone")
    learned = digest_of(learner), figures_of(learner, range(3, 6))
    torch.set_rng_state(before)
    return Results(place, alone, learned, on_ranks(2, place, every_job))


def assert_goes_on(written: Any, read: Any) -> None:
    """The same weights and moments, and near enough the same after one more step in another world."""
    assert len(written[0]) == 3 + 3 * 3
    assert read[0] == written[0]
    for name, values in written[2].items():
        assert read[2][name] == pytest.approx(values, rel=1e-5, abs=1e-7)


def test_two_ranks_go_on_exactly_where_two_ranks_stopped(results: Results) -> None:
    for one in results.ranks:
        assert one["both read by both"] == one["both"]
    draws = [one["both"][1] for one in results.ranks]
    assert draws[0] != draws[1]  # each rank has its own random numbers


def test_two_ranks_read_what_one_process_wrote(results: Results) -> None:
    for one in results.ranks:
        assert_goes_on(results.alone, one["alone read by both"])
    assert results.ranks[0]["alone read by both"][1] == results.alone[1]


def test_one_process_reads_what_two_ranks_wrote(results: Results) -> None:
    before = torch.get_rng_state()
    read = load_and_train(ALONE, results.place / "both")
    torch.set_rng_state(before)
    assert_goes_on(results.ranks[0]["both"], read)
    assert read[1] == results.ranks[0]["both"][1]


def test_copies_of_a_sharded_model_are_written_once(results: Results) -> None:
    sizes = [file.stat().st_size for file in (results.place / "copies").glob("*.safetensors")]
    once = sum(file.stat().st_size for file in (results.place / "both").glob("*.safetensors"))
    assert sum(sizes) <= once
    trainer = Trainer(ALONE)
    trainer.load(results.place / "copies")
    assert [one["copies"] for one in results.ranks] == [trainer.everything()] * 2


def test_what_fails_on_one_rank_fails_on_all_and_none_hangs(results: Results) -> None:
    (first, unharmed), (second, unharmed_too) = (one["failures"] for one in results.ranks)
    assert unharmed
    assert unharmed_too
    assert "savedx" in first[0]
    assert second[0].startswith("rank 0:")
    assert first[1].startswith("rank 1:")
    assert "another model" in second[1]
    assert "null byte" in first[2]
    assert second[2].startswith("rank 0:")


def test_a_learner_goes_on_in_another_world_and_comes_back(results: Results) -> None:
    for one in results.ranks:
        loaded, saved, figures = one["learner"]
        assert loaded == results.learner[0]
        for ours, theirs in zip(figures, results.learner[1], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-6)
        before = torch.get_rng_state()
        alone = learner_of(results.place / "model", ALONE)
        alone.load(results.place / "learner both")
        assert digest_of(alone) == saved
        assert alone.step_done == 4
        (last,) = figures_of(alone, range(5, 6))
        assert last == pytest.approx(figures[-1], rel=1e-3, abs=1e-6)
        torch.set_rng_state(before)
