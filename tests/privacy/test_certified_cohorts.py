# SPDX-License-Identifier: Apache-2.0
"""Without pins a device masks for devices of its fleet's authority: no other host makes one up."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from millpond.agent.cohort.certificates import KeyCertificates
from millpond.aggregate.masking.keys import LastingKey
from millpond.aggregate.masking.messages import NO_CERTIFICATE, KeyCertificate, Offered, OpenCohort
from millpond.base.errors import Refused
from millpond.host.fleet.authority import Authority
from millpond.wire.tls import HOST, Identity

from ..identities import authority, issued
from .test_masked_rounds import NAMES, PREPARED, device, exchange_of

MADE_UP = LastingKey(os.urandom(32)).public


@pytest.fixture
def opening(tmp_path: Path) -> OpenCohort:
    return exchange_of({name: device(name, tmp_path, PREPARED) for name in NAMES}).opening()


def by_another(folder: Path) -> KeyCertificate:
    """Return a certificate of another authority that has the same name."""
    Authority.make("millpond fleet of tests").issue("csd1", folder / "made-up")
    return KeyCertificates(Identity.in_directory(folder / "made-up")).own("csd1", MADE_UP)


def of_another_device(folder: Path) -> KeyCertificate:
    issued("csd7", folder / "csd7")
    return KeyCertificates(Identity.in_directory(folder / "csd7")).own("csd1", MADE_UP)


def of_another_key(folder: Path) -> KeyCertificate:
    return KeyCertificates(Identity.in_directory(folder / "csd1")).own("csd1", bytes(64))


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda _folder: NO_CERTIFICATE, "'csd1' is certified by no device of this fleet"),
        (by_another, "'csd1' is certified by no device of this fleet"),
        (of_another_key, "'csd1' is certified by no device of this fleet"),
        (of_another_device, "'csd1' has the certificate of another device"),
    ],
)
def test_a_device_that_the_authority_has_not_certified_is_refused(
    made: Callable[[Path], KeyCertificate], told: str, opening: OpenCohort, tmp_path: Path
) -> None:
    members = opening.members | {"csd1": MADE_UP}
    certificates = opening.certificates | {"csd1": made(tmp_path)}
    with pytest.raises(Refused, match=told) as caught:
        device("csd0", tmp_path, PREPARED).answer(
            replace(opening, members=members, certificates=certificates)
        )
    assert caught.value.code == "policy"


def test_a_host_is_no_member_by_its_own_certificate(opening: OpenCohort, tmp_path: Path) -> None:
    """It would be one of the least devices of a sum, and know its own update."""
    issued(HOST, tmp_path / HOST)
    shown = KeyCertificates(Identity.in_directory(tmp_path / HOST)).own(HOST, MADE_UP)
    members, certificates = opening.members | {HOST: MADE_UP}, opening.certificates | {HOST: shown}
    with pytest.raises(Refused, match="the host is no device of a cohort"):
        device("csd0", tmp_path, PREPARED).answer(
            replace(opening, members=members, certificates=certificates)
        )


def test_a_renewed_certificate_is_as_good_also_while_its_key_is_put_in_place(
    opening: OpenCohort, tmp_path: Path
) -> None:
    certificate, key = authority().sign("csd1")
    (tmp_path / "csd1" / "cert.pem").write_bytes(certificate)
    (tmp_path / "csd1" / "key.pem.new").write_bytes(key)
    renewed = device("csd1", tmp_path, PREPARED).member.certificate
    assert renewed.certificate != opening.certificates["csd1"].certificate
    certificates = opening.certificates | {"csd1": renewed}
    answer = device("csd0", tmp_path, PREPARED).answer(replace(opening, certificates=certificates))
    assert isinstance(answer, Offered)
