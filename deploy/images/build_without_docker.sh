#!/usr/bin/env bash
# Builds an image of the Dockerfile and runs it, without a container engine and without a registry of images: a base made
# with debootstrap stands in for python:3.11-slim, buildah runs the Dockerfile in chroots, and the result serves in one.
#
#   sudo deploy/images/build_without_docker.sh [TARGET]      cpu (the default), or vllm-cpu; a log goes to standard output
#
# Needs root, Debian's packages debootstrap and buildah, 12 GB, and the package registries that pip and apt use.
#   PIP_VOLUMES="/etc/pip.conf:/etc/pip.conf:ro ..."         files that pip needs in the build (its configuration, wheels)
#   KEEP=/folder                                             keep the base and the images there, for another run
# What this is not: no registry's python image, no container network, no limits of
# memory or CPU, no seccomp, and no health check by an engine.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
cd "$here/../.."
target="${1:-cpu}"
suite=bookworm  # whose Python is 3.11, as in the image that the Dockerfile names
work="${KEEP:-$(mktemp -d)}"
mkdir -p "$work"
container=""
tidy() {
    [ -z "$container" ] || buildah "${store[@]}" rm "$container" >/dev/null
    [ -n "${KEEP:-}" ] || rm -rf "$work"
}
trap tidy EXIT
store=(--root "$work/storage" --runroot "$work/run" --storage-driver overlay)
base=localhost/python-stand-in:3.11
image="localhost/hallutracer:$target"
say() { printf '\n== %s\n' "$*"; }

for program in debootstrap buildah chroot curl; do
    command -v "$program" >/dev/null || { echo "$program is missing: apt-get install debootstrap buildah curl" >&2; exit 1; }
done
[ "$(id -u)" = 0 ] || { echo "run it as root: debootstrap and chroot need it" >&2; exit 1; }

if ! buildah "${store[@]}" inspect --type image "$base" >/dev/null 2>&1; then
    say "the base: Debian $suite by debootstrap, with a python and a pip in /usr/local as the official image has them"
    [ -x "$work/root/usr/bin/python3" ] || debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv "$suite" "$work/root" >"$work/debootstrap.log"
    chroot "$work/root" python3 -m venv /usr/local
    container="$(buildah "${store[@]}" from scratch)"
    buildah "${store[@]}" add --quiet "$container" "$work/root" /
    buildah "${store[@]}" config --env PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin --cmd python3 "$container"
    buildah "${store[@]}" commit --quiet --rm "$container" "$base"
    container=""
fi

say "the Dockerfile, target $target"
volumes=()
for volume in ${PIP_VOLUMES:-}; do volumes+=(--volume "$volume"); done
buildah "${store[@]}" build --isolation chroot --format docker --layers --pull-never "${volumes[@]}" \
    --build-arg "PYTHON_IMAGE=$base" --target "$target" --tag "$image" .

say "what was built"
buildah "${store[@]}" images
buildah "${store[@]}" inspect --type image --format '{{.OCIv1.Config}}' "$image"

say "run it: its user, its environment, its root read-only but for /tmp and its two folders, no network but loopback"
container="$(buildah "${store[@]}" from --pull-never "$image")"
root="$(buildah "${store[@]}" mount "$container")"
buildah "${store[@]}" inspect --type image "$image" >"$work/image.json"
unshare --mount --net --pid --fork --kill-child "$here/run_in_chroot.sh" "$root" "$work/image.json"
