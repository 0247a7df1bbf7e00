"""API keys: who calls, and what that caller may do. What is kept of a key is its hash.

A key file has one key a line, `role name key`; blank lines and lines that begin with # say nothing. The role is user or
admin.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from common.errors import AccessError, ConfigError, ServingError, why_unreadable

log = logging.getLogger("tandem.keys")

MIN_KEY_CHARACTERS = 16

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(rf"[!-~]{{{MIN_KEY_CHARACTERS},512}}")
_KEY_RULE = f"a key has {MIN_KEY_CHARACTERS} to 512 visible ASCII characters"
_SCHEME = b"bearer "


class KeyRole(enum.StrEnum):
    USER = "user"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a key belongs to."""

    name: str
    role: KeyRole


@dataclass(frozen=True, slots=True, repr=False)
class Key:
    caller: Caller
    secret: str

    @property
    def header(self) -> str:
        """The value of `Authorization` for this key."""
        return f"Bearer {self.secret}"


def read_key_file(path: str, option: str) -> tuple[Key, ...]:
    """Raises ConfigError naming the option and the line, never what is in it."""
    try:
        lines = Path(path).read_text("ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = why_unreadable(error) if isinstance(error, OSError) else "it holds more than ASCII"
        raise ConfigError(f"{option} {path}: {reason}", param=_param(option)) from error
    keys = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                keys.append(_key(line))
            except ValueError as error:
                raise ConfigError(f"{option} {path}, line {number}: {error}", param=_param(option)) from None
    if not keys:
        raise ConfigError(f"{option} {path}: no key in it", param=_param(option))
    return tuple(keys)


def make_key(role: KeyRole, secret: str, option: str) -> Key:
    """A key that was given by itself; its name is its role. Raises ConfigError naming the option."""
    if _KEY.fullmatch(secret) is None:
        raise ConfigError(f"{option}: {_KEY_RULE}", param=_param(option))
    return Key(Caller(role.value, role), secret)


def admin_key(path: str, option: str) -> Key:
    """The first admin key of a file, to show to others. Raises ConfigError."""
    for key in read_key_file(path, option):
        if key.caller.role is KeyRole.ADMIN:
            return key
    raise ConfigError(f"{option} {path}: no admin key in it", param=_param(option))


def _key(line: str) -> Key:
    """Raises ValueError, whose text does not quote the line."""
    words = line.split()
    if len(words) != 3:
        raise ValueError(f"{len(words)} words, expected: role name key")
    role, name, secret = words
    if role not in tuple(KeyRole):
        raise ValueError("the role must be user or admin")
    if _NAME.fullmatch(name) is None:
        raise ValueError("a name has 1 to 64 letters, digits, dots, dashes and underscores")
    if _KEY.fullmatch(secret) is None:
        raise ValueError(_KEY_RULE)
    return Key(Caller(name, KeyRole(role)), secret)


def _param(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


class KeyRing:
    """The keys that a server takes. path: their file, read again by `reload`. more: keys that came another way.

    Without any key everybody is let in. Raises ConfigError for a file that cannot be used.
    """

    def __init__(self, path: str | None = None, more: Iterable[Key] = (), *, option: str = "--api-key-file") -> None:
        self._path, self._more, self._option = path, tuple(more), option
        self._hashes = self._read()

    @property
    def is_open(self) -> bool:
        return not self._hashes

    @property
    def has_file(self) -> bool:
        return self._path is not None

    def _read(self) -> dict[bytes, Caller]:
        keys = (read_key_file(self._path, self._option) if self._path is not None else ()) + self._more
        hashes = {_hash(key.secret.encode()): key.caller for key in keys}
        names = {key.caller.name for key in keys}
        if len(hashes) < len(keys) or len(names) < len(keys):
            where = f"{self._option} {self._path}" if self._path is not None else "--api-key, --admin-api-key"
            raise ConfigError(f"{where}: a name or a key is there twice", param=_param(self._option))
        return hashes

    def reload(self) -> None:
        """Read the file again. What cannot be used is logged and changes nothing."""
        try:
            self._hashes = self._read()
        except ServingError as error:
            log.error("the keys stay as they were: %s", error.message)
        else:
            log.info("keys read again: %d", len(self._hashes))

    def caller(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """Whose key the request bears; looks at every key, so that the time says nothing. Raises AccessError (401)."""
        given = [value for name, value in headers if name == b"authorization"]
        if len(given) != 1 or given[0][: len(_SCHEME)].lower() != _SCHEME:
            raise AccessError("an API key is needed: Authorization: Bearer KEY", code="no_api_key")
        asked, found = _hash(given[0][len(_SCHEME) :].strip()), None
        for known, caller in self._hashes.items():
            if hmac.compare_digest(known, asked):
                found = caller
        if found is None:
            raise AccessError("the API key is wrong")
        return found


def _hash(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()
