#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# `make test-deb`: what a machine goes through with the packages in dist/. chroot.sh runs this in a fresh Debian.
#
# They are installed, upgraded from an earlier version, and trained with by a member of the group; then removed, and
# purged: nothing may be left of them. systemd runs here, as the first process of namespaces of its own, and starts
# the units and a mount of /etc/fstab. Devices are emulated.
set -eu
apt="apt-get -q=2 -o Dpkg::Use-Pty=0 -o APT::Sandbox::User=root"
work=/root/work
fleet=/var/lib/millpond
began=$(date +%s)

say() { echo "millpond test-deb: $(($(date +%s) - began)) s: $*"; }

fail() {
    echo "millpond test-deb: $*" >&2
    exit 1
}

quietly() { "$@" >"$work/log" 2>&1 || { tail -n 20 "$work/log" >&2 && fail "failed: $*"; }; }

# $1: what is waited for; $2: at most how many seconds; $*: the command that tells it.
until_true() {
    what=$1 end=$(($(date +%s) + $2))
    shift 2
    until "$@" >/dev/null 2>&1; do
        [ "$(date +%s)" -lt "$end" ] || fail "$what: did not come"
        sleep 0.5
    done
}

# Runs this script once more, below a systemd whose control groups are in one that is removed afterwards.
boot() {
    ln -s /dev/null /etc/systemd/system/systemd-sysctl.service # its settings would be the machine's
    mount -t cgroup2 cgroup2 /mnt
    group=/mnt/millpond-test-deb-$(date +%s)
    mkdir "$group"
    unshare --mount --pid --fork --kill-child sh -eu -c '
        echo 0 >"$1/cgroup.procs"
        exec unshare --cgroup sh -eu -c "
            mount -t proc proc /proc
            umount -R /sys /mnt
            mount -t sysfs sysfs /sys
            mount -t cgroup2 cgroup2 /sys/fs/cgroup
            exec env -i container=namespaces PATH=$PATH LC_ALL=C.UTF-8 /lib/systemd/systemd --unit=basic.target"
        ' sh "$group" >"$work/systemd" 2>&1 &
    until_true "systemd" 30 pgrep --parent $! systemd
    inside="nsenter --target $(pgrep --parent $! systemd) --mount --pid --cgroup"
    until_true "systemd" 30 $inside systemctl is-active basic.target
    code=0
    $inside sh -eu /packages/test-deb.sh booted || code=$?
    echo 1 >"$group/cgroup.kill"
    until_true "the end of systemd" 20 find "$group" -depth -type d -exec rmdir {} +
    exit $code
}

# All paths but those that dpkg, apt and caches of the system write at each call.
listing() {
    find / -xdev \( -path /dist -o -path /packages -o -path /tmp -o -path /proc -o -path /sys -o -path /dev -o \
        -path /run -o -path /home -o -path "$work" -o -path /old -o -path /var/log -o -path /var/tmp -o \
        -path /var/cache -o -path /var/lib/apt -o -path /var/lib/dpkg -o -path /etc/fstab \) -prune -o -print | sort
    cut -d: -f1 /etc/passwd /etc/group | sort
    ls /var/lib/dpkg/info | grep millpond || true
    systemctl list-unit-files --no-legend | grep -i millpond || true
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
    rm -rf "$work/deb"
}

as_member() { runuser -u alice -- env HOME=/home/alice "$@"; }

# $1: of a unit, $2: what systemctl says of it.
state() { [ "$(systemctl is-active "millpond-$1")" = "$2" ] || { systemctl status "millpond-$1" >&2 || true && fail "millpond-$1 is not $2"; }; }

mode() { [ "$(stat -c '%a %G' $fleet)" = "710 millpond" ] || fail "$fleet is $(stat -c '%a %G' $fleet)"; }

units() {
    millpond init --devices 3 >/dev/null
    systemctl start millpond-host
    state host active
    mode
    as_member millpond jobs >/dev/null
    systemctl restart millpond-host
    state host active
}

train() {
    as_member /usr/lib/millpond/bin/python /home/alice/mine/data.py
    for device in csd0 csd1 csd2; do
        mkdir -p "$fleet/devices/$device/flash/private"
        cp -r "/home/alice/mine/data/$device/." "$fleet/devices/$device/flash/private"
    done
    millpond emulate --group millpond >"$work/emulate" 2>&1 &
    machine=$!
    until_true "the fleet" 120 sh -c '[ "$(millpond devices 2>/dev/null | grep -c " ready ")" = 3 ]'
    (cd /home/alice/mine && as_member millpond train job.toml) >"$work/trained"
    tail -n 2 "$work/trained"
    ! runuser -u mallory -- millpond jobs --fleet $fleet 2>"$work/refused" || fail "mallory is in no group"
    say "a user who is not in the group gets: $(cat "$work/refused")"
}

mounts() {
    echo hello >"$work/hello"
    millpond cp "$work/hello" csd0:public/hello >/dev/null
    mkdir -p /media/csd0 /media/csd1
    mount -t millpond csd0 /media/csd0
    cmp "$work/hello" /media/csd0/public/hello
    umount /media/csd0
    echo "csd0 /media/csd0 millpond ro,wait=30,nofail,x-systemd.automount 0 0" >>/etc/fstab
    systemctl daemon-reload
    systemctl start media-csd0.automount
    state_of=$(systemctl is-active media-csd0.mount || true)
    cmp "$work/hello" /media/csd0/public/hello || { systemctl status media-csd0.mount >&2 || true && fail "no automount"; }
    say "the automount of /etc/fstab was $state_of and is $(systemctl is-active media-csd0.mount)"
    systemctl stop media-csd0.automount media-csd0.mount
    rmdir /media/csd0 /media/csd1
    sed -i '/millpond/d' /etc/fstab
    systemctl daemon-reload
}

tried() {
    listing >"$work/before"
    quietly $apt install --no-install-recommends "$work"/earlier/*.deb
    usermod --append --groups millpond alice
    say "installed: the units wait for what they need"
    state host inactive
    state agent inactive
    (cd /home/alice && as_member millpond new mine --template text >/dev/null)
    units
    say "upgrade while the host's unit runs"
    before=$(systemctl show -P MainPID millpond-host)
    quietly $apt install --no-install-recommends /dist/millpond-*.deb
    millpond --version
    man -w millpond-train millpond-agent mount.millpond >/dev/null
    state host active
    mode
    [ "$before" != "$(systemctl show -P MainPID millpond-host)" ] || fail "an upgrade left the old daemon"
    systemctl stop millpond-host
    say "train as a member of the group"
    train
    say "mount, by hand and by systemd"
    mounts
    kill -INT $machine
    wait $machine
    systemctl start millpond-host
    say "remove"
    quietly $apt remove 'millpond-*'
    state host inactive
    [ -e $fleet/fleet.toml ] || fail "a removal took the fleet away"
    [ ! -e /usr/lib/millpond ] || { find /usr/lib/millpond | head >&2 && fail "a removal left files"; }
    say "purge"
    quietly $apt purge 'millpond-*'
    listing >"$work/after"
    diff "$work/before" "$work/after" || fail "the lines above are left"
    say "nothing is left"
}

mkdir -p $work
if [ "${1-}" = booted ]; then
    tried
    exit
fi
quietly $apt update
quietly $apt install --no-install-recommends openssh-server procps man-db systemd systemd-sysv
useradd --create-home alice
useradd --create-home mallory
earlier
say "what the packages need of Debian"
quietly $apt install --no-install-recommends "$work"/earlier/*.deb
quietly $apt purge 'millpond-*' # what they need of Debian stays, and is no part of what is compared
boot
