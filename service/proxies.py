"""Which requests go through a proxy: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY, in either
case.

httpx reads them too, but cannot be started with an IPv6 network in NO_PROXY, and takes a network
for the name of a host.  As with curl and Go a network is compared with addresses alone: names are
not looked up for it."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar
from urllib.request import getproxies

import httpx

PORTS = {"http": 80, "https": 443}
Transport = TypeVar("Transport", httpx.HTTPTransport, httpx.AsyncHTTPTransport)


@dataclass(frozen=True)
class Proxies:
    """The proxies of an environment."""

    by_scheme: Mapping[
        str, str
    ]  # "http", "https" or "all" -> the proxy's address, which may hold a password
    without: tuple[str, ...]  # the entries of NO_PROXY

    @classmethod
    def of_environment(cls) -> Proxies:
        """Return those of this process's environment, as they are now."""
        named = getproxies()
        addresses = {
            scheme: named[scheme] for scheme in ("http", "https", "all") if named.get(scheme)
        }
        entries = re.split(r"[,\s]+", named.get("no", "").strip().lower())
        by_scheme = {
            scheme: at if "://" in at else f"http://{at}" for scheme, at in addresses.items()
        }
        return cls(by_scheme, tuple(entry for entry in entries if entry))

    def scheme_of(self, url: httpx.URL) -> str | None:
        """Return under which key of ``by_scheme`` a URL's proxy stands; None where the host is
        asked directly."""
        scheme = next((name for name in (url.scheme, "all") if name in self.by_scheme), None)
        return (
            None if scheme is None or any(_fits(entry, url) for entry in self.without) else scheme
        )

    def described(self, url: httpx.URL) -> str:
        """Return words about a URL's proxy that go behind its host's name in an error; "" where it
        has none."""
        if (scheme := self.scheme_of(url)) is None:
            return ""
        shown = self.by_scheme[scheme].rpartition("://")[2].rpartition("@")[2].partition("/")[0]
        variable = f"{scheme.upper()}_PROXY"
        return (
            f" through the proxy {shown} ({variable}; NO_PROXY lists hosts to be reached"
            " without it)"
        )


def _fits(entry: str, url: httpx.URL) -> bool:
    """Return whether an entry of NO_PROXY names a URL's host: a name, an address or a network,
    perhaps with a port."""
    if entry == "*":
        return True
    scheme, _, named = entry.rpartition("://")
    if scheme not in ("", "all", url.scheme):
        return False
    host, port = named, ""
    if with_port := re.fullmatch(r"([^:]+|\[[^\]]*\]):(\d+)", named):
        host, port = with_port.groups()
    if port and int(port) != (url.port or PORTS.get(url.scheme)):
        return False
    with suppress(ValueError):
        network = ipaddress.ip_network(re.sub(r"[\[\]]", "", host), strict=False)
        with suppress(ValueError):
            return ipaddress.ip_address(url.host) in network
        return False
    host = host.removeprefix("*")
    return url.host.endswith(host) if host.startswith(".") else f".{url.host}".endswith(f".{host}")


class _Routes(Generic[Transport]):
    """The transports of one client: a direct one, and one for each proxy, made when it is first
    needed."""

    def __init__(self, proxies: Proxies, make: Callable[..., Transport]) -> None:
        self._proxies, self._trusted = proxies, httpx.create_ssl_context()
        self._make: Callable[..., Transport] = make
        self.made: dict[str | None, Transport] = {}

    def of(self, request: httpx.Request) -> Transport:
        """Return the request's.  Raises ProxyError where the proxy's address is none that can be
        used."""
        scheme = self._proxies.scheme_of(request.url)
        if scheme not in self.made:
            proxy = None if scheme is None else self._proxies.by_scheme[scheme]
            try:
                self.made[scheme] = self._make(verify=self._trusted, proxy=proxy)
            except (
                ValueError,
                TypeError,
                ImportError,
                httpx.InvalidURL,
            ):  # told without the address's password
                why = (
                    "the proxy's address must begin with http:// or https://, or socks5:// with"
                    " httpx[socks]"
                )
                raise httpx.ProxyError(why, request=request) from None
        return self.made[scheme]


class ProxyTransport(httpx.BaseTransport):
    """For an ``httpx.Client``: sends each request as ``Proxies`` says."""

    def __init__(self, proxies: Proxies) -> None:
        self._routes = _Routes(proxies, httpx.HTTPTransport)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send it.  Raises httpx.TransportError."""
        return self._routes.of(request).handle_request(request)

    def close(self) -> None:
        """End all connections."""
        for transport in self._routes.made.values():
            transport.close()


class AsyncProxyTransport(httpx.AsyncBaseTransport):
    """For an ``httpx.AsyncClient``, likewise."""

    def __init__(self, proxies: Proxies) -> None:
        self._routes = _Routes(proxies, httpx.AsyncHTTPTransport)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send it.  Raises httpx.TransportError."""
        return await self._routes.of(request).handle_async_request(request)

    async def aclose(self) -> None:
        """End all connections."""
        for transport in self._routes.made.values():
            await transport.aclose()
