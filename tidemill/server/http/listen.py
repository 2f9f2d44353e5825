"""The address the server listens at: a TCP port or a Unix socket, with or without TLS, and under
which path."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tidemill.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Listen:
    host: str = "127.0.0.1"
    port: int = 8000
    unix_socket: Path | None = None  # instead of host and port
    unix_socket_mode: int = 0o600
    tls_cert: Path | None = None
    tls_key: Path | None = None  # None: in the file of the certificate
    tls_client_ca: Path | None = None  # clients must show a certificate of it
    root_path: str = ""

    def __post_init__(self) -> None:
        if self.root_path and not re.fullmatch(
            r"(/(?!\.{1,2}(?:/|$))[A-Za-z0-9._~-]+)+", self.root_path
        ):
            raise ConfigError(
                f"The root path is {self.root_path!r}.",
                fix="Write it like /llm.",
                param="root_path",
            )
        if f"{self.root_path}/".startswith("/v1/"):
            what = f"The root path is {self.root_path!r}, and the API's own paths begin with /v1."
            raise ConfigError(what, fix="Choose another, like /llm.", param="root_path")

    def url(self, port: int) -> str:
        scheme = "https" if self.tls_cert else "http"
        if self.unix_socket is not None:
            return f"{scheme}://localhost{self.root_path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{port}{self.root_path}"

    def tls(self) -> dict[str, Any]:
        """The TLS settings of the HTTP server; raises for those that cannot work."""
        if self.tls_cert is None:
            if self.tls_key or self.tls_client_ca:
                raise ConfigError(
                    "There is a TLS key or client CA, but no certificate.",
                    fix="Give --tls-cert.",
                    param="tls_cert",
                )
            return {}
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for name, path in (
            ("cert", self.tls_cert),
            ("key", self.tls_key),
            ("client-ca", self.tls_client_ca),
        ):
            if path is not None and not Path(path).exists():
                raise ConfigError(
                    f"There is no file {str(path)!r}.", fix=f"Check --tls-{name}.", param="tls_cert"
                )
        try:
            context.load_cert_chain(
                self.tls_cert, self.tls_key, password=""
            )  # rather than to ask for one on the terminal
            if self.tls_client_ca is not None:
                context.load_verify_locations(self.tls_client_ca)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ConfigError(
                f"The TLS files cannot be used: {error}.",
                fix=(
                    "--tls-cert takes a certificate chain, --tls-key its private key without a "
                    "password, both as PEM."
                ),
                param="tls_cert",
            ) from error
        settings: dict[str, Any] = {"ssl_certfile": self.tls_cert, "ssl_keyfile": self.tls_key}
        if self.tls_client_ca is not None:
            settings |= {
                "ssl_ca_certs": str(self.tls_client_ca),
                "ssl_cert_reqs": ssl.CERT_REQUIRED,
            }
        return settings

    def open(self) -> socket.socket:
        return (
            _unix(self.unix_socket, self.unix_socket_mode)
            if self.unix_socket is not None
            else _tcp(self.host, self.port)
        )

    def close(self, listening: socket.socket) -> None:
        """Removes the Unix socket, unless another server has put its own there."""
        if self.unix_socket is not None:
            with contextlib.suppress(OSError):
                if (
                    isinstance(listening, _UnixSocket)
                    and os.lstat(self.unix_socket).st_ino == listening.inode
                ):
                    os.unlink(self.unix_socket)
        listening.close()


class _UnixSocket(socket.socket):
    inode = 0  # of its file


def _tcp(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise ConfigError(
            f"Cannot listen on {host}:{port}: {error}.", fix="Choose another --port or --host."
        ) from error
    return listening


def _unix(path: Path, mode: int) -> socket.socket:
    _remove_stale(path)
    listening = _UnixSocket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(0o777)  # nobody may connect before the mode is set
    try:
        listening.bind(str(path))
        os.chmod(path, mode)
        listening.inode = os.lstat(path).st_ino
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"Cannot listen on {path}: {error}.", fix="Choose another --unix-socket."
        ) from error
    finally:
        os.umask(umask)
    return listening


def _remove_stale(path: Path) -> None:
    """A socket that nobody listens on any more. Anything else under that path stays."""
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return
    if not is_socket:
        raise ConfigError(
            f"{path} exists and is not a socket.",
            fix="Choose another --unix-socket.",
            param="unix_socket",
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(5)
        found = probe.connect_ex(str(path))
    if found != errno.ECONNREFUSED:
        raise ConfigError(
            f"Another program listens on {path}.",
            fix="Stop it, or choose another --unix-socket.",
            param="unix_socket",
        )
    path.unlink(missing_ok=True)


class RootPathMiddleware:
    """A middleware for use behind a reverse proxy: takes the prefix off paths. A proxy may have
    done so already."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app, self._root = app, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "http" and scope["path"] == self._root
        ):  # the page's links are relative to a folder
            await RedirectResponse(f"{self._root}/", 308)(scope, receive, send)
            return
        if scope["type"] == "http" and scope["path"].startswith(f"{self._root}/"):
            raw = scope.get("raw_path", b"").removeprefix(self._root.encode())
            scope = dict(scope) | {"path": scope["path"].removeprefix(self._root), "raw_path": raw}
        await self._app(scope, receive, send)
