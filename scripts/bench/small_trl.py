"""Train SmolLM2 by TRL's GRPO with vLLM in its own process: what small.py compares with.

    python small_trl.py MODEL STEPS ANSWER

The tasks, batch, replies and learning rate are those of small.toml. Writes the time and the reward of the
steps so far to ANSWER as JSON, with each step.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from datasets import Dataset  # pyright: ignore[reportMissingTypeStubs]
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore

from primerl.node.environments.tasksets import alphabet_sort

TASKS = 8000
POWER = 4
"""Default of the taskset's similarity_power."""


class Steps(TrainerCallback):
    """Writes when each step was over, and its reward."""

    def __init__(self, answer: Path) -> None:
        self._answer = answer
        self._steps: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, **values: Any) -> None:
        """Note a step."""
        reward = (values.get("logs") or {}).get("reward")
        if reward is not None:
            self._steps.append({"at": time.time(), "reward": float(reward)})
            self._answer.write_text(json.dumps(self._steps))
            print(f"TRL step {state.global_step}: reward {float(reward):.3f}", flush=True)


def tasks() -> Dataset:
    """Return alphabet-sort's tasks of one turn as TRL takes them."""
    config = alphabet_sort.AlphabetSortConfig(
        min_turns=1, max_turns=1, min_names_per_turn=2, max_names_per_turn=3
    )
    taskset = alphabet_sort.AlphabetSortTaskset(config)
    rows: list[dict[str, Any]] = []
    for index in range(TASKS):
        data = taskset.task_at(index).data
        messages = data.prompt or []
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        prompt = [
            message
            if isinstance(message, dict)
            else message.model_dump(include={"role", "content"})
            for message in messages
        ]
        rows.append({"prompt": prompt, "names": list(data.answers[0])})
    return Dataset.from_list(rows)


def score(completions: list[Any], names: list[list[str]], **_: Any) -> list[float | None]:
    """Return the rewards that the taskset gives."""
    return [
        alphabet_sort.turn_score(completion[0]["content"], answer, alphabet_sort.FIRST_TAG, POWER)
        for completion, answer in zip(completions, names, strict=True)
    ]


def main() -> None:
    """Train, and write the steps."""
    model, steps, answer = sys.argv[1:]
    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.4,
            num_generations=16,
            per_device_train_batch_size=64,
            gradient_accumulation_steps=8,
            max_completion_length=96,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            bf16=True,
            logging_steps=1,
            max_steps=int(steps),
            save_strategy="no",
            report_to=[],
            beta=0.0,
            temperature=1.0,
            gradient_checkpointing=False,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=score,
            args=config,
            train_dataset=tasks(),
            callbacks=[Steps(Path(answer))],
        )
        trainer.train()


if __name__ == "__main__":
    main()
