"""Hidden states that resemble those of trained models, honest and altered.

What such states have and plain noise has not: heavy tails, channels of very different size (two of them
massive), and a part that all tokens share. All three make unrelated texts look alike.
`cd tests && python -m fingerprint_cases` prints what is measured.
"""

import numpy as np
from numpy.typing import NDArray

from primerl.node.inference.fingerprint import Compared, Projection

Hidden = NDArray[np.float32]
Random = np.random.Generator
WIDTH = 1024


def model(random: Random, width: int = WIDTH) -> tuple[Hidden, Hidden]:
    """(The size of each channel, the part that all tokens share)."""
    size = np.exp(0.5 * random.standard_normal(width))
    shared = 0.5 * size * random.standard_normal(width)
    massive = random.choice(width, 2, replace=False)
    shared[massive] = (12.0, -9.0)
    return size.astype(np.float32), shared.astype(np.float32)


def text(random: Random, tokens: int, channels: tuple[Hidden, Hidden]) -> Hidden:
    """States [tokens, width] of a text, each of mean square 1 as behind a norm."""
    size, shared = channels
    states = shared + size * random.standard_t(4, (tokens, len(size)))
    return (states / np.sqrt(np.mean(states**2, axis=1, keepdims=True))).astype(np.float32)


def noisy(random: Random, states: Hidden, relative: float) -> Hidden:
    """The same states with noise of that size in each token, larger in larger channels."""
    noise = np.sqrt(np.mean(states**2, axis=0)) * random.standard_normal(states.shape)
    length = np.linalg.norm(noise, axis=1, keepdims=True)
    noise *= relative * np.linalg.norm(states, axis=1, keepdims=True) / length
    return (states + noise).astype(np.float32)


def exact(tokens: int, width: int = 64) -> Hidden:
    """States of small whole numbers: with a width of 4^n every sum of them is exact, in any order."""
    at = np.arange(tokens * width, dtype=np.uint64) * np.uint64(2654435761) >> np.uint64(7)
    return (at % np.uint64(255)).astype(np.float32).reshape(tokens, width) - 127


def ratio(compared: Compared) -> float:
    """The log-likelihood ratio of the first other policy against the own one."""
    return compared.samples / 2 * float(np.log(compared.own / compared.others[0]))


def changed(random: Random, states: Hidden, channels: tuple[Hidden, Hidden]) -> dict[str, Hidden]:
    """Hidden states that a cheat may use, by name."""
    return {
        "equal": states,
        "noise 0.1 %": noisy(random, states, 0.001),
        "noise 1 %": noisy(random, states, 0.01),
        "noise 5 %": noisy(random, states, 0.05),
        "noise 20 %": noisy(random, states, 0.2),
        "x 1.05": states * np.float32(1.05),
        "signs flipped": -states,
        "tokens shuffled": states[random.permutation(len(states))],
        "tokens one late": np.roll(states, 1, axis=0),
        "another text": text(random, len(states), channels),
        "another model": text(random, len(states), model(random, states.shape[1])),
        "zeros": np.zeros_like(states),
        "one state again and again": np.repeat(states[:1], len(states), axis=0),
    }


def measured(rollouts: int, tokens: int, other: float) -> NDArray[np.float64]:
    """Ratios [2, rollouts] of honest rollouts and of those of a policy `other` away; 1 % noise."""
    random, scheme = np.random.default_rng(7), Projection()
    channels = model(random)
    ratios = np.empty((2, rollouts))
    for at in range(rollouts):
        right = text(random, tokens, channels)
        wrong = noisy(random, right, other)
        for cheat, truth in enumerate((right, wrong)):
            proof = scheme.make(noisy(random, truth, 0.01))
            ratios[cheat, at] = ratio(scheme.compare(proof, right, [wrong]))
    return ratios


def main() -> None:
    """Print distances of 64 tokens, and what the matched filter sees."""
    random = np.random.default_rng(3)
    channels = model(random)
    states = text(random, 64, channels)
    scheme = Projection()
    print(f"{'made of':<28}{scheme.name:>12}")
    for case, other in changed(random, states, channels).items():
        print(f"{case:<28}{scheme.compare(scheme.make(other), states).distance:12.4f}")
    for other in (0.001, 0.002, 0.005):
        honest, cheat = measured(100, 64, other)
        told = (f"{one.mean():.2f} +- {one.std():.2f}" for one in (honest, cheat))
        print(f"other policy {other:.1%} away, nats per 64 tokens:", *told)


if __name__ == "__main__":
    main()
