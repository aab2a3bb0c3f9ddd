"""What a run says of lengths before it begins: prompts, and demonstrations of its warm-up."""

import logging
from collections.abc import AsyncIterator

import pytest
from support.counting_environment import CountingEnvironment

from primerl.node.app.startup import check_prompts, within
from primerl.node.environments.environment import Task
from primerl.node.errors import UsageError

Example = tuple[list[int], list[int]]


async def examples(*lengths: int) -> AsyncIterator[Example]:
    """Pairs of so many tokens, the last of which is the reply."""
    for length in lengths:
        yield [1] * (length - 1), [2]


async def test_prompts_that_leave_no_room_for_a_reply_are_refused() -> None:
    environment = CountingEnvironment()
    prompt = len(await environment.prompt(await environment.task(0)))
    await check_prompts(["counting"], [environment], prompt + 1, [1])
    with pytest.raises(UsageError, match=f"prompts of counting have {prompt} tokens and more"):
        await check_prompts(["counting"], [environment], prompt, [1])


class LongPrompts(CountingEnvironment):
    async def prompt(self, task: Task) -> list[int]:
        return [*await super().prompt(task)] * 4


async def test_replies_that_end_before_their_limit_are_reported_before_the_first_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    environment = LongPrompts()
    prompt = len(await environment.prompt(await environment.task(0)))
    with caplog.at_level(logging.WARNING):
        await check_prompts(["counting"], [environment], prompt + 10, [10])
        await check_prompts(["counting"], [environment], prompt + 10, [prompt + 9])  # what is left
        assert caplog.records == []
        await check_prompts(["counting"], [environment], prompt + 10, [11])
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"a prompt of counting has {prompt} tokens, and with sampling.max_tokens (11) more than the "
        f"{prompt + 10} of a sequence: replies end after 10;"
    )


async def test_a_warm_up_whose_demonstrations_are_all_too_long_is_refused_in_its_first_step() -> (
    None
):
    """It made step after step of nothing, with a loss of 0."""
    with pytest.raises(UsageError, match=r"have 13 tokens and more, and training\.seq_len is 12"):
        async for _ in within(examples(14, 13, 15, 12), 12, 3):
            pass


async def test_demonstrations_that_are_too_long_are_left_out_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        left = [one async for one in within(examples(12, 13, 13, 13, 5), 12, 2)]
    assert [len(prompt) + len(reply) for prompt, reply in left] == [12, 5]
    assert [record.getMessage()[:31] for record in caplog.records] == [
        "a demonstration has 13 tokens, ",
        "the warm-up left out 3 of 5 dem",
    ]
