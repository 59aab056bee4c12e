#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# `make test-wheel`: chroot.sh runs this in a fresh system: the wheel in dist/ is installed into an empty environment
# of the system's Python, or of the one that is named; then a fleet of emulated devices is switched on and used.
set -eu
python=${1:-python3}
work=$(mktemp -d)
apt-get -q=2 update
apt-get -q=2 install --no-install-recommends "$python" "$python-venv" openssh-server >/dev/null 2>&1
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check /dist/millpond-*"$(uname -m)".whl
PATH=$work/venv/bin:$PATH
. /etc/os-release
echo "millpond test-wheel: $PRETTY_NAME, $("$python" -V): $(millpond --version)"
millpond emulate --fleet "$work/fleet" -- millpond run csd0 --fleet "$work/fleet" -- 'uname -n; ls'
