# SPDX-License-Identifier: Apache-2.0
"""Links between hosts by the kernel's WireGuard: two network namespaces of a guest, and what a wire sees."""

from __future__ import annotations

import base64

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from .guest import Guest

END = """
import base64, ipaddress, sys
from millpond.linux.netlink.wireguard import WireGuardLink, WireGuardPeer

name, key, other, address, network = sys.argv[1:]
link = WireGuardLink(name, base64.b64decode(key), 51820)
networks = (ipaddress.IPv4Network(network),)
link.open([WireGuardPeer(other, address, 51820, networks)])
"""
SNIFFER = """
import socket
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as sock:
    sock.bind(("wire", 0))
    print("listens", flush=True)
    marks = sizes = 0
    while True:
        frame = sock.recv(65536)
        if b"to the end" in frame:
            break
        marks += b"millpond" in frame
        sizes += len(frame) > 100
print(f"{marks} {sizes > 0}", flush=True)
"""
PROGRAM = f"""
import socket, subprocess, sys
END, SNIFFER = {END!r}, {SNIFFER!r}
keys, publics = sys.argv[1:3], sys.argv[3:5]

def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout

def inside(end, *command):
    return run("ip", "netns", "exec", "ab"[end], *command)

subprocess.run(["modprobe", "wireguard"], check=True)
for end in (0, 1):
    run("ip", "netns", "add", "ab"[end])
run("ip", "link", "add", "wire", "netns", "a", "type", "veth", "peer", "name", "wire", "netns", "b")
for end in (0, 1):
    inside(end, "ip", "addr", "add", f"192.0.2.{{end + 1}}/24", "dev", "wire")
    inside(end, "ip", "addr", "add", f"10.77.{{end}}.1/32", "dev", "lo")
    for name in ("lo", "wire"):
        inside(end, "ip", "link", "set", name, "up")
for end in (0, 1):
    there = (publics[1 - end], f"192.0.2.{{2 - end}}", f"10.77.{{1 - end}}.0/24")
    inside(end, sys.executable, "-c", END, "mpw-link", keys[end], *there)
    inside(end, "ip", "route", "add", f"10.77.{{1 - end}}.0/24", "dev", "mpw-link", "src", f"10.77.{{end}}.1")
sniffer = subprocess.Popen(
    ["ip", "netns", "exec", "b", sys.executable, "-c", SNIFFER], stdout=subprocess.PIPE, text=True
)
assert sniffer.stdout.readline() == "listens\\n"
mark = b"millpond".hex()
inside(0, "ping", "-c", "2", "-W", "20", "-p", mark, "-s", "200", "10.77.1.1")
inside(0, sys.executable, "-c", "import socket\\nsocket.socket(2, 2).sendto(b'to the end', ('192.0.2.2', 9))")
print(sniffer.stdout.readline().strip())
inside(0, sys.executable, "-c", "from millpond.linux.netlink import wireguard\\nwireguard.delete('mpw-')")
print("left" if "mpw-link" in inside(0, "ip", "link") else "gone")
"""


def test_what_goes_over_a_link_is_encrypted(guest: Guest) -> None:
    keys = [X25519PrivateKey.generate() for _ in range(2)]
    private = [base64.b64encode(key.private_bytes_raw()).decode() for key in keys]
    public = [base64.b64encode(key.public_key().public_bytes_raw()).decode() for key in keys]
    result = guest.python(PROGRAM, *private, *public)
    assert result.splitlines() == ["0 True", "gone"]
