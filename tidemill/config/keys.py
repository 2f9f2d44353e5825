"""The key of a group whose workers are on several hosts."""

from __future__ import annotations

from pathlib import Path

from tidemill.errors import ConfigError

_LEAST = 16


def read_key(path: str, param: str = "workers_key_file") -> bytes:
    try:
        key = Path(path).expanduser().read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"The key file {path} cannot be read: {error.strerror}.", param=param
        ) from error
    if len(key) < _LEAST:
        fix = "Make one with: openssl rand -hex 32 > FILE, and copy it to all hosts."
        raise ConfigError(
            f"The key in {path} is shorter than {_LEAST} characters.", fix=fix, param=param
        )
    return key
