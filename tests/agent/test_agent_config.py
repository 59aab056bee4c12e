# SPDX-License-Identifier: Apache-2.0
"""The agent's configuration: its fields, and the errors of wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.agent.config import Privacy, Users, read
from millpond.base.errors import ConfigError

SMALLEST = 'name = "csd0"\n[link]\nsocket = "/run/slot/nvme.sock"\naddress = "10.77.0.2/30"\n'


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "agent.toml"
    path.write_text(text)
    return path


def test_the_smallest_configuration_is_private_by_default(tmp_path: Path) -> None:
    config = read(write(tmp_path, SMALLEST))
    assert (config.name, config.link.interface, config.link.mtu) == ("csd0", "mp0", 65520)
    assert config.privacy == Privacy({}, {}, "location", "auto")
    assert config.users == Users(64001, 64002)
    assert (config.board, config.watts, config.zygote_idle) == ("real", None, 600.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "name"),
        ('name = "csd0"\n', "link"),
        (SMALLEST + "mut = 9000\n", "mtu"),
        (SMALLEST + 'mtu = "9000"\n', "mtu"),
        (SMALLEST + "[watts]\nidle = 7.5\nbusy = 2.0\n", "watts: busy: 2 is not between 7.5"),
        (SMALLEST + '[privacy]\nencrypt = "sometimes"\n', "encrypt"),
        (SMALLEST + '[privacy]\nerors = "full"\n', "errors"),
        (SMALLEST + "[[[", "agent.toml"),
        ('board = "paper"\n' + SMALLEST, "board"),
        (SMALLEST + '[tier]\nfast = "8 gigs"\n', "tier: fast: '8 gigs' is no size such as 8 GiB"),
        (SMALLEST + "[watts]\nidle = 2.0\n", "busy"),
        ("public_quota = 0\n" + SMALLEST, "public_quota: 0 is not greater than 0"),
        (SMALLEST + "[watts]\nidle = 1.0\nbusy = inf\n", "watts: busy: inf"),
        ("zygote_idle = 0\n" + SMALLEST, "zygote_idle: 0.0 is not between 1 and 86400"),
        ("zygote_idle = nan\n" + SMALLEST, "zygote_idle"),
        (SMALLEST + 'ivshmem = "pci"\n', "link: either socket or ivshmem"),
        (SMALLEST.replace('socket = "/run/slot/nvme.sock"\n', ""), "link: either socket or ivshmem"),
        (SMALLEST.replace("socket", "ivshmen"), "did you mean 'ivshmem'"),
    ],
)
def test_a_mistake_is_named_with_file_and_key(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(write(tmp_path, text))
    assert words in str(caught.value)
    assert "agent.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "none.toml")
    (tmp_path / "agent.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"agent\.toml"):
        read(tmp_path / "agent.toml")
