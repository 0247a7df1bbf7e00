"""In front of a node's application: which of its endpoints need a key, and which an admin's. The router has one."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import AccessError, ServingError
from common.http_server import error_response
from common.keys import KeyRing, KeyRole

_OPEN = frozenset(["/health"])
_USER = frozenset(["/generate", "/health_generate", "/model_info", "/get_model_info", "/tokenize", "/detokenize"])
_USER_PREFIX = "/v1/"


class Guard:
    """ASGI. Answers what it refuses itself; the application never sees it, and its body is not read."""

    def __init__(self, app: ASGIApp, *, keys: KeyRing) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ServingError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Raises AccessError. What is not listed is for administrators."""
        path: str = scope["path"]
        if self._keys.is_open or path in _OPEN:
            return
        caller = self._keys.caller(scope["headers"])
        is_for_users = path in _USER or path.startswith(_USER_PREFIX)
        if not is_for_users and caller.role is not KeyRole.ADMIN:
            raise AccessError("this needs an admin key", code="forbidden", status=403)
