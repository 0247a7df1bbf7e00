"""In front of the router's application: who may ask what, at which port, how often, and until when it is answered.

| access | without a key | with a user key | with an admin key |
|---|---|---|---|
| OPEN | yes | yes | yes |
| USER | no | yes | yes |
| PAGE | yes | yes | yes |
| READ, CONTROL | no | no | yes |

A router without keys lets everybody do everything; but where others than this machine can reach it, only this machine
may CONTROL, and a web page that somebody has open there never may. PAGE, READ and CONTROL are the administration: with
an admin port they exist only there.
"""

from __future__ import annotations

import asyncio
import enum
import re
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import AccessError, RequestError, ServingError
from common.http_server import error_response
from common.keys import Caller, KeyRing, KeyRole
from common.net import is_loopback
from router.admission import Terms
from router.reply import head_fields

TIMEOUT_HEADER = b"x-request-timeout-s"

_TIMEOUT = re.compile(rb"[0-9]{1,9}(\.[0-9]{0,9})?")
_TERMS = "terms"


class Access(enum.Enum):
    OPEN = "open"
    USER = "user"
    PAGE = "page"
    READ = "read"
    CONTROL = "control"


_ABORT = "/abort_request"
_ACCESS = {
    "/health": Access.OPEN,
    "/openapi.json": Access.OPEN,
    "/generate": Access.USER,
    "/health_generate": Access.USER,
    _ABORT: Access.USER,
    "/model_info": Access.USER,
    "/get_model_info": Access.USER,
    "/tokenize": Access.USER,
    "/detokenize": Access.USER,
    "/": Access.PAGE,
    "/server_info": Access.READ,
    "/get_server_info": Access.READ,
    "/metrics": Access.READ,
    "/status.json": Access.READ,
    "/debug/requests": Access.READ,
}
_USER_PREFIX = "/v1/"
_PAGE_PREFIX = "/page/"
_UNCOUNTED = frozenset([_ABORT, "/model_info", "/get_model_info", "/v1/models"])
"""What a rate limit does not count of the USER paths."""


def access_of(path: str) -> Access:
    """What is not listed is for administrators."""
    if path.startswith(_USER_PREFIX):
        return Access.USER
    if path.startswith(_PAGE_PREFIX):
        return Access.PAGE
    return _ACCESS.get(path, Access.CONTROL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """How the administration can be reached. is_local: from this machine only. admin_port: the one really bound, None:
    it is at the public port."""

    is_local: bool
    admin_port: int | None = None


def terms_of(scope: Scope) -> Terms:
    """What the guard has found out about a request that it let in."""
    terms: Terms = scope[_TERMS]
    return terms


class Guard:
    """ASGI. Answers what it refuses itself; the application never sees it, and its body is not read."""

    def __init__(self, app: ASGIApp, *, keys: KeyRing, door: Door, timeout_s: float | None) -> None:
        self._app, self._keys, self._door = app, keys, door
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                scope[_TERMS] = self._terms(scope)
            except ServingError as error:
                await refusal(scope, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _terms(self, scope: Scope) -> Terms:
        """Raises ServingError for what is not let in."""
        path = scope["path"]
        access = access_of(path)
        is_admin_port = self._door.admin_port is None or scope["server"][1] == self._door.admin_port
        is_of_users = access is Access.USER or access is Access.OPEN
        if not is_of_users and not is_admin_port:
            raise RequestError(f"no such path: {path}", code="not_found", status=404)
        caller = None
        if not self._keys.is_open and access is not Access.OPEN and access is not Access.PAGE:
            caller = self._keys.caller(scope["headers"])
        # On the path of every request nobody asks whether it comes from an administrator.
        is_admin = is_admin_port and (not is_of_users or path == _ABORT) and self._is_admin(scope, caller)
        _check(access, caller, is_admin=is_admin)
        if caller is not None and caller.role is KeyRole.USER and path not in _UNCOUNTED:
            scope["app"].state.router.dispatcher.admission.check_rate(caller.name)
        name = caller.name if caller is not None else None
        limit = self._limit(scope)
        deadline_s = None if limit is None else asyncio.get_running_loop().time() + limit[0]
        return Terms(caller=name, is_admin=is_admin, deadline_s=deadline_s, limit=limit[1] if limit else "")

    def _is_admin(self, scope: Scope, caller: Caller | None) -> bool:
        if caller is not None:
            return caller.role is KeyRole.ADMIN
        if not self._keys.is_open or _is_from_page(scope):
            return False
        return self._door.is_local or _is_from_here(scope)

    def _limit(self, scope: Scope) -> tuple[float, str] | None:
        """How many seconds it may take, and who says so. Raises RequestError for a header that is no time."""
        asked = next((value for name, value in scope["headers"] if name == TIMEOUT_HEADER), None)
        own = None if self._timeout_s is None else (self._timeout_s, f"--request-timeout {self._timeout_s:g} s")
        if asked is None:
            return own
        header = TIMEOUT_HEADER.decode()
        if _TIMEOUT.fullmatch(asked) is None or float(asked) <= 0:
            raise RequestError(f"{header}: a positive number of seconds", param=header)
        theirs = float(asked), f"header {header} {float(asked):g} s"
        return theirs if own is None else min(theirs, own)


def refusal(scope: Scope, error: ServingError) -> Response:
    """The answer to a request that is refused, or that has failed before anything was sent. It is recorded."""
    rid = scope["app"].state.router.dispatcher.recorder.refused(scope["path"], error)
    response = error_response(error)
    named = {name for name, _ in response.raw_headers}
    response.raw_headers += [field for field in head_fields(response.status_code, rid) if field[0] not in named]
    return response


def _check(access: Access, caller: Caller | None, *, is_admin: bool) -> None:
    """Raises AccessError."""
    if access in (Access.OPEN, Access.USER, Access.PAGE) or is_admin:
        return
    if caller is not None:
        raise AccessError("this needs an admin key", code="forbidden", status=403)
    if access is Access.CONTROL:
        message = "without API keys only this machine, and no web page, may administer the router (--api-key-file)"
        raise AccessError(message, code="forbidden", status=403)


def _is_from_page(scope: Scope) -> bool:
    """A browser says whether the user asked by himself (none) or a page did, which may be anybody's."""
    headers = {name: value for name, value in scope["headers"] if name in (b"origin", b"sec-fetch-site")}
    return b"origin" in headers or headers.get(b"sec-fetch-site", b"none") != b"none"


def _is_from_here(scope: Scope) -> bool:
    client: tuple[str, int] | None = scope.get("client")
    return client is not None and is_loopback(client[0])
