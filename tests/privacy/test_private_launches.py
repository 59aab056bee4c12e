# SPDX-License-Identifier: Apache-2.0
"""Private launches: what a script that may read private data reaches, says, and is refused."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.agent import confined_script
from millpond.agent.config import Privacy
from millpond.agent.policy.launch_rules import GroupGuard
from millpond.agent.policy.settings import Policy
from millpond.base.errors import Refused
from millpond.host.launch import group
from millpond.linux.zygote.client import Zygote
from millpond.train.distributed.group_messages import Contribution, Gather, Gathered, GroupJoined, ShareState
from millpond.train.distributed.launch_messages import script_digest
from millpond.wire.messages import Message

from .launch_support import Launcher

BEGIN = """\
import os, socket, sys
from pathlib import Path
import torch
from torch import nn
import millpond.train
root, rank = Path("/volume"), int(os.environ["RANK"])
model = nn.Linear(4, 1)
"""
STEPS = """
with millpond.train.group(model, policy="fixed") as group:
    data = torch.utils.data.TensorDataset(torch.ones(COUNT, 4) * (rank + 1))
    for (rows,) in group.loader(data, private=True, batch=BATCH):
        group.step(model(rows).sum())
"""
SEEN = "secret-of-the-tests"
LOOKING = (
    BEGIN
    + """
def tried(what):
    try:
        return str(what())
    except OSError as error:
        return type(error).__name__
address = ("127.0.0.1", PORT)
if rank:
    print("digits", tried(lambda: sorted(os.listdir(root / "private/digits"))))
    print("private", tried(lambda: sorted(os.listdir(root / "private"))))
    print("kept", tried(lambda: os.listdir(root / "private/.millpond")))
    print("other", tried(lambda: (root / "private/other/note").read_text()))
    print("link", tried(lambda: (root / "public/link").read_text()))
    digits = open(root / "private/digits/images")
    print("open", tried(lambda: (root / f"public/{digits.fileno()}").read_text()))
    print("written", tried(lambda: (root / "private/digits/new").write_text("x")))
print("connect", tried(lambda: socket.create_connection(address, 3)))
print("interfaces", [name for _, name in socket.if_nameindex()])
print("RANK" in os.environ, "MASTER_ADDR" in os.environ)
"""
)


@pytest.fixture
def launcher(tmp_path: Path, zygote: Zygote) -> Launcher:
    return Launcher(tmp_path, zygote)


def test_a_script_has_no_network_and_its_own_folders_alone(launcher: Launcher) -> None:
    device = launcher.devices["csd0"]
    (device.volume / "private/digits/images").write_text("x")
    (device.volume / "private/other/note").write_text(SEEN)
    (device.volume / "public/link").symlink_to(device.volume / "private/other/note")
    for number in range(100):
        (device.volume / f"public/{number}").symlink_to(f"/proc/self/fd/{number}")
    (device.volume / "private/.millpond/job").mkdir(parents=True)
    (device.volume / "private/.millpond/job/kept").write_text(SEEN)
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = LOOKING.replace("PORT", str(server.getsockname()[1]))
        ran = launcher.run(code, folders=("private/digits",))
        assert ran.ended.error == "", ran
        every = launcher.run(code)
    said = device.log.splitlines()
    assert ran.lines == {"host": ["connect OSError", "interfaces ['lo']", "True False"]}
    assert said[:7] == [
        "digits ['images']",
        "private ['digits']",
        "kept FileNotFoundError",
        "other FileNotFoundError",
        "link OSError",
        "open OSError",
        "written OSError",
    ]
    assert said[7:10] == ran.lines["host"]
    assert every.ended.error == "" and f"other {SEEN}" in said  # without --data: all that the policy allows
    assert "kept []" in said  # but what jobs keep there


def test_what_is_printed_stays_unless_the_device_tells_all(tmp_path: Path, zygote: Zygote) -> None:
    code = BEGIN + f"print('{SEEN}', rank)\nopen('a', 'w').write('{SEEN}')\nrank and {{}}['{SEEN}']\n"
    for errors in ("location", "full"):
        base = tmp_path / errors
        base.mkdir()
        launcher = Launcher(base, zygote, privacy=Privacy(errors=errors))  # type: ignore[arg-type]
        ran = launcher.run(code, most_saved=1000)
        assert set(ran.files) <= {"host/a"}
        if errors == "full":
            assert ran.lines["csd0"][0] == f"{SEEN} 1" and "KeyError" in ran.ended.error
            continue
        assert ran.lines.get("csd0") is None and f"{SEEN} 1" in launcher.devices["csd0"].log
        told = "csd0 (rank 1): it ended with exit code 1: KeyError at a.py:10"
        assert ran.ended.error == f"{told}; its message stays on the device; the others were ended"


REFUSED = [
    (
        "few",
        BEGIN
        + "from millpond.train.distributed.channel import own_channel\n"
        + "own_channel().collectives().mean(torch.ones(9 + 6), 3 if rank else 8, 8, 0.1)\n",
        "policy.least_samples: an exchange of 3 samples; it must cover 8 or more",
    ),
    (
        "one more sample in a metric",
        BEGIN + "with millpond.train.group(model) as group:\n    group.report('loss', 1.0, 1)\n",
        "policy.least_samples: an exchange of 1 samples; it must cover 8 or more",
    ),
    (
        "a metric named by data",
        BEGIN + "with millpond.train.group(model) as group:\n    group.report(chr(120) + 'y', 1.0, 8)\n",
        "a metric's name must be an identifier in the script's files",
    ),
    (
        "a large model",
        BEGIN + "with millpond.train.group(nn.Linear(200, 1)):\n    pass\n",
        "policy.largest_model: a model of",
    ),
    (
        "values that are no numbers",
        BEGIN + STEPS.replace("rows)", "rows / (1 - rank))").replace("COUNT", "64").replace("BATCH", "16"),
        "the sums of a step are not finite",
    ),
    (
        "a device's model",
        BEGIN
        + "from millpond.train.distributed.channel import own_channel\n"
        + "found = own_channel().collectives()\nfound.rank = 0\nfound.share([torch.ones(9)])\n",
        "the script's process sent what is no exchange",
    ),
    (
        "what is no exchange",
        BEGIN + "if rank:\n    os.write(4, b'x' * 999)\nimport time\ntime.sleep(600)\n",
        "the script's process sent what is no exchange",
    ),
]


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (Gather(7), "a script gives away too many numbers, or one that is no count"),
        (ShareState(7), "a script gives away too many numbers, or one that is no count"),
        (Contribution(0, 9, 0, 0.1, 7.0), "a step of no samples has sums"),
        (Contribution(0, 9, 0, 0.1, 0.0, 7), "a step of 0 samples counts 7"),
    ],
)
def test_what_tells_of_no_samples_tells_little(request_: Message, text: str) -> None:
    """Numbers of one's own and sizes of models are few; a worker without samples has no sums."""
    guard = GroupGuard(Policy(), {})
    assert guard.checked(Contribution(0, 9, 0, 0.1, 0.0))
    with pytest.raises(Refused) as caught:
        for _ in range(5000):
            guard.checked(request_)
    assert caught.value.text == text


@pytest.mark.parametrize(("code", "text"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_the_policy_forbids_ends_the_launch_by_name(
    tmp_path: Path, zygote: Zygote, code: str, text: str
) -> None:
    launcher = Launcher(tmp_path, zygote, policy=Policy(largest_model=100))
    ran = launcher.run(code)
    assert ran.ended.error.startswith(f"csd0 (rank 1): {text}"), ran
    assert ran.ended.error.endswith("the others were ended")


def test_a_script_that_stops_in_the_middle_of_a_request_is_ended(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the device would take no other launch, whether the host is there or not."""
    monkeypatch.setattr(confined_script, "SCRIPT_SECONDS", 0.5)
    ran = launcher.run(BEGIN + "if rank:\n    os.write(4, b'\\0')\nimport time\ntime.sleep(600)\n")
    assert ran.ended.error.startswith("csd0 (rank 1): the script's process sent what is no exchange"), ran


FAILS = [
    ("rank == 1 and os.kill(os.getpid(), 9)", "csd0 (rank 1): it ended with exit code 137"),
    ("rank == 0 and os.kill(os.getpid(), 9)", "host (rank 0): it ended with exit code 137"),
    (
        "rank == 1 and sys.exit(0)",
        "csd0 (rank 1): its script has ended, and others wait for it in an exchange",
    ),
    (
        "rank == 1 and group.report('rank', 1.0, 8)",
        "csd0 (rank 1): it reports a metric while rank 0 is in a step",
    ),
]


@pytest.mark.parametrize(("what", "text"), FAILS)
def test_a_rank_that_does_not_take_part_ends_the_launch_by_name(
    launcher: Launcher, what: str, text: str
) -> None:
    steps = STEPS.replace("COUNT", "64").replace("BATCH", "16")
    ran = launcher.run(BEGIN + steps.replace("        group.step", f"        {what}\n        group.step"))
    assert ran.ended.error == f"{text}; the others were ended", launcher.devices["csd0"].log


def test_batches_are_of_whole_groups_and_metrics_are_exact(launcher: Launcher) -> None:
    code = BEGIN + STEPS.replace("COUNT", "30 if rank else 5").replace("BATCH", "16")
    code += (
        "    print(group.samples)\n    mean = group.report('rank', 22.0 * rank, 11 * rank)\n    print(mean)\n"
    )
    ran = launcher.run(code)
    assert ran.ended.error == "", launcher.devices["csd0"].log
    assert ran.lines == {"host": ["(5, 30)", "2.0"], "all": ["rank 2 of 11 samples"]}
    assert launcher.devices["csd0"].log.splitlines()[-1] == "2.0"
    sent = launcher.devices["csd0"].sent
    assert 0 < sent["parameters"] <= 4 * 5 * 4 and sent["launched"] < 1000  # 5 values a step, in at most 4


def test_a_device_with_fewer_samples_than_a_group_takes_no_part(launcher: Launcher) -> None:
    ran = launcher.run(BEGIN + STEPS.replace("COUNT", "5").replace("BATCH", "16"))
    told = "rank 1 has 5 samples; its device's policy.least_samples is 8"
    assert told in ran.ended.error or told in "".join(ran.lines["host"]), ran


def test_a_device_takes_the_scripts_that_it_lists(tmp_path: Path, zygote: Zygote) -> None:
    code = BEGIN + "print('ran')\n"
    digest = script_digest("a.py", {"a.py": code.replace('Path("/volume")', "PLACE").encode()})
    for name, listed in (("no", ("0" * 64,)), ("other", (digest,))):
        (tmp_path / name).mkdir()
        launcher = Launcher(tmp_path / name, zygote, policy=Policy(code="listed", listed=listed))
        ran = launcher.run(code)
        assert "csd0 (rank 1): policy.code: the script is not listed; its digest is " in ran.ended.error
        assert launcher.devices["csd0"].log == ""
    told = ran.ended.error.split()[14].removesuffix(";")
    (tmp_path / "yes").mkdir()
    same = code.replace('Path("/volume")', "Path('/volume')")
    digest = script_digest("a.py", {"a.py": same.encode()})
    assert digest != told
    launcher = Launcher(tmp_path / "yes", zygote, policy=Policy(code="listed", listed=(digest,)))
    assert launcher.run(same).ended.error == "" and launcher.devices["csd0"].log == "ran\n"


def test_a_device_that_wants_signatures_refuses_others(tmp_path: Path, zygote: Zygote) -> None:
    owners = ("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIE1lZ2FsaXRoaWNQb25kT2ZNaWxsaW5nU3RvbmVzMDA= a",)
    launcher = Launcher(tmp_path, zygote, policy=Policy(code="signed", owners=owners))
    assert "policy.code: the code is not signed" in launcher.run(BEGIN).ended.error
    told = launcher.run(BEGIN, signature="no signature").ended.error
    assert "policy.code: no owner of the device has signed the code" in told


def test_a_device_takes_the_script_that_its_owner_has_signed(tmp_path: Path, zygote: Zygote) -> None:
    def keygen(*arguments: str | Path, stdin: str = "") -> str:
        command = ["ssh-keygen", "-q", *map(str, arguments)]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, check=True).stdout

    keygen("-t", "ed25519", "-N", "", "-f", tmp_path / "key")
    owners = (" ".join((tmp_path / "key.pub").read_text().split()[:2]),)
    code = "import os\nprint('ran', os.environ['RANK'])\n"
    digest = script_digest("a.py", {"a.py": code.encode()})
    signature = keygen("-Y", "sign", "-n", "millpond-code", "-f", tmp_path / "key", stdin=digest)
    launcher = Launcher(tmp_path, zygote, policy=Policy(code="signed", owners=owners))
    assert launcher.run(code, signature=signature).ended.error == ""
    assert launcher.devices["csd0"].log == "ran 1\n"
    told = launcher.run(code, "--limit", "41", signature=signature).ended.error
    assert "policy.code: no owner of the device has signed the code" in told
    told = launcher.run(code + "#", signature=signature).ended.error
    assert "policy.code: no owner of the device has signed the code" in told
    told = launcher.run(code, signature=signature, module="base64").ended.error
    assert "csd0 (rank 1): policy.code: no owner of the device has signed the code" in told


def test_a_forbidden_folder_is_refused_by_name(tmp_path: Path, zygote: Zygote) -> None:
    launcher = Launcher(tmp_path, zygote, policy=Policy(folders=("private/digits",)))
    for folder, text in (
        ("private/other", "policy.folders: jobs may not read 'private/other'"),
        ("private", "policy.folders: jobs may not read 'private'"),
        ("../private", "the data folder '../private' is not in private or public"),
        ("public", "the data folder 'public' is not what the request says it is"),
    ):
        assert text in launcher.run(BEGIN, folders=(folder,)).ended.error
    launcher.run(BEGIN + "print(os.listdir(root / 'private')) if rank else 0\n")
    assert launcher.devices["csd0"].log == "['digits']\n"


def test_an_ordinary_script_is_told_what_to_do(launcher: Launcher) -> None:
    """Before: "MASTER_ADDR expected, but not set"."""
    waits = "import os, time\ntime.sleep(0 if int(os.environ['RANK']) else 60)\n"
    ran = launcher.run(f"{waits}import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    assert "train with millpond.train.group in place of torch.distributed, or leave --private out" in (
        ran.ended.error
    )


@pytest.mark.parametrize("changes", [{"variables": (("A", "b"),)}, {"processes": 2}, {"shares": True}])
def test_what_no_owner_signs_does_not_come_with_a_script(
    launcher: Launcher, changes: dict[str, object]
) -> None:
    ran = launcher.run("print('run')\n", **changes)
    assert "a private launch is its script and files alone, which owners sign" in ran.ended.error


@pytest.mark.parametrize(
    ("message", "lie"),
    [
        ("GroupJoined", lambda least: GroupJoined((1,) * len(least))),
        ("GroupJoined", lambda least: GroupJoined(least[:1])),
        ("Gathered", lambda values: Gathered(tuple(value - 1 for value in values))),
    ],
)
def test_a_host_does_not_choose_the_groups_of_a_device(
    tmp_path: Path, zygote: Zygote, monkeypatch: pytest.MonkeyPatch, message: str, lie: Callable[..., Message]
) -> None:
    """Scripts that are signed would give sums over other samples for each rank, or number of samples."""
    launcher = Launcher(tmp_path, zygote, policy=Policy(least_samples=8))
    code = BEGIN + STEPS.replace("COUNT", "64").replace("BATCH", "16")
    assert launcher.run(code).ended.error == ""
    monkeypatch.setattr(group, message, lie)
    ended = launcher.run(code).ended
    assert "the host tells the script of other groups than this device has" in ended.error, ended
