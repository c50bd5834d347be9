#!/usr/bin/env bash
# prometheus and promtool for tests/deploy, into .tools/bin of this checkout; nothing where both are on PATH already.
# Needs no root: Debian's or Ubuntu's own package is downloaded and unpacked, not installed.
set -euo pipefail
tools="$(cd "$(dirname "$0")/.." && pwd)/.tools"

fail() {
    printf 'deploy/tools.sh: %s\n' "$1" >&2
    echo "Install Prometheus another way, so that prometheus and promtool are on PATH or in $tools/bin:" >&2
    echo "  macOS: brew install prometheus      elsewhere: https://prometheus.io/download/" >&2
    exit 1
}

if command -v prometheus >/dev/null && command -v promtool >/dev/null; then
    echo "prometheus and promtool are on PATH"
    exit 0
fi
if [ -x "$tools/bin/prometheus" ] && "$tools/bin/promtool" --version >/dev/null 2>&1; then
    echo "prometheus and promtool are in $tools/bin"
    exit 0
fi
for command in apt-get dpkg-deb; do
    command -v "$command" >/dev/null || fail "there is no $command here, so no Debian package to take the binaries from"
done

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
# Lists and cache of our own, where the system's are empty (container images): updating those would need root.
own=(-o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache" -o "APT::Sandbox::User=$(id -un)")
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
cd "$work"
if ! apt-get -qq -o "APT::Sandbox::User=$(id -un)" download prometheus >"$work/log" 2>&1; then
    { apt-get -qq "${own[@]}" update && apt-get -qq "${own[@]}" download prometheus; } >"$work/log" 2>&1 ||
        { cat "$work/log" >&2; fail "apt-get could not download the package prometheus"; }
fi
dpkg-deb -x ./prometheus_*.deb "$work/unpacked"
"$work/unpacked/usr/bin/promtool" --version >/dev/null 2>&1 || fail "the package's promtool does not run on this machine"
mkdir -p "$tools/bin"
echo '*' >"$tools/.gitignore"
for name in prometheus promtool; do
    cp "$work/unpacked/usr/bin/$name" "$tools/bin/$name.new"
    mv "$tools/bin/$name.new" "$tools/bin/$name"
done
echo "prometheus and promtool are in $tools/bin"
