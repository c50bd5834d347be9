#!/usr/bin/env bash
# A stranger's walk on a clean Debian: a root made with debootstrap, HalluTracer's wheels built and installed in it by
# an ordinary user, then walk.sh beside this file, run by that user without capabilities and with no network but loopback.
#
#   sudo deploy/walk/in_clean_root.sh                    removes the root when it is done
#   sudo deploy/walk/in_clean_root.sh --keep FOLDER      keeps it there; run again, it goes on with what FOLDER has
#
# Needs root, Debian's package debootstrap, 4 GB, and the package registries that pip and apt use.  The log goes to standard
# output, and to FOLDER/walk.log.
#   SUITE=bookworm                                           another release of Debian
#   TORCH_INDEX=                                             take torch from pip's own index
#   PIP_VOLUMES="/etc/pip.conf:/etc/pip.conf ..."            files that pip needs (its configuration, wheels), FROM:TO; PIP_* variables are passed on
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
user=stranger
home="/home/$user"
say() { printf '\n== %s\n' "$*"; }
fail() { echo "error: $*" >&2; exit 1; }
usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }

# as_user ROOT COMMAND...: in the root, as its ordinary user, with nothing of this machine's environment but pip's variables
as_user() {
    local root="$1" variables=(HOME="$home" LANG=C.UTF-8 PATH="$home/venv/bin:/usr/local/bin:/usr/bin:/usr/sbin:/bin") name
    shift
    for name in $(compgen -e PIP_ || true); do variables+=("$name=${!name}"); done
    setpriv --no-new-privs chroot --userspec="$user:$user" "$root" env --ignore-environment "${variables[@]}" "$@"
}

# The second half, in namespaces of its own: mounts and processes end with it.
inside() {
    local root="$1" step="$2" volume target
    mount --make-rprivate /
    mount -t proc proc "$root/proc"
    mount --bind /dev "$root/dev"
    mount -t tmpfs -o size=64m,mode=1777 tmpfs "$root/dev/shm"
    if [ "$step" = install ]; then
        for volume in ${PIP_VOLUMES:-}; do
            target="$root$(cut -d: -f2 <<<"$volume")"
            if [ -d "${volume%%:*}" ]; then mkdir -p "$target"; else mkdir -p "$(dirname "$target")"; touch "$target"; fi
            mount --bind "${volume%%:*}" "$target"
        done
        as_user "$root" TORCH_INDEX="${TORCH_INDEX-https://download.pytorch.org/whl/cpu}" bash "$home/hallutracer/deploy/walk/install.sh"
    else
        ip link set lo up
        echo "user: $(as_user "$root" id)"
        echo "capabilities: $(as_user "$root" grep CapEff /proc/self/status | tr '\t' ' ')"
        as_user "$root" bash "$home/hallutracer/deploy/walk/walk.sh" "$home/walk"
    fi
}
if [ "${1:-}" = --inside ]; then
    inside "$2" "$3"
    exit
fi

keep=""
case "${1:-}" in
    --keep) keep="${2:-}" ;;
    "") ;;
    *) usage ;;
esac
[ $# = 0 ] || { [ -n "$keep" ] && [ $# = 2 ]; } || usage
for program in debootstrap chroot unshare setpriv git; do
    command -v "$program" >/dev/null || fail "$program is missing: apt-get install debootstrap util-linux git"
done
[ "$(id -u)" = 0 ] || fail "run it as root: debootstrap, chroot and mount need it"

work="${keep:-$(mktemp -d)}"
mkdir -p "$work"
work="$(cd "$work" && pwd)"
root="$work/root"
# All mounts ended with the namespaces; --one-file-system should one ever not have.
tidy() { [ -n "$keep" ] || rm -rf --one-file-system "$work"; }
trap tidy EXIT
exec > >(tee "$work/walk.log") 2>&1

say "a clean root: Debian ${SUITE:-bookworm} with Python, and what else a stranger gets by apt: curl, openssl, nginx, prometheus"
if [ ! -e "$root/.complete" ]; then
    rm -rf --one-file-system "$root"
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv,curl,openssl,nginx-light,prometheus,procps \
        "${SUITE:-bookworm}" "$root" >"$work/debootstrap.log" || fail "see $work/debootstrap.log"
    chroot "$root" useradd --create-home "$user"
    touch "$root/.complete"
else
    echo "the root of an earlier run is used"
fi
echo "Debian $(cat "$root/etc/debian_version"), $(chroot "$root" dpkg-query -f '.\n' -W | wc -l) packages"

say "the checkout, in the home of $user"
rm -rf "$root$home/hallutracer"
mkdir "$root$home/hallutracer"
(cd "$here/../.." && git ls-files -z --cached --others --exclude-standard | tar --create --null --files-from=- | tar --extract --no-same-owner --directory "$root$home/hallutracer")
chroot "$root" chown --recursive "$user:$user" "$home/hallutracer"

say "install, as an ordinary user: docs/install.md"
unshare --mount --pid --fork --kill-child "$here/in_clean_root.sh" --inside "$root" install

# What is not in a wheel is not there any more, but for the files of nginx and Prometheus that an operator copies.
find "$root$home/hallutracer" -mindepth 1 -maxdepth 1 ! -name deploy -exec rm -rf {} +

say "the walk, as that user, without a network but loopback"
unshare --mount --pid --net --fork --kill-child "$here/in_clean_root.sh" --inside "$root" walk
[ -n "$keep" ] && echo "kept: $work" || echo "the root is removed"
