#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What millpond needs of the machine beyond Python packages. Installs it where that is safe (root on Debian),
# otherwise says in one line what is missing and what to do.
#
#   prerequisites.sh python PYTHON   a Python that can make virtual environments
#   prerequisites.sh venv PYTHON FOLDER ASKED  a virtual environment of it; where it was ASKED for, of no other version
#   prerequisites.sh fuse PYTHON     what pip builds fuse-python with, where that has no wheel for this Python
#   prerequisites.sh sshd            openssh-server, whose service does not start
#   prerequisites.sh guest           what builds and runs the guest of the tests: QEMU, mmdebstrap, squashfs-tools, cpio
#   prerequisites.sh tests           programs without which a few tests are skipped: busybox, sfdisk, RAUC, veritysetup, osslsigncode, Chromium, promtool, tmux
#   prerequisites.sh image           what builds the agent image: a cross compiler, and tools for file systems
#   prerequisites.sh qemu            what runs it on this machine, and updates it: QEMU for aarch64, firmware, RAUC
#   prerequisites.sh bench           a C compiler, and the peers that benchmarks compare with
#   prerequisites.sh wheels          compilers for the processors of wheels
#   prerequisites.sh deb             what builds and looks over Debian packages
#   prerequisites.sh chroot          what makes small systems of Debian and Ubuntu: root, debootstrap
#   prerequisites.sh group NAME UNITDIR  a group of the system, where UNITDIR is one that systemd looks at
#   prerequisites.sh reload UNITDIR  systemd reads its units again, where it runs and looks there
#   prerequisites.sh restart UNITDIR  those services of UNITDIR that run are restarted: the files below them are new
#   prerequisites.sh stop UNITDIR    the services of UNITDIR stop, where systemd runs
set -eu

is_root() { [ "$(id -u)" -eq 0 ]; }

fail() {
    echo "millpond $*" >&2
    exit 1
}

can_install() { is_root && [ -e /etc/debian_version ] && command -v apt-get >/dev/null; }

systemd_runs() { [ -d /run/systemd/system ]; }

# Whether the folder $1 is one of those in which systemd finds units.
systemd_looks() {
    case $1 in
    /etc/systemd/* | /run/systemd/* | /lib/systemd/* | /usr/lib/systemd/* | /usr/local/lib/systemd/*) ;;
    *) return 1 ;;
    esac
}

need_group() {
    grep -q "^$1:" /etc/group && return
    if command -v groupadd >/dev/null; then groupadd --system "$1"; else systemd-sysusers --inline "g $1 -"; fi
}

# Another apt may be at work for minutes, such as unattended-upgrades; apt itself waits for dpkg's lock alone.
apt_update() {
    waited=0
    until said=$(apt-get update 2>&1); do
        case $said in *"Could not get lock"*) ;; *) waited=600 ;; esac
        [ $waited -lt 600 ] || { echo "$said" && return 1; }
        sleep 5
        waited=$((waited + 5))
    done
}

apt_install() {
    echo "millpond: installing $* (apt)"
    log=$(mktemp)
    if ! { apt_update && DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 install -y \
        --no-install-recommends "$@"; } >"$log" 2>&1 </dev/null; then
        tail -n 5 "$log" >&2
        rm -f "$log"
        fail "could not install $*: see the lines above"
    fi
    rm -f "$log"
}

need_python() {
    python=$1
    if ! command -v "$python" >/dev/null; then
        can_install || fail "needs Python 3.11: sudo apt install python3 python3-venv"
        apt_install python3 python3-venv
    fi
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "needs Python 3.11 or newer; $python is $("$python" -V 2>&1): make PYTHON=/path/to/python3.11"
    "$python" -c 'import ensurepip, venv' 2>/dev/null && return
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    can_install || fail "needs python$version-venv: sudo apt install python$version-venv"
    apt_install "python$version-venv"
}

version_of() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null; }

# One that is there stays, unless its Python is gone or, where a version is asked for, another one.
make_venv() {
    python=$1 folder=$2 asked=$3
    if [ ! -e "$folder/bin" ]; then
        "$python" -m venv "$folder"
        return
    fi
    found=$(version_of "$folder/bin/python") || found=
    wanted=$(version_of "$python")
    [ -n "$found" ] && [ -x "$folder/bin/pip" ] && { [ -z "$asked" ] || [ "$found" = "$wanted" ]; } && return
    has=${found:+Python $found}
    echo "millpond: $folder has ${has:-no Python that runs}: it is made anew with Python $wanted"
    "$python" -m venv --clear "$folder"
}

# fuse-python 1.0.9 has wheels up to Python 3.12. Where there is none, pip compiles it against libfuse 2.
need_fuse_python() {
    python=$1
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 13))' || return 0  # has a wheel
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    missing=
    command -v cc >/dev/null || missing="$missing gcc libc6-dev"
    command -v pkg-config >/dev/null || missing="$missing pkg-config"
    pkg-config --exists fuse 2>/dev/null || missing="$missing libfuse-dev"
    [ -e "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ||
        missing="$missing python$version-dev"
    [ -z "$missing" ] && return
    can_install || fail "needs$missing to build fuse-python for Python $version: sudo apt install$missing"
    # shellcheck disable=SC2086  # one argument per package
    apt_install $missing
}

# Some packages start a service when they are installed, which must not happen because of a demo or a test.
# $1: the package. $*: its units.
apt_install_stopped() {
    package=$1
    shift
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        trap 'rm -f /usr/sbin/policy-rc.d' EXIT
        trap 'exit 130' INT
        trap 'exit 143' TERM HUP
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 0755 "$policy"
    fi
    apt_install "$package"
    if systemd_runs; then systemctl --quiet disable --now "$@" 2>/dev/null || true; fi
}

# millpond runs its own sshd inside each device: the user's machine does not begin to answer on port 22.
need_sshd() {
    PATH=$PATH:/usr/sbin:/sbin command -v sshd >/dev/null && return
    can_install || fail "needs openssh-server: sudo apt install openssh-server"
    apt_install_stopped openssh-server ssh.service ssh.socket
}

want_promtool() {
    command -v promtool >/dev/null && return
    if can_install && (apt_install_stopped prometheus prometheus.service); then return; fi
    echo "millpond: promtool is not installed, so its tests are skipped: sudo apt install prometheus"
}

# $*: pairs of a program and the package that brings it.
need_programs() {
    missing=
    for pair in "$@"; do
        PATH=$PATH:/usr/sbin:/sbin command -v "${pair%%:*}" >/dev/null || missing="$missing ${pair#*:}"
    done
    [ -z "$missing" ] && return
    can_install || fail "needs$missing: sudo apt install$missing"
    # shellcheck disable=SC2086  # one argument per package
    apt_install $missing
}

need_guest_tools() {
    need_programs qemu-system-x86_64:qemu-system-x86 mmdebstrap:mmdebstrap mksquashfs:squashfs-tools cpio:cpio
    need_debian_keys
}

# Ubuntu has none of Debian's.
need_debian_keys() {
    [ -e /usr/share/keyrings/debian-archive-keyring.gpg ] && return
    can_install || fail "needs debian-archive-keyring: sudo apt install debian-archive-keyring"
    apt_install debian-archive-keyring
}

need_image_tools() {
    need_programs aarch64-linux-gnu-gcc:gcc-aarch64-linux-gnu aarch64-linux-gnu-objcopy:binutils-aarch64-linux-gnu \
        cpio:cpio depmod:kmod mcopy:mtools mkfs.vfat:dosfstools mksquashfs:squashfs-tools sfdisk:fdisk \
        veritysetup:cryptsetup-bin zstd:zstd
    need_arm64_headers
}

need_arm64_headers() {
    [ -e /usr/aarch64-linux-gnu/include/stdint.h ] && return
    [ "$(uname -m)" != aarch64 ] || return 0
    can_install || fail "needs libc6-dev-arm64-cross: sudo apt install libc6-dev-arm64-cross"
    apt_install libc6-dev-arm64-cross
}

need_qemu() {
    need_programs qemu-system-aarch64:qemu-system-arm rauc:rauc mksquashfs:squashfs-tools
    want_programs "no image is signed for Secure Boot" osslsigncode:osslsigncode
    [ -e /usr/share/AAVMF/AAVMF_VARS.fd ] && return
    can_install || fail "needs qemu-efi-aarch64: sudo apt install qemu-efi-aarch64"
    apt_install qemu-efi-aarch64
}

# $1: the consequence where one cannot be installed. $*: pairs of a program and the package that brings it.
want_programs() {
    consequence=$1
    shift
    for pair in "$@"; do
        PATH=$PATH:/usr/sbin:/sbin command -v "${pair%%:*}" >/dev/null && continue
        if can_install && (apt_install "${pair#*:}"); then continue; fi
        echo "millpond: ${pair%%:*} is not installed, so $consequence: sudo apt install ${pair#*:}"
    done
}

need_compiler() {
    command -v cc >/dev/null && return
    can_install || fail "needs a C compiler: sudo apt install gcc libc6-dev"
    apt_install gcc libc6-dev
}

case ${1-} in
python) need_python "$2" ;;
venv) make_venv "$2" "$3" "${4-}" ;;
fuse) need_fuse_python "$2" ;;
sshd) need_sshd ;;
guest) need_guest_tools ;;
tests)
    want_programs "its tests are skipped" busybox:busybox sfdisk:fdisk rauc:rauc \
        mksquashfs:squashfs-tools veritysetup:cryptsetup-bin osslsigncode:osslsigncode chromium:chromium \
        chromedriver:chromium-driver tmux:tmux
    want_promtool
    ;;
image) need_image_tools ;;
qemu) need_qemu ;;
wheels)
    need_programs x86_64-linux-gnu-gcc:gcc-x86-64-linux-gnu aarch64-linux-gnu-gcc:gcc-aarch64-linux-gnu
    need_arm64_headers
    ;;
deb)
    need_programs dh:debhelper dpkg-buildpackage:dpkg-dev
    want_programs "the packages are not looked over" lintian:lintian
    ;;
chroot)
    is_root || fail "makes a system in a folder: run it as root"
    need_programs debootstrap:debootstrap
    need_debian_keys
    ;;
bench)
    need_compiler
    want_programs "it is not compared with" socat:socat sshfs:sshfs rsync:rsync
    ;;
group) if systemd_looks "$3" && is_root; then need_group "$2"; fi ;;
reload) if systemd_looks "$2" && systemd_runs && is_root; then systemctl daemon-reload; fi ;;
restart)
    for unit in millpond-host.service millpond-agent.service; do
        if systemd_looks "$2" && systemd_runs && is_root && systemctl --quiet is-active "$unit"; then
            echo "millpond: $unit runs: it is restarted, with what is installed now"
            systemctl restart "$unit"
        fi
    done
    ;;
stop)
    for unit in millpond-host.service millpond-agent.service; do
        if systemd_runs && is_root && [ "$(systemctl show -P FragmentPath "$unit")" = "$2/$unit" ]; then
            systemctl --quiet disable --now "$unit"
        fi
    done
    ;;
*) fail "prerequisites.sh: see the list at its beginning" ;;
esac
