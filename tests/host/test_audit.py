# SPDX-License-Identifier: Apache-2.0
"""A host verifies the audit log of a device that may lie: signatures, certificates, and what it has seen."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from millpond.agent.audit import recorder
from millpond.agent.audit.log_file import AuditLog
from millpond.agent.audit.recorder import AuditRecorder
from millpond.agent.audit.signer import DeviceSigner
from millpond.agent.config import AgentConfig, LinkConfig
from millpond.base.errors import LocalError, ProtocolError, RemoteError
from millpond.host.fleet import provisioning, renewal, revocation
from millpond.host.fleet.authority import Authority
from millpond.host.fleet.directory import Fleet
from millpond.host.records.audit import summary
from millpond.host.remote.audit import reading, saved
from millpond.host.remote.audit.reading import AuditLogCopy
from millpond.host.remote.audit.verification import verify, verify_saved
from millpond.host.terminal import audit_table, tables
from millpond.host.terminal.audit_table import verdict_line
from millpond.wire.audit_log import Answered, Entry, LogHead, Started, described, encode
from millpond.wire.control_messages import AuditHead
from millpond.wire.tls import Identity


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return provisioning.create(tmp_path_factory.mktemp("audit") / "fleet", "fleet", ["csd0", "csd1"])


@dataclass
class Device:
    """A device's recorder, and a daemon's client that reaches it. ``lie`` changes what it answers."""

    fleet: Fleet
    base: Path
    head: AuditHead | None = None
    lines: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.audit = self._recorder()

    def _recorder(self) -> AuditRecorder:
        own = Identity.in_directory(self.fleet.device_directory("csd0") / "etc")
        link = LinkConfig("s", "10.77.0.2/30")
        made = AuditRecorder(AgentConfig("csd0", link, state=str(self.base)), DeviceSigner(own))
        made.start("0.2.0", {})
        return made

    def restart(self) -> None:
        self.audit.stop()
        self.audit = self._recorder()

    def job(self, name: str, **about: str) -> None:
        with self.audit.session(Answered("job", name, **about)) as session:
            session.counters.add(2, 4096)
            session.exchange({"private/digits": 64})

    def audit_head(self, device: str, nonce: str = "") -> AuditHead:
        return self.head or self.audit.head(nonce)

    def audit_entries(self, device: str, first: int) -> tuple[str, ...]:
        return self.lines.get(first) or self.audit.entries(first).lines

    def copy(self) -> AuditLogCopy:
        return reading.read(self, "csd0", secrets.token_hex(16))  # type: ignore[arg-type]


@pytest.fixture
def device(made: Fleet, tmp_path: Path) -> Iterator[Device]:
    (made.device_directory("csd0") / "audit-head.json").unlink(missing_ok=True)
    device = Device(made, tmp_path)
    device.job("digits", run="3 of 4.0", peer="host (ab)", code="c" * 64, signer="SHA256:x")
    yield device
    device.audit.stop()


def test_a_log_is_verified_and_may_grow(device: Device) -> None:
    first = verify(device.fleet, device.copy())
    assert first.kept is None and first.entries == first.number
    device.job("more")
    device.restart()
    second = verify(device.fleet, device.copy())
    assert second.kept and second.kept.number == first.number < second.number
    line = audit_table.verdict_line(second)
    assert f"has grown since entry {first.number}" in line and line.startswith("verified: ")
    assert "first time" in audit_table.verdict_line(first)


def test_a_rolled_back_log_is_told(device: Device, tmp_path: Path) -> None:
    device.audit.stop()
    saved = {path: path.read_bytes() for path in (tmp_path / "audit").iterdir()}
    device.restart()
    device.job("hidden")
    seen = verify(device.fleet, device.copy())
    device.audit.stop()
    for path, data in saved.items():
        path.write_bytes(data)
    device.audit = device._recorder()
    with pytest.raises(RemoteError, match=f"has seen entry {seen.number}: the log was rolled back"):
        verify(device.fleet, device.copy())
    while device.audit.head("").number < seen.number:  # one that has grown since tells it all the same
        device.job("cover")
    with pytest.raises(RemoteError, match="is another one than this host has seen: the log was rewritten"):
        verify(device.fleet, device.copy())
    assert verify(device.fleet, device.copy(), anew=True).kept is None
    assert verify(device.fleet, device.copy()).kept


def test_a_log_that_drops_its_oldest_entries_is_verified_in_time_or_told(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "AuditLog", partial(AuditLog, file_bytes=6000, files=2))
    device.restart()
    verify(device.fleet, device.copy())
    for number in range(2):
        device.job(f"job-{number}")
    seen = verify(device.fleet, device.copy())
    while device.audit.head("").oldest <= seen.number:
        device.job("more")
    with pytest.raises(RemoteError, match="what lies between is gone"):
        verify(device.fleet, device.copy())
    copy = device.copy()
    assert verify(device.fleet, copy, anew=True).number == copy.end.number
    assert any("were dropped" in text for _, text in summary(copy.entries).notes)


def test_a_cut_or_changed_answer_is_told(device: Device) -> None:
    lines, head = device.audit.entries(1).lines, device.audit.head("")
    device.lines = {1: lines[:2], 3: (lines[3],)}
    with pytest.raises(ProtocolError, match="csd0: entry 3 of the audit log does not continue the chain"):
        device.copy()
    device.lines, device.head = {}, replace(head, number=head.number + 5)
    with pytest.raises(ProtocolError, match="ends before entry"):
        device.copy()
    device.head = replace(head, digest="0" * 64)
    with pytest.raises(ProtocolError, match="is not the one that it has signed"):
        device.copy()


def test_a_device_that_sends_without_end_is_left(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MOST_BYTES", 1 << 20)
    device.head = AuditHead(1, 1 << 60, "", "")
    with pytest.raises(ProtocolError, match="has more entries than a device keeps"):
        device.copy()
    device.head = AuditHead(1, 1 << 17, "", "")
    chain = [LogHead()]

    def endless(_device: str, first: int) -> tuple[str, ...]:
        line = encode(chain[-1], 0.0, Started("x" * 60000))
        reader = reading.ChainReader(chain[-1])
        reader.take(line)
        assert reader.head
        chain.append(reader.head)
        return (line,)

    device.audit_entries = endless  # type: ignore[method-assign]
    with pytest.raises(ProtocolError, match="is too long"):
        device.copy()


def test_a_head_without_a_signature_or_with_another_is_refused(device: Device) -> None:
    copy = device.copy()
    with pytest.raises(RemoteError, match="is not signed: no key"):
        verify(device.fleet, replace(copy, head=replace(copy.head, signature="", reason="no key")))
    device.job("more")
    other = device.audit.head(copy.nonce).signature
    with pytest.raises(RemoteError, match=f"the signature of entry {copy.end.number}"):
        verify(device.fleet, replace(copy, head=replace(copy.head, signature=other)))


def test_an_old_head_that_is_sent_again_is_refused(device: Device) -> None:
    device.head = device.audit.head("a-nonce-of-before")
    with pytest.raises(RemoteError, match=f"the signature of entry {device.head.number}"):
        verify(device.fleet, device.copy())


def test_a_saved_log_is_verified_without_the_fleet(device: Device, tmp_path: Path) -> None:
    file, ca = tmp_path / "csd0.audit", tmp_path / "ca.pem"
    ca.write_bytes(device.fleet.identity.authority.read_bytes())
    wanted = device.copy()
    saved.save(file, wanted, 12.0)
    copy, at = saved.load_copy(file, "csd0")
    assert (copy, at) == (replace(wanted, head=replace(wanted.head, reason="")), 12.0)
    verdict = verify_saved(ca, copy, at, wanted.nonce)
    assert (verdict.number, verdict.nonce, verdict.saved) == (wanted.end.number, wanted.nonce, 12.0)
    assert f"was saved at 1970-01-01 {time.strftime('%H:%M', time.localtime(12.0))}" in verdict_line(verdict)
    with pytest.raises(RemoteError, match="was signed with another nonce: it may be an old one"):
        verify_saved(ca, copy, at, "a-nonce-of-another")
    other = provisioning.create(tmp_path / "other", "other", ["csd0"]).identity.authority
    with pytest.raises(RemoteError, match="has a certificate that is none of this fleet"):
        verify_saved(other, copy, at)
    with pytest.raises(LocalError, match="is the audit log of 'csd0', not of csd1"):
        saved.load_copy(file, "csd1")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda lines: [*lines[:2], *lines[3:]], "does not continue the chain"),
        (lambda lines: lines[:-1], "is not the one that it has signed"),
        (lambda lines: [*lines[:-1], lines[-1].replace(b'"time":', b'"time":1')], "is not the one"),
        (lambda lines: [*lines[:-1], lines[-1][:-1]], "it ends within an entry"),
        (lambda lines: [b"{}\n", *lines[1:]], "is no saved audit log"),
        (lambda lines: [lines[0].replace(b"12.0", b"1e300"), *lines[1:]], "is no saved audit log"),
        (lambda lines: [b"[" * 100_000, *lines[1:]], "is no saved audit log"),
    ],
)
def test_a_changed_file_is_told(
    device: Device, tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], told: str
) -> None:
    file = tmp_path / "csd0.audit"
    saved.save(file, device.copy(), 12.0)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(change(lines)))
    with pytest.raises((RemoteError, LocalError), match=told):
        saved.load_copy(file, "csd0")


def test_a_saved_log_without_its_front_is_told(device: Device, tmp_path: Path) -> None:
    device.restart()  # from here on it would be a log of its own
    file, ca = tmp_path / "csd0.audit", device.fleet.identity.authority
    saved.save(file, device.copy(), 12.0)
    heading, *lines = file.read_bytes().splitlines(keepends=True)
    begin = max(number for number, line in enumerate(lines) if b'"in force"' in line)
    file.write_bytes(b"".join([heading, *lines[begin:]]))
    with pytest.raises(RemoteError, match=f"begins with entry {begin + 1}, not 1|is no entry|the chain"):
        saved.load_copy(file, "csd0")
    file.write_bytes(
        b"".join([heading.replace(b'"oldest": 1,', b'"oldest": %d,' % (begin + 1)), *lines[begin:]])
    )
    copy, at = saved.load_copy(file, "csd0")
    with pytest.raises(RemoteError, match=r"signature of entry .* is not valid"):
        verify_saved(ca, copy, at)


def test_another_devices_key_does_not_sign(device: Device, tmp_path: Path) -> None:
    own = Identity.in_directory(device.fleet.device_directory("csd1") / "etc")
    link = LinkConfig("s", "10.77.0.2/30")
    false = AuditRecorder(AgentConfig("csd0", link, state=str(tmp_path / "false")), DeviceSigner(own))
    false.start("0.2.0", {})
    device.audit.stop()
    device.audit = false
    with pytest.raises(RemoteError, match="has the certificate of another device"):
        verify(device.fleet, device.copy())


def test_a_renewed_device_goes_on_with_its_log(device: Device) -> None:
    before = verify(device.fleet, device.copy())
    device.restart()  # signs with the old key
    fleet, authority = device.fleet, Authority.load(device.fleet.ca, device.fleet.identity.authority)
    renewed = renewal.Renewal(fleet, authority, "csd0")
    renewed.install()
    renewed.finish()
    device.job("later")
    after = verify(fleet, device.copy())
    assert after.kept and after.kept.digest == before.digest
    assert after.signatures == 2 and after.certificate != before.certificate


def test_a_revoked_certificate_is_told(made: Fleet, tmp_path: Path) -> None:
    fleet = provisioning.create(tmp_path / "fleet", "fleet", ["csd0"])
    device = Device(fleet, tmp_path / "state")
    try:
        verify(fleet, device.copy())
        revocation.revoke(
            fleet, Authority.load(fleet.ca, fleet.identity.authority), revocation.known_serials(fleet, "csd0")
        )
        with pytest.raises(RemoteError, match="is revoked"):
            verify(fleet, device.copy())
    finally:
        device.audit.stop()


def test_a_job_without_an_entry_is_named(device: Device) -> None:
    """Before: the table had headings alone."""
    console = tables.console()
    with console.capture() as shown:
        console.print(audit_table.show(summary(device.copy().entries, "nosuch"), "verdict"))
    assert shown.get().startswith("the log has no entry to show\n")


def test_a_summary_adds_the_entries_of_a_job_up(device: Device) -> None:
    device.job("other", run="4 of 5.0")
    device.job("train.py", run="85c65726394a4be6b4cb13abddd5a2ff")
    found = summary(device.copy().entries)
    jobs = {row.answers.name: row for row in found.rows if row.answers.role == "job"}
    assert jobs["digits"].answers.sent == {"parameters": 4096}
    assert jobs["digits"].answers.samples == {"private/digits": 64}
    assert jobs["digits"].answers.state == "ends"
    for name in ("digits", "3"):
        assert [row.answers.name for row in summary(device.copy().entries, name).rows] == ["digits"]
    console = tables.console()
    with console.capture() as shown:
        console.print(audit_table.show(found, "verdict"))
    text = shown.get()
    assert "job train.py (85c65726394a) " in text
    assert "job digits (3)" in text and "cccccccccccc signed" in text and "private/digits 64" in text
    assert "verdict" in text and "is in force since" in text
    line = audit_table.entry_line(described(device.copy().entries[2]))
    assert line.startswith("3 ") and ' answered role="job" name="digits" ' in line


def test_bytes_that_no_entry_has_are_told() -> None:
    def entry(number: int, event: Started | Answered) -> Entry:
        return Entry(number, float(number), event)

    found = summary(
        [
            entry(1, Started("", {"control": 10, "parameters": 100})),
            entry(2, Answered("job", "a", sent={"parameters": 50})),
            entry(3, Started("", {"control": 10, "parameters": 175})),
            entry(4, Started("", {"control": 3})),  # counts anew
        ]
    )
    assert found.unlogged == {"parameters": 25}
