"""URLs of servers."""

from __future__ import annotations

from urllib.parse import urlsplit

MAX_URL_CHARACTERS = 2048


def url_host(url: str) -> str | None:
    """The host in the URL of an http server; None for what is none, or says more than where it is."""
    if len(url) > MAX_URL_CHARACTERS or not url.isascii() or not url.isprintable() or " " in url:
        return None
    try:
        parts = urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")  # a name that could not be looked up
    except ValueError:
        return None
    is_server = parts.scheme in ("http", "https") and port != 0 and "@" not in parts.netloc
    return parts.hostname if is_server and not parts.query and not parts.fragment else None


def url_of(scheme: str, host: str, port: int) -> str:
    """host: an IPv6 address without brackets."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
