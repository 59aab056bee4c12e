#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs a command in a fresh small system of a release, with dist/ at /dist and this folder at /packages.
#
#   chroot.sh RELEASE COMMAND...     of Debian, or Ubuntu's noble; COMMAND is run by sh
#
# The system is made once, in .chroot. What a command writes goes to memory, in a mount namespace of its own: nothing
# stays mounted, and nothing runs on. It needs root and debootstrap.
set -eu
release=$1
shift
base=$PWD/.chroot/$release
here=$PWD

if [ ! -e "$base/made" ]; then
    rm -rf "$base"
    mkdir -p "$base"
    case $release in
    noble) mirror=http://archive.ubuntu.com/ubuntu components=main,universe script=gutsy ;;
    *) mirror=http://deb.debian.org/debian components=main script=sid ;;
    esac
    # Debian has no keys of Ubuntu: what is tried there is not verified.
    [ "$release" != noble ] || unverified=--no-check-gpg
    debootstrap ${unverified-} --variant=minbase --components=$components "$release" "$base/root" "$mirror" "$script" \
        >"$base/log" 2>&1 || { tail -n 5 "$base/log" >&2 && exit 1; }
    rm -rf "$base/root/var/cache/apt/archives"/*.deb
    touch "$base/made"
fi
exec timeout "${SECONDS_AT_MOST:-1200}" unshare --mount --pid --ipc --uts --fork --kill-child --propagation private \
    sh -eu -c '
    base=$1 here=$2 command=$3
    mount -t tmpfs -o size=12G upper "$base/root/mnt"
    mkdir -p "$base/root/mnt/upper" "$base/root/mnt/work" "$base/root/mnt/system"
    mount -t overlay -o "lowerdir=$base/root,upperdir=$base/root/mnt/upper,workdir=$base/root/mnt/work" system \
        "$base/root/mnt/system"
    cd "$base/root/mnt/system"
    mkdir -p dist packages old etc/ssl
    mount --bind -o ro "$here/dist" dist
    mount --bind -o ro "$here/images/packages" packages
    mount --rbind /dev dev
    mount --rbind /sys sys
    mount -t proc proc proc
    mount -t tmpfs tmpfs run
    cat /etc/resolv.conf >etc/resolv.conf
    cat /etc/hosts >etc/hosts
    cat /etc/ssl/certs/ca-certificates.crt >etc/ssl/host.crt # of a network with an authority of its own
    pivot_root . old
    umount -l /old
    exec env -i HOME=/root PIP_CERT=/etc/ssl/host.crt TERM=dumb LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
        PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin sh -eu -c "$command"
    ' sh "$base" "$here" "$*"
