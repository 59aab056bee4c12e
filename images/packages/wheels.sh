#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# `make wheels`: the source distribution, and from it a wheel for each processor, in dist/.
#
# The engines need no Python headers and no newer C library than that of 2012, so Debian's compilers make wheels
# that all distributions take; auditwheel looks whether that is true, and names them.
set -eu
umask 022
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}"
python=$PWD/.venv/bin/python
PATH=$PWD/.venv/bin:$PATH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir -p dist
rm -f dist/*.whl dist/*.tar.gz
"$python" -m build --sdist --outdir dist . >"$work/log" 2>&1 || { cat "$work/log" >&2 && exit 1; }
for architecture in x86_64 aarch64; do
    CC=$architecture-linux-gnu-gcc _PYTHON_HOST_PLATFORM=linux-$architecture \
        "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps -w "$work/$architecture" dist/*.tar.gz
    auditwheel repair -w dist "$work/$architecture"/*.whl >"$work/log" 2>&1 ||
        { cat "$work/log" >&2 && exit 1; }
done
ls dist/*.whl dist/*.tar.gz
