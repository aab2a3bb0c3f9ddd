import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from support import loss_cases

from primerl.node.config.training import LossConfig
from primerl.node.ops.errors import UsageError
from primerl.node.training.losses import formula, policy_loss

torch.set_num_threads(1)

SOURCE = """
from primerl.node.training.losses import TokenInputs, TokenLoss

IMPORTED = []
NOT_A_FUNCTION = 3


def reinforce(inputs: TokenInputs, scale: float = 1.0) -> TokenLoss:
    IMPORTED.append(len(inputs.logprobs))
    return TokenLoss.unmasked(-scale * inputs.advantages * inputs.logprobs)


def tensor_only(inputs):
    return -inputs.logprobs


def total(inputs):
    return TokenLoss.unmasked(-inputs.logprobs.sum())


def short(inputs):
    return TokenLoss.unmasked(-inputs.logprobs[1:])


def detached(inputs):
    return TokenLoss.unmasked(-inputs.logprobs.detach())


def infinite(inputs):
    return TokenLoss.unmasked(-inputs.logprobs * 1e308 * 1e10)


def half_masked(inputs):
    return TokenLoss(-inputs.logprobs, inputs.logprobs < -1, inputs.logprobs * 0)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package of the operator's own, on the path."""
    folder = tmp_path / "own_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "losses.py").write_text(SOURCE)
    (folder / "broken.py").write_text("def loss(:\n")
    (folder / "needy.py").write_text("import no_such_library_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_package.losses"
    for name in [name for name in sys.modules if name.partition(".")[0] == "own_package"]:
        del sys.modules[name]


def custom(path: str, **arguments: object) -> LossConfig:
    return LossConfig(type="custom", custom=path, custom_args=arguments)


def test_a_loss_of_ones_own_is_divided_and_measured_like_any(package: str) -> None:
    given = loss_cases.tokens()
    tokens = given.inputs()
    loss, sums = policy_loss(custom(f"{package}:reinforce", scale=2.0), tokens, 30)
    (slope,) = torch.autograd.grad(loss, tokens.logprobs)
    assert slope.numpy() == pytest.approx(-2.0 * given.advantage / 30)
    assert sums.metrics()["loss/mean"] == pytest.approx(loss.item() * 2)
    assert sums.metrics()["is_masked/mean"] == 0.0


def test_a_loss_of_ones_own_takes_the_reference_term(package: str) -> None:
    given = loss_cases.tokens()
    plain = custom(f"{package}:reinforce")
    both = plain.model_copy(update={"ref_kl_tau": 0.5, "ref_kl_mask_low": 0.15})
    term = policy_loss(both, given.inputs(), 15)[0] - policy_loss(plain, given.inputs(), 15)[0]
    kl = LossConfig(type="reverse_kl", kl_tau=0.0, ref_kl_mask_low=0.15)
    expected = policy_loss(kl, given.inputs(), 15)[0].item()
    assert term.item() == pytest.approx(0.5 * expected, rel=1e-9)


def test_its_module_is_run_once_and_it_is_not_called_without_tokens(package: str) -> None:
    config = custom(f"{package}:reinforce")
    for _ in range(2):
        policy_loss(config, loss_cases.tokens().inputs(), 15)
    loss, _ = policy_loss(config, loss_cases.tokens().of([]).inputs(), 15)
    loss.backward()
    assert sys.modules[package].IMPORTED == [15, 15]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("no_such_package:loss", "does not import.*no_such_package.*PYTHONPATH"),
        ("own_package.nowhere:loss", "does not import"),
        ("own_package.broken:loss", "does not import"),
        ("own_package.needy:loss", "no_such_library_at_all"),
        ("own_package.losses:misspelt", "no 'misspelt'"),
        ("own_package.losses:NOT_A_FUNCTION", "not a function"),
    ],
)
@pytest.mark.usefixtures("package")
def test_a_path_that_leads_nowhere_says_so_before_the_first_step(path: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        formula(custom(path))


def test_arguments_that_it_does_not_take_are_refused_before_the_first_step(package: str) -> None:
    with pytest.raises(UsageError, match=r"custom_args.*'scael'"):
        formula(custom(f"{package}:reinforce", scael=1.0))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tensor_only", "returned Tensor: return a TokenLoss"),
        ("total", "returned values of Tensor: one number per token"),
        ("short", r"returned values of \[14\]"),
        ("detached", "without gradient"),
        ("infinite", "15 values that are not finite"),
        ("half_masked", "not torch.bool"),
    ],
)
def test_what_is_no_loss_per_token_is_refused(package: str, name: str, says: str) -> None:
    with pytest.raises(UsageError, match=f"{name}.*{says}"):
        policy_loss(custom(f"{package}:{name}"), loss_cases.tokens().inputs(), 15)


def test_it_is_not_blamed_for_what_it_was_given(package: str) -> None:
    given = loss_cases.tokens()
    given.advantage[2] = float("nan")
    loss, _ = policy_loss(custom(f"{package}:reinforce"), given.inputs(), 15)
    assert not torch.isfinite(loss)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"type": "custom"}, "needs custom"),
        ({"type": "custom", "custom": "own_package.losses"}, "package.module:function"),
        ({"type": "custom", "custom": "/tmp/x.py:loss"}, "package.module:function"),
        ({"type": "custom", "custom": "a:b.c"}, "package.module:function"),
        ({"type": "custom", "custom": "..a:b"}, "package.module:function"),
        ({"custom": "a:b"}, "are of type"),
        ({"custom_args": {"scale": 2}}, "are of type"),
        ({"type": "reverse_kl", "ref_kl_tau": 0.1}, "leave ref_kl_tau out"),
        ({"type": "grpo_two_sided", "clip_high": 3.5}, "clip_ratio_max"),
        ({"type": "gspo", "sequence_clip_low": 1.0}, "less than 1"),
        ({"ref_kl_tau": float("nan")}, "greater than or equal"),
        ({"type": "dpo"}, "Input should be"),
    ],
)
def test_fields_that_do_not_go_together_are_refused_at_load(
    fields: dict[str, object], says: str
) -> None:
    with pytest.raises(ValidationError, match=says):
        LossConfig.model_validate(fields)
