"""Access control: keys, hosts, origins and paths, checked before a request reaches any route.

Keys are kept as SHA-256 digests and compared in constant time. Each key is a tenant. A web page of
another origin cannot use a visitor's browser to reach the server: its Origin is refused, and so is
a Host that is not allowed (DNS rebinding).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.errors import ConfigError, InvalidRequest, TidemillError
from tidemill.sched.request import BACKGROUND
from tidemill.server import page
from tidemill.server.http.context import RequestContext
from tidemill.server.http.errors import error_body, format_error, headers_of
from tidemill.server.http.limits import MAX_BODY_BYTES, MAX_UPLOAD_BYTES
from tidemill.server.http.target import path_of

OPEN_PATHS = (
    frozenset({"/health", "/ready", "/ping"}) | page.PATHS
)  # for supervisors; the page holds no data
# They show the requests of all tenants, or change the models of all.
ADMIN_PATHS = frozenset({
    "/flush_cache", "/load", "/metrics", "/slots", "/v1/engine/live", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
})  # fmt: skip
MOST_URGENT, LEAST_URGENT = (
    -100,
    100,
)  # priorities of requests and keys; a lower number is more urgent
_MIN_KEY_CHARS = 16  # for others than this machine
_MAKE_KEY = "Make one with: python3 -c 'import secrets; print(secrets.token_urlsafe(24))'"
SHORT_KEY = (
    f"Note: an API key has fewer than {_MIN_KEY_CHARS} characters, so other programs of "
    "this machine may guess it."
)
_FOR_PAGES = (
    (
        b"access-control-expose-headers",
        b"x-request-id, x-tidemill-ignored, x-should-retry, retry-after",
    ),
    (b"vary", b"origin"),
)
_PREFLIGHT_S = 600  # for which a browser may remember the answer
KEY_HEADERS = (b"x-api-key", b"x-goog-api-key")  # of Anthropic's clients and of Google's
_ALLOWED_HEADERS = (
    "authorization, content-type, x-api-key, x-goog-api-key, x-request-id, anthropic-version"
)


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


# In place of an origin: any page, or any of this machine.
_ANY_ORIGIN, _LOCAL_ORIGINS = "*", "localhost"
_LOCAL = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeySettings:
    """The settings after a key in the key file."""

    priority: int = 0
    is_private: bool = False  # what it sends is sealed where requests are recorded

    def __str__(self) -> str:
        return f"priority={self.priority} record-text={'off' if self.is_private else 'on'}"


@dataclass(frozen=True, kw_only=True)
class Access:
    """Without keys, every client that reaches the address is accepted, and is an admin."""

    keys: Mapping[bytes, KeySettings] = field(default_factory=dict)  # by digest
    admin_keys: Mapping[bytes, KeySettings] = field(default_factory=dict)
    hosts: frozenset[str] = frozenset()  # names besides localhost and addresses
    origins: frozenset[str] = frozenset()  # of web pages besides the server's own
    request_templates: bool = False  # a request may bring a chat template
    has_short_key: bool = False  # one that can be guessed: for this machine only

    @staticmethod
    def of(
        keys: list[str],
        key_file: str | None,
        admin_keys: list[str],
        hosts: list[str],
        origins: list[str],
        request_templates: bool = False,
    ) -> Access:
        """A key, in an option or on a line of the file: `KEY` or `sha256:HEX`, then optionally `
        priority=N` and ` record-text=off`."""
        key_texts = [(key, "api_key", "") for key in keys]
        if key_file is not None:
            try:
                lines = list(enumerate(Path(key_file).expanduser().read_text().splitlines(), 1))
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"The key file cannot be read: {error}.", param="api_key_file"
                ) from error
            key_texts += [
                (line, "api_key_file", f"{key_file}, line {at}: ")
                for at, line in lines
                if line.strip() and line[0] != "#"
            ]
        given_admin = [(key, "admin_key", "") for key in admin_keys]
        return Access(
            keys=_parse_keys(key_texts),
            admin_keys=_parse_keys(given_admin),
            has_short_key=any(
                len(text.split()[0]) < _MIN_KEY_CHARS for text, _, _ in key_texts + given_admin
            ),
            hosts=frozenset(host.lower() for host in hosts),
            origins=frozenset(map(_origin_given, origins)),
            request_templates=request_templates,
        )

    @property
    def private_tenants(self) -> frozenset[str]:
        """Those whose requests are sealed where requests are recorded."""
        keys = {**self.keys, **self.admin_keys}
        return frozenset(tenant_name(digest) for digest, key in keys.items() if key.is_private)

    def check_host(self, host_header: str) -> None:
        try:
            host = (urlsplit(f"//{host_header}").hostname or "").lower()
        except ValueError:
            host = ""
        if host == "localhost" or host in self.hosts:
            return
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise Forbidden(
                f"The host {host_header[:100]!r} is not served here.",
                fix="Serve with --allowed-host if this name is yours.",
            ) from None

    def is_allowed(self, origin: str) -> bool:
        """Pages of another origin than the server's own may use it."""
        if origin in self.origins or (origin and _ANY_ORIGIN in self.origins):
            return True
        return _LOCAL_ORIGINS in self.origins and re.fullmatch(_LOCAL, origin) is not None

    def check_origin(self, origin: str, host: str) -> None:
        """`origin`: of the web page that sends the request; empty: none."""
        if origin and not self.is_allowed(origin) and origin.partition("://")[2] != host.lower():
            raise Forbidden(
                f"Pages of {origin[:100]!r} may not use this server.",
                fix="Serve with --allowed-origin if that page is yours.",
            )

    def caller(self, path: str, headers: Mapping[bytes, str]) -> Caller:
        """Who sends a request, by the key in its headers."""
        if path in OPEN_PATHS or not (self.keys or self.admin_keys):
            return Caller(is_admin=not self.admin_keys)
        scheme, _, token = headers.get(b"authorization", "").partition(" ")
        named = next((headers[name] for name in KEY_HEADERS if name in headers), "")
        key = token.strip() if scheme.lower() == "bearer" else named
        caller = self.caller_with(key) if key else None
        if caller is None:
            raise Unauthorized(
                "The API key is missing." if not key else "The API key is not valid.",
                fix=(
                    "Send it as 'Authorization: Bearer KEY', 'x-api-key: KEY' or "
                    "'x-goog-api-key: KEY'."
                ),
            )
        if is_admin_path(path):
            self.check_may_see_all(caller)
        return caller

    def caller_of(self, tenant: str) -> Caller | None:
        """The caller behind a stored tenant name; None if its key is no longer accepted."""
        if not self.keys and not self.admin_keys:
            return None if tenant else Caller(is_admin=True)
        for digest in (*self.admin_keys, *self.keys):
            if tenant_name(digest) == tenant:
                return self._caller(digest)
        return None

    def caller_with(self, key: str) -> Caller | None:
        """Every digest is compared, so that the time taken does not depend on which one matches."""
        key_digest = hashlib.sha256(key.encode("latin-1")).digest()
        found = [
            digest
            for digest in (*self.admin_keys, *self.keys)
            if hmac.compare_digest(key_digest, digest)
        ]
        return self._caller(found[0]) if found else None

    def _caller(self, digest: bytes) -> Caller:
        is_admin = digest in self.admin_keys
        return Caller(
            tenant_name(digest),
            is_admin,
            (self.admin_keys if is_admin else self.keys)[digest].priority,
        )

    def check_may_see_all(self, caller: Caller) -> None:
        """The admin may see requests of every tenant; a sole key has only its own to see."""
        if caller.is_admin or (not self.admin_keys and len(self.keys) == 1):
            return
        fix = (
            "Send an admin key."
            if self.admin_keys
            else "Start the server with --admin-key, and send that key."
        )
        raise Forbidden(
            "This shows the requests or changes the models of all tenants, so it needs an "
            "admin key.",
            fix=fix,
        )

    def check_host_is_safe(self, host: str) -> None:
        """Without keys, and with one that can be guessed, only this machine is served."""
        if not self.keys and not self.admin_keys and not _is_loopback(host):
            raise ConfigError(
                f"Listening on {host} without an API key would serve everybody who can reach "
                "this machine.",
                fix="Give --api-key or --api-key-file, or listen on 127.0.0.1.",
            )
        if not _is_loopback(host):
            self.check_keys_are_long(f"on {host}")

    def check_keys_are_long(self, where: str) -> None:
        if self.has_short_key:
            raise ConfigError(
                f"An API key of fewer than {_MIN_KEY_CHARS} characters can be guessed {where}.",
                fix=_MAKE_KEY,
            )


@dataclass(frozen=True, slots=True)
class Caller:
    """`tenant`: a name for the key: the unit of fair scheduling and of prefix cache isolation.
    Empty without keys."""

    tenant: str = ""
    is_admin: bool = False
    priority: int = 0  # of the key
    in_background: bool = False  # a line of a batch
    call: RequestContext = field(default_factory=RequestContext)

    def priority_of(self, requested: int | None) -> int:
        """The priority of a request that asks for this one. A key may lower the urgency of its
        requests; an admin may choose."""
        priority = self.priority if requested is None else requested
        most_urgent = MOST_URGENT if self.is_admin else self.priority
        if not most_urgent <= priority <= LEAST_URGENT:
            raise Forbidden(
                f"This key may ask for a priority from {most_urgent} to {LEAST_URGENT}; got "
                f"{priority} (lower is more urgent).",
                fix="Leave priority out, or send an admin key.",
                param="priority",
            )
        return priority - MOST_URGENT + BACKGROUND if self.in_background else priority


def is_admin_path(path: str) -> bool:
    """An admin's route, also under a prefix: the router does not know the root paths of its
    servers. None begins with /v1."""
    path = path.rstrip("/")
    return path in ADMIN_PATHS or (
        path.endswith(tuple(ADMIN_PATHS)) and not path.startswith("/v1/")
    )


def tenant_name(digest: bytes) -> str:
    return digest.hex()[:16]


def _origin_given(origin: str) -> str:
    if origin in (_ANY_ORIGIN, _LOCAL_ORIGINS):
        return origin
    url = urlsplit(origin)
    if (
        url.scheme not in ("http", "https")
        or not url.hostname
        or url.path.strip("/")
        or url.query
        or url.fragment
    ):
        fix = (
            "It must be a scheme and a host, and a port if there is one, like "
            "https://app.example.org; or localhost, or *."
        )
        raise ConfigError(f"An allowed origin is {origin!r}.", fix=fix, param="allowed_origin")
    return origin.rstrip("/").lower()


def _parse_keys(key_texts: Iterable[tuple[str, str, str]]) -> dict[bytes, KeySettings]:
    """The tenants by key. Each entry of `key_texts` is the text, the option it came from, and words
    that say where in it."""
    keys: dict[bytes, KeySettings] = {}
    for text, param, where in key_texts:
        key, _, settings = text.strip().partition(" ")
        try:
            digest, given = _key_digest(key), _settings_given(settings)
        except ConfigError as error:
            raise ConfigError(where + error.message, fix=error.fix, param=param) from None
        if keys.setdefault(digest, given) != given:
            raise ConfigError(
                f"A key is given twice, with {keys[digest]} and {given}.", fix="Give it once."
            )
    return keys


def _settings_given(text: str) -> KeySettings:
    given: dict[str, Any] = {}
    for word in text.split():
        name, _, value = word.partition("=")
        if name == "priority" and re.fullmatch("-?[0-9]{1,3}", value):
            given["priority"] = int(value)
        elif name == "record-text" and value in ("on", "off"):
            given["is_private"] = value == "off"
        else:
            break
    settings = KeySettings(**given)
    if len(given) == len(text.split()) and MOST_URGENT <= settings.priority <= LEAST_URGENT:
        return settings
    raise ConfigError(
        f"After an API key comes {text[:50]!r}.",
        fix=(
            f"Give nothing, priority=N with N from {MOST_URGENT} (most urgent) to "
            f"{LEAST_URGENT}, or record-text=off."
        ),
    )


def _key_digest(key: str) -> bytes:
    if re.fullmatch(r"sha256:[0-9a-f]{64}", key):
        return bytes.fromhex(key[7:])
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(
            "An API key must be printable ASCII characters without spaces, or sha256:HEX.",
            fix=_MAKE_KEY,
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
        call: RequestContext = scope["state"]["call"]
        if self._access.is_allowed(origin):
            send = _with_origin(send, origin)
        try:
            path_of(scope["state"].get("target") or scope.get("raw_path", b""))
            if sum(name == b"host" for name, _ in scope["headers"]) > 1:
                raise InvalidRequest("There is more than one Host header.")
            self._access.check_host(headers.get(b"host", ""))
            self._access.check_origin(origin, headers.get(b"host", ""))
            self._check_length(scope["path"], headers.get(b"content-length", "0"))
            if scope["method"] == "OPTIONS":
                await _preflight(origin, headers.get(b"access-control-request-headers", ""), send)
                return
            caller = self._access.caller(scope["path"], headers)
        except TidemillError as error:
            call.error = error.kind
            await _refuse(error, call, send)
            return
        call.tenant = caller.tenant
        scope["state"]["caller"] = replace(caller, call=call)
        await self._app(scope, receive, send)

    def _check_length(self, path: str, length: str) -> None:
        most = MAX_UPLOAD_BYTES if path == "/v1/files" else MAX_BODY_BYTES
        if not length.isascii() or not length.isdigit() or int(length[:20]) > most:
            raise TooLarge(f"The body may have {most} bytes.")


async def _refuse(error: TidemillError, call: RequestContext, send: Send) -> None:
    named = headers_of(error) | {"content-type": "application/json", "connection": "close"}
    if error.status == 401:
        named["www-authenticate"] = "Bearer"
    headers = [(name.lower().encode(), value.encode()) for name, value in named.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    body = format_error(call.path, error_body(error), error.status, call.name)
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


async def _preflight(origin: str, requested: str, send: Send) -> None:
    """A CORS preflight. Its origin has been checked. `requested`: names of headers; browser SDKs
    have many of their own."""
    allowed = requested if re.fullmatch(r"[A-Za-z0-9_ ,-]{1,4096}", requested) else _ALLOWED_HEADERS
    headers = [
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-allow-headers", allowed.encode()),
        (b"access-control-max-age", str(_PREFLIGHT_S).encode()),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers if origin else []})
    await send({"type": "http.response.body"})


def _with_origin(send: Send, origin: str) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [
                *message["headers"],
                (b"access-control-allow-origin", origin.encode()),
                *_FOR_PAGES,
            ]
        await send(message)

    return sending
