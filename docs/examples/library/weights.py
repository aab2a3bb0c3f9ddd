"""Encode the difference of two states, sign it, verify it elsewhere and apply it."""

import time

import numpy as np

import primerl


def tensor(values: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]") -> primerl.Tensor:
    """Make a tensor of float32; primerl.read_state(DIRECTORY) reads those of a model."""
    return primerl.Tensor("F32", values.shape, values.reshape(-1).view(np.uint32))


old = np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32)
new = old.copy()
new[::8, ::8] *= 1.001  # one weight in 64 has changed
key, run = primerl.SecretKey.generate(), bytes(32)
now = int(time.time())

first = primerl.make_update(key, run, {"layer": tensor(old)}, now=now, expires=now + 3600)
second = primerl.make_update(
    key, run, {"layer": tensor(new)}, after=first, now=now, expires=now + 3600
)
for update in (first, second):
    size = sum(map(len, update.chunks))
    print(f"version {update.policy.version}: {size:,} bytes of {old.nbytes:,}")

follower = primerl.WeightFollower(run, key.node_id)
follower.apply(first.head, first.manifest, first.chunks, now=now)
damaged = [bytes([second.chunks[0][0] ^ 1]) + second.chunks[0][1:], *second.chunks[1:]]
try:
    follower.apply(second.head, second.manifest, damaged, now=now)
except primerl.RemoteProtocolError as error:
    print(f"refused: {error}; version {follower.policy.version} is still held")
policy = follower.apply(second.head, second.manifest, second.chunks, now=now)
equal = np.array_equal(policy.state["layer"].data.view(np.float32).reshape(new.shape), new)
print(f"version {policy.version} is held; equal to the last bit: {equal}")
