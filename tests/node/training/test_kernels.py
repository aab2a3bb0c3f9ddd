"""FlashAttention-3 is used where it is installed and right, and nowhere else."""

import logging

import pytest
import torch

from primerl.node.training import attention


class Switch:
    """torch's switch, as far as it is used."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.fault = fault
        self.now = "built in"

    def on(self, name: str) -> None:
        if self.fault is not None:
            raise self.fault
        self.now = name

    def off(self) -> None:
        self.now = "built in"


def test_kernels_that_are_right_stay_switched_on() -> None:
    switch = Switch()
    assert attention.activate(switch.on, switch.off, lambda: True)
    assert switch.now == "FA3"


def test_kernels_that_compute_something_else_are_switched_off_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    switch = Switch()
    with caplog.at_level(logging.WARNING):
        assert not attention.activate(switch.on, switch.off, lambda: False)
    assert switch.now == "built in"
    assert "not used: it computes something else" in caplog.text


def test_a_package_that_cannot_be_used_is_named_and_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    switch = Switch(RuntimeError("does not expose FA3\nbackward kernels"))
    with caplog.at_level(logging.WARNING):
        assert not attention.activate(switch.on, switch.off, lambda: True)
    assert switch.now == "built in"
    assert "does not expose FA3 backward kernels" in caplog.text


def test_on_a_cpu_there_is_nothing_to_switch() -> None:
    assert not attention.use_flash_attention_3(torch.device("cpu"))


def test_the_comparison_notices_a_kernel_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain attention against itself, and against one that lets sequences see each other."""

    def plainly(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: attention.Layout
    ) -> torch.Tensor:
        return attention.attend_plainly(q, k, v, at.ends, 0.125)

    def leaking(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: attention.Layout
    ) -> torch.Tensor:
        return attention.attend_plainly(q, k, v, at.ends[-1:], 0.125)

    monkeypatch.setattr(attention, "_packed", plainly)
    assert attention.agrees(torch.device("cpu"))
    monkeypatch.setattr(attention, "_packed", leaking)
    assert not attention.agrees(torch.device("cpu"))
