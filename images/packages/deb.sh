#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# `make deb`: packages for this Debian release, from the wheel in dist/ and the packages that constraints.txt names.
#
# Debian 12 has typer 0.7, pydantic 1 and torch 1.13, and no safetensors; millpond needs newer ones, and was tested
# with those of constraints.txt. So millpond-common has them in an environment of its own, /usr/lib/millpond, which
# no other program sees, and takes only Python itself from Debian. It is for the one version of Python that it was
# built for. torch is a package of its own: what needs a GPU's build installs that there instead.
set -eu
umask 022
python=/usr/bin/python3
place=usr/lib/millpond
made=$PWD/dist/deb
root=$PWD
version=$(sed -n 's/^VERSION = "\(.*\)"$/\1/p' tunnel/millpond/base/version.py)
minor=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
next=$("$python" -c 'import sys; print("3.%d" % (sys.version_info[1] + 1))')
site=lib/python$minor/site-packages

# What pip installs for Debian's Python.
pip_install() {
    "$root/.venv/bin/python" -m pip --python "$python" install --quiet --disable-pip-version-check --no-compile \
        --no-warn-script-location --root-user-action=ignore -c "$root/constraints.txt" "$@"
}

make_common() {
    mkdir -p "common/$place/bin" "common/$place/$site"
    pip_install --target "common/$place/$site" "$(echo "$root"/dist/millpond-"$version"-*"$(uname -m)".whl)[agent]" packaging pillow
    rm -rf "common/$place/$site/bin" "common/$place/$site/share"
    printf 'home = /usr/bin\ninclude-system-site-packages = false\nversion = %s\n' "$minor" >"common/$place/pyvenv.cfg"
    ln -s /usr/bin/python3 "common/$place/bin/python"
    sed -n '/^\[project.scripts\]/,/^$/s/^"\?\([^" ]*\)"\? = "\(.*\):main"$/\1 \2/p' "$root/pyproject.toml" |
        while read -r program module; do
            printf '#!/%s/bin/python\nimport sys\n\nfrom %s import main\n\nsys.exit(main())\n' \
                "$place" "$module" >"common/$place/bin/$program"
            chmod 755 "common/$place/bin/$program"
        done
}

# torch and what it needs, but for what millpond-common has. A build for GPUs has gigabytes: it is left out.
make_torch() {
    if pip_install --dry-run --ignore-installed --no-deps --report - torch | grep -q '"nvidia\|"cuda'; then
        echo "millpond: millpond-torch is left out: pip takes a build for GPUs; name an index of builds for" \
            "processors in PIP_EXTRA_INDEX_URL"
        return
    fi
    mkdir -p "torch/$place/$site"
    pip_install --target "torch/$place/$site" torch
    rm -rf "torch/$place/$site/bin" "torch/$place/$site/share"
    (
        cd "torch/$place/$site/torch"
        rm testing/_internal/py312_intrinsics.py # Debian's compiler of modules ends at it
        rm -r test                               # programs that test its C++ code
        find bin -type f ! -name torch_shm_manager -delete
    )
    for path in "common/$place/$site"/*; do rm -rf "torch/$place/$site/$(basename "$path")"; done
}

rm -rf "$made"
mkdir -p "$made/millpond"
cd "$made/millpond"
cp -r "$root/images/packages/debian" debian
make_common
make_torch
"$root/.venv/bin/python" "$root/images/packages/manual.py" manual >/dev/null
find manual/man -name '*.[18]' ! -name millpond-agent.1 | sort >debian/millpond-host.manpages
for unit in host agent; do
    sed -e "s|@PREFIX@|/$place|g" -e "s|@CONFDIR@|/etc/millpond|g" "$root/$unit/millpond-$unit.service" \
        >"debian/millpond-$unit.service"
done
for script in postinst prerm; do
    sed 's/@PACKAGE@/millpond-torch/' "debian/millpond-common.$script" >"debian/millpond-torch.$script"
    sed -i 's/@PACKAGE@/millpond-common/' "debian/millpond-common.$script"
done
echo "python3 (>= $minor), python3 (<< $next)" >python-depends
date=$(date -R -d "@${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --format=%ct)}")
printf 'millpond (%s-1) unstable; urgency=medium\n\n  * Version %s.\n\n -- %s  %s\n' "$version" "$version" \
    "$(sed -n 's/^Maintainer: //p' debian/control)" "$date" >debian/changelog
[ -e torch ] || export DH_OPTIONS=-Nmillpond-torch
dpkg-buildpackage --build=binary --no-sign >"$made/log" 2>&1 || { tail -n 20 "$made/log" >&2 && exit 1; }
cd "$root"
rm -rf "$made/millpond" dist/millpond-*.deb
mv "$made"/*.deb dist/
if command -v lintian >/dev/null; then
    lintian --fail-on error --tag-display-limit 0 --display-level error dist/*.deb
fi
ls dist/*.deb
