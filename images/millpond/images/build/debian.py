# SPDX-License-Identifier: Apache-2.0
"""Edge: Debian's packages: which they are is locked, what they hold is unpacked; none of their scripts runs.

The lock names each package with version, size and SHA-256, so that a build takes the same files or fails.
The mirror is the one that this machine's own apt has. A mirror deletes a package when the next version comes:
then Debian's snapshots are asked for it, which keep everything.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millpond.base.errors import LocalError
from millpond.images import boards
from millpond.images.build import download, recipe
from millpond.images.build.run import find, run
from millpond.linux.files import sha256_of

LOCK = recipe.RECIPE / "debian.lock"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SNAPSHOTS = "https://snapshot.debian.org/archive"
HINT = "'make image-lock' takes today's versions"
_EPOCH = "# epoch"
_APT_FOLDERS = (
    "etc/apt.conf.d",
    "etc/preferences.d",
    "etc/trusted.gpg.d",
    "state/lists/partial",
    "cache/archives/partial",
)


@dataclass(frozen=True, slots=True)
class DebianPackage:
    """A locked package; ``path`` is its file below the archive, which is "main" or "security"."""

    name: str
    version: str
    sha256: str
    size: int
    archive: str
    path: str


def locked() -> list[DebianPackage]:
    """Return all packages of the lock. Raises LocalError."""
    lines = enumerate(LOCK.read_text().splitlines(), start=1)
    return [parsed(line, f"{LOCK.name}, line {number}") for number, line in lines if not line.startswith("#")]


def parsed(line: str, where: str) -> DebianPackage:
    """Parse a line of the lock. Raises LocalError."""
    words = line.split()
    if len(words) != 6 or not re.fullmatch("[0-9a-f]{64}", words[2]) or not words[3].isdecimal():
        raise LocalError(f"{where}: no locked package: 'make image-lock' writes the lock anew")
    name, version, sha256, size, archive, path = words
    return DebianPackage(name, version, sha256, int(size), archive, path)


def epoch() -> int:
    """Return when the lock was made, in seconds since 1970. Raises ValueError."""
    return int(LOCK.read_text().partition("\n")[0].removeprefix(_EPOCH))


def fetch(
    packages: Iterable[DebianPackage], cache: Path, archives: Sequence[Mapping[str, str]] = ()
) -> list[Path]:
    """Download the packages' files to ``cache`` and check each; return their paths. Each of ``archives``,
    which are asked in turn, maps "main" and "security" to addresses; without any, this machine's apt names
    the first, and the second are Debian's snapshots. Raises LocalError that names all that are gone.
    """
    cache.mkdir(parents=True, exist_ok=True)
    found, gone, why = [], list[str](), ""
    for package in packages:
        path = cache / f"{package.name}-{package.sha256[:16]}.deb"
        found.append(path)
        if path.exists() and sha256_of(path) == package.sha256:
            continue
        archives = archives or (mirrors(), snapshots(epoch()))
        archives, reasons = _get(package, path, archives)
        if reasons:
            gone.append(f"{package.name} {package.version}")
            why = why or "; ".join(reasons)
    if gone:
        raise LocalError(f"cannot get {', '.join(gone)} ({why}): {HINT}")
    return found


def snapshots(when: int) -> dict[str, str]:
    """Return the addresses of Debian's archives as they were at ``when``, in seconds since 1970."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(when))
    names = {"main": "debian", "security": "debian-security"}
    return {archive: f"{SNAPSHOTS}/{name}/{stamp}" for archive, name in names.items()}


def _get(
    package: DebianPackage, path: Path, archives: Sequence[Mapping[str, str]]
) -> tuple[Sequence[Mapping[str, str]], list[str]]:
    """Download a package from the first archive that has it. Return the archives that answer, and why each
    did not have it; no reasons once one had.
    """
    answering, reasons = list(archives), list[str]()
    for archive in archives:
        silent = True
        for base in download.mirrors_of(archive[package.archive]):
            try:
                download.download(f"{base}/{package.path}", path, package.size, package.sha256)
            except download.MirrorRefusal as error:
                silent = False
                reasons.append(str(error))
            except LocalError as error:
                reasons.append(str(error))
            else:
                return answering, []
        if silent:
            answering.remove(archive)  # or each package would wait for it
    if not answering:
        raise LocalError(f"cannot get {package.name} {package.version} ({'; '.join(reasons)}): {HINT}")
    return answering, reasons


def unpack(files: Sequence[Path], root: Path) -> None:
    """Unpack the packages below ``root``, where /bin, /lib and /sbin are links into /usr, as in Debian."""
    for name in ("bin", "lib", "sbin"):
        (root / "usr" / name).mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(f"usr/{name}")
    tar = [find("tar"), "-x", "-p", "--keep-directory-symlink", "--no-same-owner", "-C", str(root)]
    for file in files:
        with subprocess.Popen([find("dpkg-deb"), "--fsys-tarfile", file], stdout=subprocess.PIPE) as source:
            done = subprocess.run(tar, stdin=source.stdout, capture_output=True, check=False)
        if done.returncode or source.returncode:
            raise LocalError(f"cannot unpack {file}: {done.stderr.decode(errors='replace').strip()}")


def lock(cache: Path) -> int:
    """Write the lock anew, with today's versions; how many packages. Raises LocalError."""
    wanted = recipe.read("packages.toml")
    options = _private_apt(cache / "apt", wanted["suites"])
    run("apt-get", *options, "update", hint="is the mirror reachable?")
    kept = _chosen(options, wanted)
    lines = sorted(_described(run("apt-cache", *options, "show", *kept).decode()))
    heading = (
        f"{_EPOCH} {int(time.time())}\n# name version sha256 size archive path; made by 'make image-lock'\n"
    )
    LOCK.write_text(heading + "".join(lines))
    return len(lines)


def _chosen(options: Sequence[str], wanted: Mapping[str, Any]) -> list[str]:
    """Return the packages that apt would install, as ``name=version``."""
    flavours = {f"linux-image-{boards.read(name).kernel}" for name in boards.names()}
    kernels = [f"{name}/{wanted['kernels']}" for name in sorted(flavours)]
    simulated = run("apt-get", *options, "--simulate", "install", *wanted["include"], *kernels).decode()
    without = flavours.union(wanted["without"])  # the kernels' own names have versions in them
    names: dict[str, str] = {}
    for line in simulated.splitlines():
        if line.startswith("Inst "):
            _, name, version = line.split()[:3]
            names[name.partition(":")[0]] = version.strip("()")
    return [f"{name}={version}" for name, version in names.items() if name not in without]


def _described(shown: str) -> Iterator[str]:
    for stanza in shown.strip().split("\n\n"):
        lines = [line for line in stanza.splitlines() if line[:1].isalpha() and ": " in line]
        fields = dict(line.split(": ", 1) for line in lines)
        archive = "security" if fields["Filename"].startswith("pool/updates/") else "main"
        words = [fields[key] for key in ("Package", "Version", "SHA256", "Size")]
        yield f"{' '.join([*words, archive, fields['Filename']])}\n"


def _private_apt(folder: Path, suites: Sequence[str]) -> list[str]:
    """Return options that make apt ignore this machine's packages. Raises LocalError."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in _APT_FOLDERS:
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    (folder / "etc/sources.list").write_text(_sources(suites))
    settings = {
        "Dir::Etc": folder / "etc",
        "Dir::Etc::sourcelist": "sources.list",
        "Dir::State": folder / "state",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder / "cache",
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "",
    }
    return [f"-o{key}={value}" for key, value in settings.items()]


def _sources(suites: Sequence[str]) -> str:
    mirror = mirrors()
    archives = {suite: "security" if suite.endswith("-security") else "main" for suite in suites}
    lines = [f"deb [signed-by={KEYRING}] {mirror[archives[suite]]} {suite} main\n" for suite in suites]
    return "".join(lines)


def mirrors() -> dict[str, str]:
    """Return the addresses of Debian's archives that this machine's apt uses. Raises LocalError."""
    listed = run("apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME) $(ORIGIN)").decode()
    found: dict[str, str] = {}
    for line in listed.splitlines():
        address, codename, *origin = line.split()
        if "Debian" in origin:
            found.setdefault("security" if codename.endswith("-security") else "main", address.rstrip("/"))
    if "main" not in found:
        raise LocalError("this machine's apt has no mirror of Debian: images are built on Debian")
    return {"security": f"{found['main']}-security", **found}
