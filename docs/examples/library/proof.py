"""Draw a reply with its proof, and verify it offline: the honest one, and a forged one.

python docs/examples/library/proof.py MODEL_DIR, such as outputs/demo/weights/step_160
"""

import asyncio
import dataclasses
import sys
from pathlib import Path

import primerl

model_dir = Path(sys.argv[1])
states = {7: primerl.read_state(model_dir)}  # version -> weights
prompt = list(b"reverse this")  # token ids, from the model's own tokenizer

item = asyncio.run(primerl.draw(model_dir, states[7], prompt, version=7, seed=11, max_tokens=32))
print(f"{len(item.logprobs)} tokens, {len(item.proof)} bytes of proof")

other = dataclasses.replace(item, token_ids=[*item.token_ids[:-1], item.token_ids[-1] ^ 1])
claims = {
    "honest": item,
    "one token exchanged": other,
    "another seed": dataclasses.replace(
        item, replies=[dataclasses.replace(item.replies[0], seed=12)]
    ),
    "logprobs made up": dataclasses.replace(item, logprobs=[-0.5] * len(item.logprobs)),
    "half a proof": dataclasses.replace(item, proof=item.proof[: len(item.proof) // 2]),
}
verdicts = primerl.audit(model_dir, list(claims.values()), states)
for name, verdict in zip(claims, verdicts, strict=True):
    print(f"{name}: {verdict.reason or 'accepted'} {verdict.detail}".rstrip())
