"""Names of requests."""

import secrets


def new_id(kind: str) -> str:
    """A name that nobody can guess and nobody had before."""
    return f"{kind}-{secrets.token_hex(16)}"
