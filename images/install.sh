#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# `make install`: millpond into a virtual environment, with its commands and systemd units. An update is the same.
#
#   install.sh COMMAND... UNIT...   with PREFIX, BINDIR, SBINDIR, UNITDIR, CONFDIR, SHAREDIR, EXTRAS, PYTHON,
#                                   ASKED_FOR and PIP_INSTALL
set -eu
umask 022 # what is installed is for all users, whatever root's own files are

fail() {
    echo "millpond: $*" >&2
    exit 1
}

for name in PREFIX BINDIR SBINDIR UNITDIR CONFDIR SHAREDIR; do
    eval "path=\$$name"
    case $path in
    *[!A-Za-z0-9/._+:=,@~-]*) fail "$name=$path: no unit can start from there: letters, digits and / . _ + : = , @ ~ - alone" ;;
    /*) ;;
    *) fail "$name=$path: name the whole path, from / on" ;;
    esac
done
place_of() { # the link of a command
    case $1 in mount.*) echo "$SBINDIR/$1" ;; *) echo "$BINDIR/$1" ;; esac
}
[ ! -e "$PREFIX" ] || [ -e "$PREFIX/.millpond-installed" ] ||
    fail "$PREFIX exists and is not millpond's: choose another PREFIX"
for command in "$@"; do
    case $command in *.service) continue ;; esac
    link=$(place_of "$command")
    [ ! -e "$link" ] || [ "$(readlink "$link")" = "$PREFIX/bin/$command" ] ||
        fail "$link exists and is not millpond's: choose another BINDIR or SBINDIR"
done

mkdir -p "$PREFIX"
touch "$PREFIX/.millpond-installed"
images/prerequisites.sh venv "$PYTHON" "$PREFIX" "$ASKED_FOR"
touch "$PREFIX/.millpond-installed"
case ,$EXTRAS, in *,agent,*) images/prerequisites.sh fuse "$PREFIX/bin/python" ;; esac
echo "millpond: installing into $PREFIX"
# Of a folder pip makes the package anew, also where the same version is installed.
# shellcheck disable=SC2086  # words
"$PREFIX/bin/python" -I $PIP_INSTALL ".${EXTRAS:+[$EXTRAS]}"
chmod -R go+rX "$PREFIX" # also of an installation that was made with another umask

mkdir -p "$BINDIR" "$SBINDIR" "$UNITDIR" "$CONFDIR"
for one in "$@"; do
    case $one in
    *.service)
        unit=$UNITDIR/$(basename "$one")
        sed -e "s|@PREFIX@|$PREFIX|g" -e "s|@CONFDIR@|$CONFDIR|g" "$one" >"$unit"
        chmod 644 "$unit"
        ;;
    *) ln -sfn "$PREFIX/bin/$one" "$(place_of "$one")" ;;
    esac
done
if "$PREFIX/bin/python" -I -c 'import typer' 2>/dev/null; then # pip may have been told to install no other package
    "$PREFIX/bin/python" -I images/packages/manual.py "$SHAREDIR" >"$PREFIX/.manual"
fi
images/prerequisites.sh group millpond "$UNITDIR"
images/prerequisites.sh reload "$UNITDIR"
images/prerequisites.sh restart "$UNITDIR"
cat <<END
millpond is installed. On the host:    millpond init, then systemctl enable --now millpond-host
                                       users of the group millpond may train: usermod -aG millpond USER
                       On a device:    copy FLEET/devices/NAME/etc from the host to $CONFDIR,
                                       mount its flash at /flash,
                                       then systemctl enable --now millpond-agent
END
