"""The shared secret of a run: where it comes from and where it lies."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from lightning_omni.errors import ConfigurationError

KEY_BYTES = 32
ENVIRONMENT = "LIGHTNING_OMNI_KEY"


def new_key() -> bytes:
    """A fresh random key."""
    return secrets.token_bytes(KEY_BYTES)


def default_path() -> Path:
    """Where a user's key lies: shared by all machines that share the home directory."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "lightning-omni" / "key"


def key_of_environment() -> bytes | None:
    """The key in ``LIGHTNING_OMNI_KEY``, or None if that is not set.

    Raises:
        ConfigurationError: what it holds is no key.
    """
    text = os.environ.get(ENVIRONMENT)
    return _parse(text, f"the environment variable {ENVIRONMENT}") if text else None


def load(path: Path | None = None) -> bytes:
    """The key for a server that runs already.

    Args:
        path: a key file; by default the environment variable ``LIGHTNING_OMNI_KEY`` (hexadecimal), then the file
            that ``lightning-omni serve`` makes.

    Raises:
        ConfigurationError: there is none, or it is not a key.
    """
    if path is None and (key := key_of_environment()) is not None:
        return key
    file = path or default_path()
    try:
        text = file.read_text()
    except OSError as error:
        raise ConfigurationError(
            f"no key for the parameter server: cannot read {file} ({error.strerror}); copy the key file that"
            f" `lightning-omni serve` made to this machine, or set {ENVIRONMENT}"
        ) from error
    return _parse(text, str(file))


def load_or_create(path: Path | None = None) -> tuple[bytes, Path | None]:
    """The user's key, made on first use, readable by the user alone.

    Returns:
        The key, and the file that it came from (None if it came from the environment).
    """
    if path is None and os.environ.get(ENVIRONMENT):
        return load(), None
    file = path or default_path()
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as handle:
            handle.write(new_key().hex() + "\n")
    return load(file), file


def _parse(text: str, where: str) -> bytes:
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) < KEY_BYTES:
        raise ConfigurationError(f"{where} does not hold a key: {KEY_BYTES} bytes in hexadecimal are expected")
    return key
