# SPDX-License-Identifier: Apache-2.0
"""Edge (files): folders of test data that the daemon cannot, or may not, open where a user has them.

The client sends their files to the daemon, each content once. They are laid out by hard links below a folder
with the uid of the user who has handed them over and the digest of the manifest: this user's jobs with the
same test data share it, and no other user's job gets it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

from millpond.base.errors import LocalError, Refused
from millpond.linux.files import open_folders, sync_folder
from millpond.train.job.file_cache import FileCache
from millpond.train.job.files import JobFile, is_digest
from millpond.train.job.folder import LARGEST_MANIFEST, read

_UNFINISHED = ".new-"


class HandedFolders:
    """The folders below ``folder``, whose contents are in ``files``."""

    def __init__(self, folder: Path, files: FileCache) -> None:
        self._folder, self._files = folder, files

    def path(self, digest: str, owner: int) -> Path:
        """Return where the folder of a user's manifest lies, or would. Raises Refused for no digest."""
        if not is_digest(digest):
            raise Refused("", "files", f"{digest!r:.80} is no digest of a folder")
        return self._folder / str(owner) / digest

    def has(self, digest: str, owner: int) -> bool:
        """Return whether a user's folder is there, whole. Raises Refused for no digest."""
        return self.path(digest, owner).is_dir()

    def lay_out(self, manifest: JobFile, owner: int) -> None:
        """Make the folder of a user's manifest that, like all its contents, is in the files. The manifest
        leaves them then: whoever could name it would learn the digests of all. Raises LocalError.
        """
        target = self.path(manifest.sha256, owner)
        if target.is_dir():
            return
        self._files.check({"manifest": manifest})
        if manifest.size > LARGEST_MANIFEST:
            raise LocalError(f"a manifest of {manifest.size} bytes is too large")
        listed = read(self._files.path(manifest).read_bytes(), "the test data")
        self._files.check(listed.files)
        try:
            for folder in (self._folder, target.parent):
                folder.mkdir(mode=0o700, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._folder, prefix=_UNFINISHED) as work:
                fresh = Path(work) / "folder"
                self._files.link(listed.files, fresh)
                for name in listed.folders:
                    (fresh / name).mkdir(parents=True, exist_ok=True)
                open_folders(fresh)
                _become(fresh, target)
            sync_folder(target.parent)
            self._files.path(manifest).unlink(missing_ok=True)
        except OSError as error:
            raise LocalError(f"the test data cannot be laid out: {error.strerror}") from None

    def keep(self, digests: Collection[str]) -> None:
        """Remove all folders of other digests, and what a daemon has left half done."""
        users = [path for path in self._folder.glob("*") if path.name.isdecimal()]
        found = [*self._folder.glob("*"), *(path for user in users for path in user.iterdir())]
        for path in found:
            if path not in users and path.name not in digests:
                shutil.rmtree(path, ignore_errors=True)


def _become(fresh: Path, target: Path) -> None:
    """Rename a folder, unless another thread has laid out the same. Raises OSError."""
    try:
        fresh.rename(target)
    except OSError:
        if not target.is_dir():
            raise
