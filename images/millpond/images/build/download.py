# SPDX-License-Identifier: Apache-2.0
"""Edge (HTTP): downloads a locked file from a mirror, by the ways that this machine's apt has there."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.client
import os
import re
import shutil
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.images.build.run import run

_SECONDS = 60.0
_CHUNK = 1 << 20
_DAY_SECONDS = 86400.0
_PAUSES = (1.0, 3.0, 10.0)
"""Seconds before an address is tried again."""
_NO_ANSWER = (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError)


class MirrorRefusal(LocalError):
    """The mirror answers, and does not have the file."""


def mirrors_of(address: str) -> list[str]:
    """Return the addresses behind one of apt's: itself, or those in the list of mirrors that it names. Raises
    LocalError.
    """
    if not address.startswith("mirror"):
        return [address]
    place = re.sub(r"^mirror(\+|(?=:))", "http" if address.startswith("mirror:") else "", address)
    try:
        with _opener(place).open(place, timeout=_SECONDS) as listed:
            lines = listed.read(_CHUNK).decode().splitlines()
    except (*_NO_ANSWER, OSError) as error:
        raise LocalError(f"apt's list of mirrors {place}: {getattr(error, 'reason', error)}") from None
    return [line.split()[0].rstrip("/") for line in lines if line.strip() and not line.startswith("#")]


def download(address: str, path: Path, size: int, sha256: str) -> None:
    """Download the file of ``size`` and digest to ``path``; try again where a connection or a server fails.
    Raises LocalError, which is MirrorRefusal where the mirror answers.
    """
    host = urllib.parse.urlsplit(address).netloc
    for pause in (*_PAUSES, None):
        try:
            _download_once(address, path, size, sha256)
        except _NO_ANSWER as error:
            code = 0
            if isinstance(error, urllib.error.HTTPError):
                code = error.code
                error.close()  # it holds the connection
            told = f"{host}: {getattr(error, 'reason', error)}"
            if 0 < code < http.HTTPStatus.INTERNAL_SERVER_ERROR:
                raise MirrorRefusal(told) from None
            if pause is None:
                raise LocalError(told) from None
            time.sleep(pause)
        else:
            return


def _download_once(address: str, path: Path, size: int, sha256: str) -> None:
    _forget_parts(path.parent)
    digest, count = hashlib.sha256(), 0
    with contextlib.ExitStack() as unless_whole:
        # Of this build alone: another one may have the same cache.
        descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        part = Path(name)
        unless_whole.callback(part.unlink)
        with (
            os.fdopen(descriptor, "wb") as target,
            _opener(address).open(address, timeout=_SECONDS) as source,
        ):
            while (data := source.read(_CHUNK)) and count <= size:
                digest.update(data)
                count += target.write(data)
        if (count, digest.hexdigest()) != (size, sha256):
            raise MirrorRefusal(f"{urllib.parse.urlsplit(address).netloc}: not the file that is locked")
        part.chmod(0o644)
        part.replace(path)
        unless_whole.pop_all()


def _forget_parts(folder: Path) -> None:
    """Remove what builds have left that were killed."""
    for part in folder.glob("*.part"):
        with contextlib.suppress(FileNotFoundError):
            if part.stat().st_mtime < time.time() - _DAY_SECONDS:
                part.unlink()


def _opener(address: str) -> urllib.request.OpenerDirector:
    """Return what opens an address by the proxy that apt takes for it; without one, by the environment's."""
    place = urllib.parse.urlsplit(address)
    settings = _apt_proxies()
    for kind in (place.scheme, "http"):  # apt takes that of http for https, too
        for key in (f"{kind}::Proxy::{place.hostname}", f"{kind}::Proxy"):
            if found := settings.get(key):
                proxies = {} if found == "DIRECT" else {place.scheme: found}
                return urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
    return urllib.request.build_opener()


@functools.cache
def _apt_proxies() -> dict[str, str]:
    """Return apt's settings of proxies, such as "http::Proxy"."""
    if not shutil.which("apt-config"):
        return {}
    text = run("apt-config", "dump", "Acquire").decode()
    return dict(re.findall(r'^Acquire::(https?::Proxy(?:::\S+)?) "(.*)";$', text, re.MULTILINE))
