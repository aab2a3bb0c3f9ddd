"""Who gets which GPUs: the decision alone, nothing is started."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from primerl.node.config.loader import load
from primerl.node.config.run import ModelConfig, RunConfig
from primerl.node.errors import UsageError
from primerl.node.gpus import GpuMemory
from primerl.node.launch.placement import (
    LEAST,
    MOST,
    UNCHECKED,
    UNPLANNED,
    GpuPlacement,
    place,
    planned_shares,
    shape_of,
)
from primerl.node.models.created_model import created_config

EIGHT = tuple("01234567")


def placed(line: str, gpus: tuple[str, ...] = EIGHT) -> GpuPlacement:
    return place(configured(line), gpus, unknown)


def unknown(config: RunConfig) -> None:
    """Of a model whose sizes nobody knows."""


def configured(line: str) -> RunConfig:
    return load(RunConfig, expand(line.split()), {})


def expand(flags: list[str]) -> list[str]:
    short = {
        "-t": "--launch.trainer-gpus",
        "-i": "--launch.inference-gpus",
        "-w": "--launch.workers",
    }
    return [short.get(flag, flag) for flag in flags]


def seen(placement: GpuPlacement) -> tuple[Any, ...]:
    workers = [",".join(names) for names in placement.workers if names is not None]
    return (",".join(placement.trainer or ()), workers)


@pytest.mark.parametrize(
    ("line", "trainer", "workers"),
    [
        ("", "0", ["1", "2", "3", "4", "5", "6", "7"]),
        ("-t 2 -i 6", "0,1", ["2", "3", "4", "5", "6", "7"]),
        ("-t 2 -i 4 --engine vllm --engine.tp 2", "0,1", ["2,3", "4,5"]),
        ("-t 4 -i 4 --engine vllm --engine.dp 2 --engine.tp 2", "0,1,2,3", ["4,5,6,7"]),
        ("-t 2 --engine vllm --engine.pp 3", "0,1", ["2,3,4", "5,6,7"]),
        ("-t 4 --engine vllm --engine.tp auto", "0,1,2,3", ["4,5,6,7"]),
        ("-t 4 -w 2 --engine vllm --engine.tp auto", "0,1,2,3", ["4,5", "6,7"]),
        ("-t 0,7 -i 3", "0,7", ["1", "2", "3"]),
        ("-t 1 -i 0,5", "1", ["0", "5"]),
        ("-t 7, -i 0,", "7", ["0"]),
        ("-t 2 -i 0,2,3", "1,4", ["0", "2", "3"]),
        ("-w 3", "0", ["1", "2", "3"]),
        ("-w 0 -t 8", "0,1,2,3,4,5,6,7", []),
        ("--training.backend fsdp --training.fsdp.ranks 3 -i 1", "0,1,2", ["3"]),
        ("--training.backend fsdp -i 6", "0,1", ["2", "3", "4", "5", "6", "7"]),
        ("-t 0 -i 2", "", ["0", "1"]),
        ("--training.device cpu -i 2", "", ["0", "1"]),
        ("--engine.device cpu", "0", ["", ""]),
        ("--engine hf --engine.device cpu -w 1", "0", [""]),
        ("-i 1 -w 2", "0", ["1", "1"]),
    ],
)
def test_gpus_are_given_out(line: str, trainer: str, workers: list[str]) -> None:
    assert seen(placed(line)) == (trainer, workers)


def test_without_gpus_nothing_is_decided() -> None:
    for line, count in (("", 2), ("-w 5", 5), ("-w 0", 0), ("-t 0 -i 0", 2)):
        assert placed(line, ()) == GpuPlacement(None, (None,) * count)
    both = "--training.device cpu --engine.device cpu"
    assert placed(both) == GpuPlacement(None, (None, None))


def test_numbers_count_the_visible_ones_and_names_are_passed_on() -> None:
    names = ("6", "GPU-aa11", "GPU-bb22", "3")
    assert seen(placed("-t 0, -i 1,3", names)) == ("6", ["GPU-aa11", "3"])
    assert seen(placed("-t GPU-bb -i 2", names)) == ("GPU-bb22", ["6", "GPU-aa11"])


def test_one_gpu_is_shared_without_asking() -> None:
    alone = placed("--engine vllm", ("0",))
    assert seen(alone) == ("0", ["0"])
    assert alone.memory == UNPLANNED.workers
    assert any("share GPU 0" in line for line in alone.lines())
    limit = ["--training.gpu-memory-utilization", f"{UNPLANNED.trainer:g}"]
    assert alone.trainer_arguments() == limit
    assert load(RunConfig, limit, {}).training.gpu_memory_utilization == UNPLANNED.trainer
    said = placed("--engine vllm --training.gpu-memory-utilization 0.3", ("0",))
    assert said.trainer_arguments() == []
    assert placed("--engine hf", ("0",)).memory is None
    assert placed("--engine vllm -w 2", ("0",)).memory == UNPLANNED.workers / 2
    assert seen(placed("--engine hf -w 2", ("0",))) == ("0", ["0", "0"])


def test_memory_is_divided_only_where_gpus_are_shared_and_nothing_was_said() -> None:
    assert placed("--engine vllm -t 2 -i 2").memory is None
    assert placed("--engine vllm -i 2 -w 4").memory == 0.45
    assert placed("--engine vllm --engine.vllm.gpu-memory-utilization 0.3", ("0",)).memory is None
    assert placed("--engine vllm --engine.vllm.kv-cache-memory-bytes 99", ("0",)).memory is None


def test_gpus_that_both_options_name_are_shared() -> None:
    assert seen(placed("-t 0,1 -i 1,2 --engine vllm")) == ("0,1", ["1", "2"])
    assert seen(placed("-t 0,1 -i 0,1 --engine vllm", ("0", "1"))) == ("0,1", ["0", "1"])
    assert seen(placed("-t 0, -i 0, --engine vllm", ("0",))) == ("0", ["0"])


def test_a_trainer_of_several_gpus_becomes_ranks() -> None:
    config = configured("-t 3 -i 1 --engine vllm")
    placement = place(config, EIGHT, unknown)
    assert placement.trainer_arguments() == [
        *("--training.backend", "fsdp", "--training.fsdp.ranks", "3"),
    ]
    applied = placement.applied(config)
    assert (applied.training.backend, applied.training.fsdp.ranks) == ("fsdp", 3)
    again = load(RunConfig, placement.trainer_arguments(), {})
    assert (again.training.backend, again.training.fsdp.ranks) == ("fsdp", 3)
    assert placed("-t 1").trainer_arguments() == []
    assert placed("-t 1 -i 1").applied(config) == config


@pytest.mark.parametrize(
    ("line", "gpus", "says"),
    [
        ("-t 6 -i 3", EIGHT, "--inference-gpus 3: 8 visible, 2 of them free"),
        ("-t 9", EIGHT, "--trainer-gpus 9: 8 visible, 8 of them free"),
        ("-t 8", EIGHT, "takes all 8 visible GPUs"),
        ("-t 1 -i 1", ("0",), "or name the same ones for both to share"),
        ("-t 2 -i 0,1", ("0", "1"), "--trainer-gpus 2: 2 visible, 0 of them free"),
        ("-t 0,1,0", EIGHT, "names a GPU twice"),
        ("-t 0,8", EIGHT, r"no GPU 8 among the visible ones \(0, 1, .*from 0 to 7"),
        ("-t GPU-ff", ("GPU-aa", "GPU-bb"), "no GPU GPU-ff among"),
        ("-t GPU-a", ("GPU-aa", "GPU-ab"), "no GPU GPU-a among"),
        ("-t 1", (), "no GPU can be used here"),
        ("-i 0,", (), "no GPU can be used here"),
        ("--launch.mps", (), "--launch.mps true: no GPU can be used here"),
        ("-i 1 --engine.device cpu --training.device cpu", EIGHT, "the run needs none"),
        ("-i 3 --engine vllm --engine.tp 2", EIGHT, "leave 1 idle: ask for --inference-gpus 2"),
        ("-i 1 --engine vllm --engine.tp 2", EIGHT, "an engine of 2 GPUs .* does not fit 1 GPU"),
        ("-i 4 -w 2", EIGHT, "4 GPUs for inference in engines of 1 leave 2 idle"),
        ("-t 2 --training.backend local", EIGHT, 'training.backend "local" uses one'),
        ("-t 2 --training.fsdp.ranks 4", EIGHT, "ask for --trainer-gpus 4"),
        ("--training.backend fsdp", EIGHT, "say how many the trainer gets"),
        ("--training.device cuda:1", EIGHT, "training.device is cuda:1"),
        ("--engine.device cuda:3", EIGHT, "engine.device is cuda:3"),
        ("-t 2 -i 1", ("MIG-a", "MIG-b", "MIG-c"), "does not join MIG slices"),
        ("-t 1 --engine vllm --engine.tp 2", ("MIG-a", "MIG-b", "MIG-c"), "does not join MIG"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_to_say(
    line: str, gpus: tuple[str, ...], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        placed(line, gpus)


@pytest.mark.parametrize("text", ["two", "0;1", "-1", "1.5", ",", "0,,1", "0, x", "GPU"])
def test_what_names_no_gpus_is_refused_by_the_config(text: str) -> None:
    with pytest.raises(UsageError, match=r"launch\.trainer_gpus.*0,1"):
        load(RunConfig, [f"--launch.trainer-gpus={text}"], {})


def test_a_file_may_say_numbers_and_lists(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[launch]\ntrainer_gpus = [3]\ninference_gpus = 2\n")
    assert seen(place(load(RunConfig, ["@", str(file)], {}), EIGHT, unknown)) == ("3", ["0", "1"])


def test_idle_gpus_are_named() -> None:
    assert placed("-w 2").notes == ("idle: 5 GPUs, launch.workers asks for no more",)
    three = placed("--engine vllm --engine.tp 3")
    assert three.notes == ("idle: 1 GPU, no engine of 3 fits there",)


H200 = GpuMemory("0", "GPU-aa", "H200", 141 << 30, 140 << 30, "1")
BIG = (
    *("--model.create.hidden-size", "4096", "--model.create.num-hidden-layers", "36"),
    *("--model.create.intermediate-size", "12288", "--model.create.vocab-size", "151936"),
)
"""About 7 G parameters: a trainer of 16 bytes each fills an H200."""


def test_what_the_trainer_leaves_is_planned_where_the_model_is_known(tmp_path: Path) -> None:
    tiny = load(RunConfig, ["@", "demo", "--engine", "vllm", "--launch.workers", "1"], {})
    planned = planned_shares(tiny, lambda: [H200])
    assert planned is not None
    assert planned.workers == MOST
    assert place(tiny, ("0",), lambda config: planned_shares(config, lambda: [H200])).memory == MOST
    small = H200._replace(total=8 << 30)
    less = planned_shares(tiny, lambda: [H200, small])
    assert less is not None
    assert LEAST < less.workers < MOST
    assert 0 < less.trainer < 1 - less.workers
    assert planned_shares(tiny, list) is None
    assert planned_shares(configured("--model.name hub/model"), lambda: [H200]) is None


def test_a_worker_beside_the_trainer_gets_its_cache_in_bytes_which_no_other_start_changes() -> None:
    tiny = load(RunConfig, ["@", "demo", "--engine", "vllm", "--launch.workers", "1"], {})
    shared = place(tiny, ("0",), lambda config: planned_shares(config, lambda: [H200]))
    assert shared.cache is not None
    assert 0.9 * MOST * H200.total < shared.cache < MOST * H200.total
    vllm = shared.applied(tiny).engine.vllm
    assert vllm == {"gpu_memory_utilization": UNCHECKED, "kv_cache_memory_bytes": shared.cache}
    assert "kv_cache_memory_bytes of each worker: 98.1 GiB" in "\n".join(shared.lines())
    unknown = place(tiny, ("0",), lambda config: None)
    assert unknown.cache is None
    assert unknown.applied(tiny).engine.vllm == {"gpu_memory_utilization": UNPLANNED.workers}


def test_where_vllm_as_the_auditor_leaves_too_little_the_embedded_engine_audits() -> None:
    small = (
        *("--model.create.hidden-size", "1024", "--model.create.num-hidden-layers", "28"),
        *("--model.create.num-key-value-heads", "8", "--model.create.head-dim", "128"),
    )
    told = ["--engine", "vllm", "--engine.dtype", "bfloat16", *small, "--launch.workers", "1"]
    config = load(RunConfig, told, {})
    assert config.auditor == "vllm"
    for memory, embedded in ((140 << 30, False), (12 << 30, True)):
        gpu = H200._replace(total=memory)
        placement = place(config, ("0",), partial(planned_shares, gpus=lambda gpu=gpu: [gpu]))
        assert placement.embedded == embedded
        assert ("hf" in placement.trainer_arguments()) == embedded
        assert placement.applied(config).auditor == ("hf" if embedded else "vllm")
    named = load(RunConfig, [*told, "--verification.auditor", "vllm"], {})
    gpu = H200._replace(total=12 << 30)
    with pytest.raises(UsageError, match="do not fit on one GPU"):
        place(named, ("0",), partial(planned_shares, gpus=lambda: [gpu]))


def test_a_trainer_that_leaves_nothing_is_refused() -> None:
    big = load(RunConfig, ["--engine", "vllm", *BIG], {})
    with pytest.raises(UsageError, match=r"do not fit on one GPU .*activation_checkpointing to"):
        place(big, ("0",), lambda config: planned_shares(config, lambda: [H200]))
    said = load(
        RunConfig, ["--engine.vllm.gpu-memory-utilization", "0.2", "--engine", "vllm", *BIG], {}
    )
    assert place(said, ("0",), lambda config: planned_shares(config, lambda: [H200])).memory is None
    assert (
        place(big, ("0", "1"), lambda config: planned_shares(config, lambda: [H200])).memory is None
    )


def test_the_shape_is_read_where_the_model_lies(tmp_path: Path) -> None:
    assert shape_of(ModelConfig(name=str(tmp_path / "none"))) is None
    (tmp_path / "config.json").write_text('{"model_type": "strange"}')
    assert shape_of(ModelConfig(name=str(tmp_path))) is None
    sizes = {"hidden_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(created_config(sizes)))
    assert shape_of(ModelConfig(name=str(tmp_path))) == shape_of(ModelConfig(create=sizes))
