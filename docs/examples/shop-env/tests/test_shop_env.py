"""Tests of shop-env: its tasks and its rewards."""

from itertools import islice

import pytest
from shop_env import PRICES, ShopEnvConfig, ShopEnvTaskset, look_up


def first(count: int, **options: int) -> list[tuple[str, str]]:
    config = ShopEnvConfig.model_validate({"id": "shop-env", **options})
    tasks = islice(ShopEnvTaskset(config).load(), count)
    return [(task.data.prompt, task.data.answer) for task in tasks]


def test_tasks_depend_on_the_options_alone():
    assert first(20) == first(20)
    assert first(20) != first(20, seed=1)
    assert {answer for _, answer in first(50, items=1)} <= set(map(str, PRICES.values()))


def test_the_tool_says_the_same_of_the_same_item():
    assert look_up(417) == look_up(417) == "44"
    with pytest.raises(ValueError, match="unknown item; numbers are 100 to 999"):
        look_up(7)
