"""Addresses of servers."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from tidemill.errors import ConfigError


@dataclass(frozen=True)
class Address:
    """The URL that paths are appended to, and the Unix socket of a server that listens on one."""

    url: str
    unix_socket: str | None = None

    @staticmethod
    def parse(text: str) -> Address:
        """Read http(s)://HOST[:PORT][/ROOT], HOST:PORT or unix:PATH[:/ROOT]. A root may end with
        /v1, as other clients of the OpenAI API want it: the paths of requests begin with it."""
        if text.startswith("unix:"):
            path, _, root = text.removeprefix("unix:").removeprefix("//").partition(":/")
            if not path or "\0" in path:
                raise _not_an_address(text)
            return Address(f"http://localhost{_root(f'/{root}')}", path)
        try:
            has_scheme = "://" in text
            parts = urlsplit(text if has_scheme else f"http://{text}")
            httpx.URL(parts.geturl())  # refuses what is no host
            host, port = parts.hostname or "", parts.port
            host.encode("idna")  # refuses empty parts of a name, and long ones
            is_whole = bool(host) and (has_scheme or port is not None)
        except (ValueError, httpx.InvalidURL):
            raise _not_an_address(text) from None
        extra = parts.query or parts.fragment or parts.username is not None
        is_http = parts.scheme in ("http", "https")
        if not is_http or not is_whole or extra or any(map(str.isspace, text)):
            raise _not_an_address(text)
        return Address(f"{parts.scheme}://{parts.netloc}{_root(parts.path)}")


def _root(path: str) -> str:
    return path.rstrip("/").removesuffix("/v1").rstrip("/")


def _not_an_address(text: str) -> ConfigError:
    fix = "Write it like http://HOST:PORT, HOST:PORT or unix:PATH (--url)."
    return ConfigError(f"{text!r} is not the address of a server.", fix=fix, param="url")
