"""What every client that asks a server for JSON has alike: its package, its address, its key, its connections."""

from __future__ import annotations

from typing import Any

from rondel.core.errors import ConfigError

IDLE = 2.0  # seconds that a connection waits for its next request: less than servers wait, or both would act at once
SHOWN = 200  # characters of a body that an error shows


def import_httpx(who: str) -> Any:
    try:
        import httpx2
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{who} speaks HTTP with httpx2, which is not installed: pip install 'rondel[http]'"
        ) from error
    return httpx2


def require_address(key: str, url: str) -> str:
    """The address without a slash at its end."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{key} = {url!r}; it is an address like http://127.0.0.1:30000")
    return url.rstrip("/")


def client_settings(http: Any, key: str) -> dict[str, Any]:
    """Arguments of a client of httpx2: the key as a bearer token, as many connections as calls, no redirects, for the
    key goes where it was sent.
    """
    return {
        "headers": {"Authorization": f"Bearer {key}"} if key else {},
        "limits": http.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE),
        "follow_redirects": False,
    }


def shorten_body(text: str) -> str:
    return text[:SHOWN] + ("..." if len(text) > SHOWN else "")
