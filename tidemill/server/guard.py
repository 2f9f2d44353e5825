"""Who may ask what: keys, hosts, origins and paths, looked at before anything else is done.

Keys are kept as SHA-256 digests and compared in constant time. A page of another origin cannot use a visitor's browser to get
here: its Origin is refused, and so is a Host that is not ours (a name that was made to point at this machine).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.errors import ConfigError, InvalidRequest, TidemillError
from tidemill.server import page
from tidemill.server.body import MAX_BODY_BYTES, MAX_UPLOAD_BYTES
from tidemill.server.call import Call, check_id
from tidemill.server.errors import error_body

OPEN_PATHS = frozenset({"/health"}) | page.PATHS  # for whoever restarts servers; what asks for the key, and holds nothing else
ADMIN_PATHS = frozenset({"/metrics", "/v1/engine/live"})
_MIN_KEY_CHARS = 16
_FOR_PAGES = ((b"access-control-expose-headers", b"x-request-id"), (b"vary", b"origin"))


class Unauthorized(TidemillError):
    kind = "authentication_error"
    status = 401
    code = "invalid_api_key"


class Forbidden(TidemillError):
    kind = "permission_error"
    status = 403


class NotFound(InvalidRequest):
    status = 404


class TooLarge(InvalidRequest):
    status = 413


@dataclass(frozen=True, kw_only=True)
class Access:
    """Nothing given: everybody who reaches the address may use it."""

    keys: tuple[bytes, ...] = ()  # digests
    admin_keys: tuple[bytes, ...] = ()  # may do everything; without any, ordinary keys may
    hosts: frozenset[str] = frozenset()  # names besides localhost and addresses
    origins: frozenset[str] = frozenset()  # of web pages besides our own

    @staticmethod
    def of(keys: list[str], key_file: str | None, admin_keys: list[str], hosts: list[str], origins: list[str]) -> Access:
        given = list(keys)
        if key_file is not None:
            try:
                given += [line.strip() for line in Path(key_file).read_text().splitlines() if line.strip() and line[0] != "#"]
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"The key file cannot be read: {error}.") from error
        return Access(
            keys=tuple(_digest_given(key) for key in given),
            admin_keys=tuple(_digest_given(key) for key in admin_keys),
            hosts=frozenset(host.lower() for host in hosts),
            origins=frozenset(origin.rstrip("/").lower() for origin in origins),
        )

    def knows(self, tenant: str) -> bool:
        """Is this still the name of a key (or of nobody, where there are none)?"""
        known = (*self.keys, *self.admin_keys)
        return tenant in {tenant_name(digest) for digest in known} if known else not tenant

    def check_host_is_safe(self, host: str) -> None:
        """Without keys, only this machine may ask."""
        if not self.keys and not self.admin_keys and not _is_loopback(host):
            raise ConfigError(
                f"Listening on {host} without an API key would serve everybody who can reach this machine.",
                fix="Give --api-key or --api-key-file, or listen on 127.0.0.1.",
            )


@dataclass(frozen=True, slots=True)
class Caller:
    """`tenant`: a name for the key, by which requests share and prefixes are kept apart; empty without keys."""

    tenant: str = ""
    is_admin: bool = False
    in_background: bool = False  # not a person who waits, but a batch
    call: Call = field(default_factory=Call)

    def rename(self, request_id: str) -> None:
        """The body, too, may name the call."""
        if self.call.is_named and request_id != self.call.request_id:
            name = self.call.request_id
            raise InvalidRequest(f"The request is called {name!r} already.", fix="Give one id.", param="request_id")
        self.call.request_id = request_id


def tenant_name(digest: bytes) -> str:
    return digest.hex()[:16]


def _digest_given(key: str) -> bytes:
    if re.fullmatch(r"sha256:[0-9a-f]{64}", key):
        return bytes.fromhex(key[7:])
    if len(key) < _MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"An API key must be {_MIN_KEY_CHARS} or more printable ASCII characters without spaces, or sha256:HEX.",
            fix="Make one with: python3 -c 'import secrets; print(secrets.token_urlsafe(24))'",
        )
    return hashlib.sha256(key.encode()).digest()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Guard:
    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers.get(b"origin", "").rstrip("/").lower()
        call: Call = scope["state"]["call"]
        try:
            if b"x-request-id" in headers:
                check_id(headers[b"x-request-id"])
            self._check_path(scope)
            if sum(name == b"host" for name, _ in scope["headers"]) > 1:
                raise InvalidRequest("There is more than one Host header.")
            self._check_host(headers.get(b"host", ""))
            self._check_origin(origin, headers.get(b"host", ""))
            self._check_length(scope["path"], headers.get(b"content-length", "0"))
            if scope["method"] == "OPTIONS":
                await _preflight(origin, send)
                return
            caller = self._caller(scope["path"], headers)
        except TidemillError as error:
            call.error = error.kind
            await _refuse(error, send)
            return
        call.tenant = caller.tenant
        scope["state"]["caller"] = replace(caller, call=call)
        await self._app(scope, receive, _with_origin(send, origin) if origin in self._access.origins else send)

    def _check_path(self, scope: Scope) -> None:
        raw = scope.get("raw_path", b"").lower()
        if b"//" in raw or b"%2f" in raw or b"%5c" in raw or b"%00" in raw or b"/.." in raw or b"\\" in raw:
            raise NotFound("There is nothing under this path.")

    def _check_host(self, given: str) -> None:
        try:
            host = (urlsplit(f"//{given}").hostname or "").lower()
        except ValueError:
            host = ""
        if host == "localhost" or host in self._access.hosts:
            return
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise Forbidden(
                f"The host {given[:100]!r} is not served here.", fix="Serve with --allowed-host if this name is yours."
            ) from None

    def _check_origin(self, origin: str, host: str) -> None:
        if origin and origin not in self._access.origins and origin.partition("://")[2] != host.lower():
            raise Forbidden(
                f"Pages of {origin[:100]!r} may not ask here.", fix="Serve with --allowed-origin if that page is yours."
            )

    def _check_length(self, path: str, length: str) -> None:
        most = MAX_UPLOAD_BYTES if path == "/v1/files" else MAX_BODY_BYTES
        if not length.isascii() or not length.isdigit() or int(length[:20]) > most:
            raise TooLarge(f"The body may have {most} bytes.")

    def _caller(self, path: str, headers: dict[bytes, str]) -> Caller:
        access = self._access
        if path in OPEN_PATHS or not (access.keys or access.admin_keys):
            return Caller(is_admin=not access.admin_keys)
        scheme, _, token = headers.get(b"authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else headers.get(b"x-api-key", "")
        digest = hashlib.sha256(key.encode("latin-1")).digest()
        # Every digest is compared, whichever fits: how long it takes tells nothing.
        is_admin = sum(hmac.compare_digest(digest, known) for known in access.admin_keys) > 0
        is_known = sum(hmac.compare_digest(digest, known) for known in access.keys) > 0
        if not key or not (is_admin or is_known):
            raise Unauthorized(
                "The API key is missing." if not key else "The API key is not valid.",
                fix="Send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
            )
        if path in ADMIN_PATHS and access.admin_keys and not is_admin:
            raise Forbidden("This needs an admin key.")
        return Caller(tenant_name(digest), is_admin)  # ids are clients' to give: only an admin may mean another's


async def _refuse(error: TidemillError, send: Send) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(error_body(error)).encode()})


async def _preflight(origin: str, send: Send) -> None:
    """A browser asks first. It got here, so its page may."""
    headers = [
        (b"access-control-allow-origin", origin.encode()),
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-allow-headers", b"authorization, content-type, x-api-key, x-request-id, anthropic-version"),
        (b"vary", b"origin"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers if origin else []})
    await send({"type": "http.response.body"})


def _with_origin(send: Send, origin: str) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (b"access-control-allow-origin", origin.encode()), *_FOR_PAGES]
        await send(message)

    return sending
