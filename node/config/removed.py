"""Config keys that were removed, and what takes their place.

A key stays here for a release: an old config is refused with a line that says what to do now.
"""

REMOVED = {
    "monitors.tensorboard": "set monitors.wandb, or read metrics.jsonl, which is always written",
    "monitors.trackio": "set monitors.wandb, or read metrics.jsonl, which is always written",
    "verification.calibration": "a run in bfloat16 measures its bounds of noise itself: remove it",
}
"""Dotted key or section -> what to do now."""


def replacement(name: str) -> str:
    """Return what takes the place of a removed dotted key, or of the section that it is in; else ""."""
    parts = name.replace("-", "_").split(".")
    keys = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((REMOVED[key] for key in keys if key in REMOVED), "")
