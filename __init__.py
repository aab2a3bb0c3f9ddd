"""primerl: a peer-to-peer node for decentralised reinforcement learning of language models.

The repository root is this package (see `package-dir` in pyproject.toml).
Start reading in `node/trainer/loop.py` and `node/worker/loop.py`.
"""

__version__ = "0.1.0"
