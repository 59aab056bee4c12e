#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# `make test-deb`: what a machine goes through with the packages in dist/. chroot.sh runs this in a fresh Debian.
#
# They are installed, upgraded from an earlier version, and trained with by a member of the group; then removed, and
# purged: nothing may be left of them. Devices are emulated. No systemd runs here, so no unit is started.
set -eu
apt="apt-get -q=2 -o Dpkg::Use-Pty=0 -o APT::Sandbox::User=root"
work=$(mktemp -d)

say() { echo "millpond test-deb: $*"; }

# All paths but those that dpkg, apt and caches of the system write at each call.
listing() {
    find / -xdev \( -path /dist -o -path /packages -o -path /tmp -o -path /proc -o -path /sys -o -path /dev -o \
        -path /run -o -path /home -o -path /old -o -path /var/log -o -path /var/cache -o -path /var/lib/apt -o \
        -path /var/lib/dpkg \) -prune -o -print | sort
    cut -d: -f1 /etc/passwd /etc/group | sort
    ls /var/lib/dpkg/info /var/lib/systemd/deb-systemd-helper-enabled 2>/dev/null | grep millpond || true
}

# The same package as of an earlier version.
earlier() {
    mkdir -p "$work/earlier"
    for deb in /dist/millpond-host_*.deb /dist/millpond-agent_*.deb /dist/millpond-common_*.deb; do
        rm -rf "$work/deb"
        dpkg-deb -R "$deb" "$work/deb"
        sed -i "s/\(^Version: \|= \)[0-9][^ )]*/\10.0.1-1/" "$work/deb/DEBIAN/control"
        dpkg-deb -Zgzip -z1 -b "$work/deb" "$work/earlier" >/dev/null
    done
}

as_member() { runuser -u alice -- env HOME=/home/alice "$@"; }

train() {
    usermod --append --groups millpond alice
    (cd /home/alice && as_member millpond new mine --template text >/dev/null)
    millpond init --devices 3 >/dev/null
    as_member /usr/lib/millpond/bin/python /home/alice/mine/data.py
    for device in csd0 csd1 csd2; do
        mkdir -p "/var/lib/millpond/devices/$device/flash/private"
        cp -r "/home/alice/mine/data/$device/." "/var/lib/millpond/devices/$device/flash/private"
    done
    millpond emulate --group millpond >"$work/emulate" 2>&1 &
    machine=$!
    until [ "$(millpond devices 2>/dev/null | grep -c ' ready ')" = 3 ]; do
        kill -0 $machine || { cat "$work/emulate" && exit 1; }
        sleep 0.5
    done
    (cd /home/alice/mine && as_member millpond train job.toml) >"$work/trained"
    tail -n 2 "$work/trained"
    fleet=/var/lib/millpond
    ! runuser -u mallory -- millpond jobs --fleet $fleet 2>"$work/refused" || { echo "mallory is in no group" >&2 && exit 1; }
    say "a user who is not in the group gets: $(cat "$work/refused")"
    kill -INT $machine
    wait $machine
}

$apt update
$apt install --no-install-recommends openssh-server procps man-db >/dev/null 2>&1
useradd --create-home alice
useradd --create-home mallory
earlier
say "install"
$apt install --no-install-recommends "$work"/earlier/*.deb >"$work/log" 2>&1 || { tail -n 20 "$work/log" && exit 1; }
$apt purge 'millpond-*' >/dev/null 2>&1 # what they need of Debian stays, and is no part of what is compared
listing >"$work/before"
$apt install --no-install-recommends "$work"/earlier/*.deb >/dev/null 2>&1
say "upgrade"
$apt install --no-install-recommends /dist/millpond-*.deb >"$work/log" 2>&1 || { tail -n 20 "$work/log" && exit 1; }
millpond --version
man -w millpond-train millpond-agent >/dev/null
getent group millpond >/dev/null
say "train as a member of the group"
train
say "remove"
$apt remove 'millpond-*' >/dev/null 2>&1
[ -e /var/lib/millpond/fleet.toml ] || { echo "a removal took the fleet away" >&2 && exit 1; }
[ ! -e /usr/lib/millpond ] || { find /usr/lib/millpond | head >&2 && exit 1; }
say "purge"
$apt purge 'millpond-*' >/dev/null 2>&1
listing >"$work/after"
diff "$work/before" "$work/after" || { echo "the lines above are left" >&2 && exit 1; }
say "nothing is left"
