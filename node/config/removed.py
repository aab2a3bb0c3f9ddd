"""Config keys that were removed, and what takes their place.

A key stays here for a release: an old config is refused with a line that says what to do now.
"""

from typing import Any

REMOVED = {
    ".base": (
        "a run whose first model is not known is evaluated with --no-eval-base: name that model in models"
    ),
    ".lease_timeout_s": (
        "a judge takes a prompt back after 120 s, a run by rollouts.lease_timeout_s"
    ),
    ".leases": "a worker measures how many leases keep its engine busy: leave it out",
    ".leases_per_worker": "a judge's worker holds 32 prompts, a run's rollouts.leases_per_worker",
    "api.max_body_mib": "a request has 8 MiB at most: leave it out",
    "api.max_choices": "a request has 128 completions at most: leave it out",
    "api.max_inflight": "1,024 completions are answered at once: leave it out",
    "api.max_stop_strings": "a request has 16 stop strings at most: leave it out",
    "api.stream_tokens": "a chunk of a stream has 32 tokens at most: leave it out",
    "checkpoint.async_save": "checkpoints are always written beside the steps: leave it out",
    "curriculum.sampler.type": "num_tasks alone chooses difficulty pools: leave it out",
    "data.max_bad_rows": "a run ends when 5 % of its rows are unusable: mend the data",
    "data.max_row_mib": "a row has 16 MiB at most: leave it out",
    "engine.batch_window_ms": "`hf` waits 3 ms for more requests: leave it out",
    "engine.concurrency": (
        "a worker measures how many sequences its engine holds, and engine.max_batch bounds them: leave it out"
    ),
    "engine.max_restarts": "an engine is restarted five times in a row: leave it out",
    "fsdp.max_restarts": "ranks are restarted three times from one checkpoint: leave it out",
    "fsdp.start_timeout_s": (
        "ranks have 600 s to start, or fsdp.timeout_s if that is longer: leave it out"
    ),
    "launch.share_gpus": "name the GPUs to share in both trainer_gpus and inference_gpus",
    "launch.start_timeout_s": "the trainer has 300 s to write its ticket: leave it out",
    "log.keep": "four log files that were put aside are kept: leave it out",
    "log.max_mib": "a log file is put aside at 16 MiB: leave it out",
    "loss.m2_threshold": "second_moment keeps a mean of 0.04, as its paper: leave it out",
    "loss.ref_kl_mask_low": "a token that fell by 0.2 is left out, as in prime-rl: leave it out",
    "loss.sequence_clip_high": "clip_high is that of the sequence's ratio with type gspo: set it",
    "loss.sequence_clip_low": "clip_low is that of the sequence's ratio with type gspo: set it",
    "monitors.tensorboard": "set monitors.wandb, or read metrics.jsonl, which is always written",
    "monitors.trackio": "set monitors.wandb, or read metrics.jsonl, which is always written",
    "network.connect_timeout_s": "a connection may take 10 s: leave it out",
    "network.libp2p_port": "libp2p takes the TCP port of network.port: leave it out",
    "network.max_streams_per_peer": "32 requests of one peer are answered at a time: leave it out",
    "network.max_upload_mbps": "set limits.upload, in Mbit/s, which also bounds submissions",
    "network.mdns": "nodes of one network find each other through the trainer: leave it out",
    "network.seed_ca": "name the certificates in the variable SSL_CERT_FILE",
    "pp.stall_s": "a stage that is silent for 20 s counts as lost: leave it out",
    "sft.max_bad_rows": "a run ends when 5 % of its rows are unusable: mend the data",
    "sft.max_row_mib": "a row has 16 MiB at most: leave it out",
    "ticket_ttl_s": (
        "a ticket lives a week, or as `primerl-node ticket --expires` says: leave it out"
    ),
    "ticket_uses": (
        "a ticket admits any number of nodes, or as `primerl-node ticket --uses` says: leave it out"
    ),
    "verification.audit_timeout_s": "an audit may take 120 s: leave it out",
    "verification.calibration": "a run in bfloat16 measures its bounds of noise itself: remove it",
    "verification.false_bans": (
        "an honest worker is banned with a probability of 0.001 in the whole run: leave it out"
    ),
    "verification.fingerprint": "there is one fingerprint, projection: leave it out",
    "weights.anchor_interval": (
        "a snapshot comes every ten versions, or once deltas outweigh it: leave it out"
    ),
    "weights.chunk_mib": "a chunk has 4 MiB at most: leave it out",
    "weights.head_ttl_s": "a chain head is accepted for a day: leave it out",
    "weights.keep_s": (
        "a version can be fetched for 60 s at least, and longer by weights.keep_versions: leave it out"
    ),
}
"""Dotted key or section -> what to do now; not below others if it begins with a dot."""


RENAMED = {("network", "max_upload_mbps"): ("limits", "upload")}
"""(section, key) -> those that mean the same now. Files may have the old ones for a release."""


DEFAULTS: dict[str, object] = {
    "api.max_inflight": 1024,
    "base": "",
    "data.max_bad_rows": 0.05,
    "data.max_row_mib": 16.0,
    "launch.share_gpus": False,
    "leases": 0,
    "loss.ref_kl_mask_low": 0.2,
    "network.mdns": False,
    "sft.max_bad_rows": 0.05,
    "sft.max_row_mib": 16.0,
    "weights.anchor_interval": 10,
    "weights.chunk_mib": 4.0,
}
"""Removed key, in its section -> default of the release before, which is what happens now.

Settings that a node of that release kept have all keys: these are nobody's choice.
"""


def drop_defaults(tree: dict[str, Any], section: str = "") -> None:
    """Drop removed keys that have their default from a config's file, in place."""
    for key, value in list(tree.items()):
        name = f"{section}.{key}".removeprefix(".")
        if isinstance(value, dict):
            drop_defaults(value, key)  # pyright: ignore[reportUnknownArgumentType]
        elif name in DEFAULTS and DEFAULTS[name] == value:
            del tree[key]


def rename(tree: dict[str, Any]) -> list[str]:
    """Move the values of renamed keys in a config's file, in place; return a line for each."""
    lines: list[str] = []
    for (old_section, old_key), (section, key) in RENAMED.items():
        source, target = tree.get(old_section), tree.setdefault(section, {})
        if isinstance(source, dict) and isinstance(target, dict) and old_key in source:
            value = source.pop(old_key)  # pyright: ignore[reportUnknownMemberType]
            target.setdefault(key, value)
            lines.append(f"{old_section}.{old_key} is {section}.{key} now")
        if not target:
            del tree[section]
    return lines


def replacement(name: str) -> str:
    """Return what takes the place of a removed dotted key, or of the section that it is in; else ""."""
    parts = ["", *(part for part in name.replace("-", "_").split(".") if not part.isdigit())]
    for end in range(len(parts), 1, -1):
        for start in range(end):
            if instead := REMOVED.get(".".join(parts[start:end])):
                return instead
    return ""
