"""Hints for a teacher: what it reads of a task's right reply, and what happens without one."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.chat_model import make_chat_model
from support.counting_environment import CountingEnvironment
from support.training_cases import group

from primerl.node.config.run import EnvironmentConfig
from primerl.node.config.training import TrainingConfig
from primerl.node.environments.chat import ChatFormat
from primerl.node.environments.environment import Task
from primerl.node.environments.verifiers import VerifiersEnvironment
from primerl.node.ops.errors import UsageError
from primerl.node.trainer.demonstrations import Demonstrations, Hints
from primerl.node.training.advantages import credit

TEMPLATE = "The answer is {demonstration}. Say {it} yourself."


class Answerless(CountingEnvironment):
    """Nobody knows its answers."""

    async def demonstration(self, task: Task) -> None:
        """See Environment."""
        return None


async def test_samples_get_the_right_reply_of_their_own_task_as_a_system_message(
    tmp_path: Path,
) -> None:
    model_dir = make_chat_model(tmp_path)
    environment = VerifiersEnvironment(
        EnvironmentConfig(id="reverse-text"),
        model_dir=model_dir,
        seed=0,
        max_tokens=16,
        temperature=1.0,
    )
    await environment.start()
    chat = ChatFormat.load(model_dir)
    hints = Hints(TEMPLATE, chat, {"reverse-text": environment})
    await hints.check()
    groups = [
        replace(group([0.0, 1.0], task=task.digest), task_index=index)
        for index, task in [(n, await environment.task(n)) for n in (3, 8)]
    ]
    for one in groups:  # every branch has a list of its own, as where it is received
        one.rollouts[:] = [
            replace(r, branches=[replace(b, token_ids=[*b.token_ids]) for b in r.branches])
            for r in one.rollouts
        ]
    samples = credit(groups, TrainingConfig()).samples
    found = await Demonstrations(hints=hints).added_to(samples, groups)
    for number, index in enumerate((3, 8)):
        text = bytes((await environment.prompt(await environment.task(index)))[1:-2]).decode()
        wanted = f"<|system|>The answer is {text[::-1]}. Say {{it}} yourself.<|im_end|>"
        for one in found[2 * number : 2 * number + 2]:
            assert chat.shown(one.hint, special=True) == wanted
    assert [replace(one, hint=[]) for one in found] == samples

    other = replace(groups[0], task=bytes(32))  # a task that is another one here
    assert await hints.of(other) == []
    await environment.close()


async def test_an_environment_without_right_replies_is_named_at_the_start(tmp_path: Path) -> None:
    chat = ChatFormat.load(make_chat_model(tmp_path))
    hints = Hints(TEMPLATE, chat, {"mine": Answerless()})
    with pytest.raises(UsageError, match="'mine' have no right reply"):
        await hints.check()
    assert await hints.of(replace(group([0.0, 1.0]), environment="mine", task_index=0)) == []
