# SPDX-License-Identifier: Apache-2.0
"""Code that no owner has signed does not run on a device that asks for that."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from millpond.agent.policy.signatures import check_signature
from millpond.base.errors import ConfigError, LocalError, Refused
from millpond.host.cli.sign import sign
from millpond.train.job import file
from millpond.train.job.signed_code import NAMESPACE, digest
from millpond.train.job.spec import ModelSpec, WorkSpec
from millpond.train.protocol import PrepareWorker

from ..job_files import described

JOB = """
name = "signed"
[data]
private = "private/digits"
test = "."
[model]
factory = "net:Net"
files = ["net.py"]
signature = "net.sig"
"""


def new_key(folder: Path, name: str) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    return folder / name


def public(key: Path) -> str:
    return key.with_suffix(".pub").read_text().strip()


@pytest.fixture
def owner(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "net.py").write_text("def Net(): ...")
    return new_key(tmp_path, "owner")


def request(folder: Path) -> PrepareWorker:
    """The host's request, as ``WorkerGroup`` makes it of the job."""
    job, paths = file.read(folder / "job.toml")
    signature = paths.pop(job.model.signature).read_text()
    return PrepareWorker(job.work, "csd0", (), file.describe(paths, "job"), (), signature=signature)


def refusal(owners: list[str], asked: PrepareWorker) -> str:
    with pytest.raises(Refused) as caught:
        check_signature(owners, asked)
    assert caught.value.code == "policy"
    return caught.value.text


def test_an_owner_signs_without_the_hosts_data(tmp_path: Path, owner: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB.replace('test = "."', 'test = "nowhere"'))
    sign(tmp_path / "job.toml", owner)


def test_an_owner_signs_code(tmp_path: Path, owner: Path) -> None:
    path, found = sign(tmp_path / "job.toml", owner)
    assert path == tmp_path / "net.sig" and found == digest(
        WorkSpec("signed", ModelSpec("net:Net")), described({"net.py": "def Net(): ..."})
    )
    check_signature([public(new_key(tmp_path, "other")), public(owner)], request(tmp_path))


def test_other_code_is_not_signed(tmp_path: Path, owner: Path) -> None:
    sign(tmp_path / "job.toml", owner)
    asked = request(tmp_path)
    empty = described({"torch.py": ""})
    for files in ({**asked.files, **empty}, described({"net.py": "def Net(): 1"}), {}):
        assert "no owner of the device has signed" in refusal([public(owner)], replace(asked, files=files))
    for changes in ({"factory": "timeit:timeit"}, {"arguments": {"limit": 41}}):
        model = replace(asked.work.model, **changes)  # type: ignore[arg-type]
        assert "no owner" in refusal([public(owner)], replace(asked, work=replace(asked.work, model=model)))
    assert "is not signed; its digest is" in refusal([public(owner)], replace(asked, signature=""))
    assert "no owner" in refusal([public(owner)], replace(asked, signature="nonsense"))


def test_other_keys_sign_nothing(tmp_path: Path, owner: Path) -> None:
    sign(tmp_path / "job.toml", new_key(tmp_path, "stranger"))
    assert "no owner" in refusal([public(owner)], request(tmp_path))


def test_a_signature_of_something_else_does_not_count(tmp_path: Path, owner: Path) -> None:
    (tmp_path / "net.sig").write_text("")
    text = digest(WorkSpec("signed", ModelSpec("net:Net")), described({"net.py": "def Net(): ..."})).encode()
    for namespace, accepted in (("git", False), (NAMESPACE, True)):
        command = ["ssh-keygen", "-q", "-Y", "sign", "-f", owner, "-n", namespace]
        made = subprocess.run(command, input=text, capture_output=True, check=True).stdout.decode()
        asked = replace(request(tmp_path), signature=made)
        if accepted:
            check_signature([public(owner)], asked)
        else:
            assert "no owner" in refusal([public(owner)], asked)


def test_what_keeps_code_from_being_signed_is_told(tmp_path: Path, owner: Path) -> None:
    with pytest.raises(LocalError, match="none"):
        sign(tmp_path / "job.toml", tmp_path / "none")
    with pytest.raises(ConfigError, match=r"net\.sig: no such file"):
        file.read(tmp_path / "job.toml")
    (tmp_path / "job.toml").write_text(JOB.replace('signature = "net.sig"', ""))
    with pytest.raises(ConfigError, match="there is no signature"):
        sign(tmp_path / "job.toml", owner)


@pytest.mark.parametrize("name", ["../victim", "net.py", "./net.sig", "/tmp/net.sig", ".."])
def test_a_signature_is_a_file_of_its_own_beside_the_job_file(tmp_path: Path, owner: Path, name: str) -> None:
    """A job file may be another person's: signing it must overwrite nothing."""
    (tmp_path / "job.toml").write_text(JOB.replace("net.sig", name))
    before = {path.name for path in tmp_path.parent.iterdir()}
    with pytest.raises(ConfigError, match="model: signature: "):
        sign(tmp_path / "job.toml", owner)
    assert {path.name for path in tmp_path.parent.iterdir()} == before
    assert (tmp_path / "net.py").read_text() == "def Net(): ..."
