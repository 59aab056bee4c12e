#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# `make release`: looks whether version and changelog agree, then lists, sums and describes what lies in dist/.
#
#   release.sh check     before anything is built
#   release.sh finish    checksums, the list of what the wheel needs (SBOM, CycloneDX), and how to tag
set -eu
version=$(sed -n 's/^VERSION = "\(.*\)"$/\1/p' tunnel/millpond/base/version.py)

fail() {
    echo "millpond: $*" >&2
    exit 1
}

check() {
    grep -q "^## \[\?$version\b" CHANGELOG.md || fail "CHANGELOG.md has no section $version"
    [ -z "$(git status --porcelain)" ] || fail "the working tree has changes that are not committed: git status"
    at=$(git rev-parse -q --verify "v$version^{commit}" || true)
    [ -z "$at" ] || [ "$at" = "$(git rev-parse HEAD)" ] || fail "v$version is another commit: raise VERSION in version.py"
}

finish() {
    environment=$(mktemp -d)
    trap 'rm -rf "$environment"' EXIT
    .venv/bin/python -m venv "$environment"
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt \
        dist/millpond-"$version"-*"$(uname -m)".whl
    "$environment/bin/python" -m pip --quiet uninstall --yes pip setuptools
    .venv/bin/cyclonedx-py environment --no-validate --pyproject pyproject.toml --output-reproducible \
        --output-file "dist/millpond-$version.cdx.json" "$environment/bin/python"
    (cd dist && sha256sum -- *.whl *.tar.gz *.deb *.cdx.json >SHA256SUMS)
    cat dist/SHA256SUMS
    echo "millpond: dist/ is ready; now: git tag -s -m 'millpond $version' v$version && git push --tags"
}

"$1"
