"""Polynomials over GF(65497), many at a time: through given points, and their values.

Every product is of two numbers below 2^16 and at most 128 of them are summed, so int64 and float64 are exact.
"""

import numpy as np
from numpy.typing import NDArray

PRIME = 65497
"""The field of TOPLOC: the largest prime below 2^16 that leaves room for a modulus in 16 bits."""

Ints = NDArray[np.int64]


def interpolate(points: Ints, values: Ints) -> Ints:
    """Coefficients [n, k], the constant first, of the n polynomials of degree < k through k points each.

    `points` [n, k] are distinct in each row; `values` [n, k]; both in 0..PRIME-1. Lagrange's form: with
    M(x) = prod (x - x_i) and u_i = y_i / M'(x_i), the sum of u_i M(x) / (x - x_i) has the coefficients
    c_j = sum_t m_(j+1+t) s_t, where s_t = sum_i u_i x_i^t.
    """
    count = points.shape[1]
    shares = values * _inverse(_slopes(points)) % PRIME
    powers = _powers(points, count).astype(np.float64)
    sums = np.einsum("nk,nkt->nt", shares.astype(np.float64), powers).astype(np.int64) % PRIME
    master = _master(points)
    rows = [
        np.convolve(roots[1:], totals[::-1])[count - 1 :]
        for roots, totals in zip(master, sums, strict=True)
    ]
    return np.stack(rows) % PRIME


def evaluate(coefficients: Ints, points: Ints) -> Ints:
    """Values [n, q] of n polynomials [n, k] at q points each [n, q], all in 0..PRIME-1."""
    powers = _powers(points, coefficients.shape[1]).astype(np.float64)
    values = np.einsum("nk,nqk->nq", coefficients.astype(np.float64), powers)
    return values.astype(np.int64) % PRIME


def _powers(points: Ints, count: int) -> Ints:
    """[n, q, count]: every point to the powers 0..count-1, by doubling."""
    powers = np.ones((*points.shape, count), np.int64)
    done, step = 1, points[..., None]
    while done < count:
        more = min(done, count - done)
        powers[..., done : done + more] = powers[..., :more] * step % PRIME
        done, step = done + more, step * step % PRIME
    return powers


def _slopes(points: Ints) -> Ints:
    """M'(x_i) [n, k]: the product of the differences of each point to all others."""
    factors = (points[:, :, None] - points[:, None, :]) % PRIME
    diagonal = np.arange(points.shape[1])
    factors[:, diagonal, diagonal] = 1
    while factors.shape[2] > 1:
        if factors.shape[2] % 2:
            factors = np.concatenate([factors, np.ones_like(factors[:, :, :1])], axis=2)
        factors = factors[:, :, ::2] * factors[:, :, 1::2] % PRIME
    return factors[:, :, 0]


def _master(points: Ints) -> Ints:
    """Coefficients [n, k + 1] of M, the constant first."""
    count = points.shape[1]
    master = np.zeros((len(points), count + 1), np.int64)
    master[:, 0] = 1
    for done in range(count):
        grown = -points[:, done, None] * master[:, : done + 2]
        grown[:, 1:] += master[:, : done + 1]
        master[:, : done + 2] = grown % PRIME
    return master


def _inverse(numbers: Ints) -> Ints:
    """1 / numbers, by Fermat: to the power of PRIME - 2."""
    result, base, left = np.ones_like(numbers), numbers, PRIME - 2
    while left:
        if left & 1:
            result = result * base % PRIME
        base, left = base * base % PRIME, left >> 1
    return result
