#!/usr/bin/env bash
# The second half of build_without_docker.sh, in namespaces of its own: an image's root, run as a container would run it.
#   run_in_chroot.sh ROOT IMAGE_JSON     what buildah inspect prints of it: environment and health check are the image's own
set -euo pipefail
root="$1"
of_image() { python3 -c "import json, sys; c = json.load(open(sys.argv[1]))['Docker']['config']; print('\n'.join($1))" "$image"; }
image="$2"
mapfile -t variables < <(of_image "c['Env']")
mapfile -t health < <(of_image "c['Healthcheck']['Test'][1:]")
port=8765

mount --make-rprivate /
mount --bind "$root" "$root"
for kept in /var/lib/hallutracer/probes /var/cache/huggingface; do mount --bind "$root$kept" "$root$kept"; done
mount -o remount,bind,ro "$root"
mount -t tmpfs -o size=256m,mode=1777 tmpfs "$root/tmp"
mount -t proc proc "$root/proc"
mount --bind /dev "$root/dev"
mount -t tmpfs -o size=64m,mode=1777 tmpfs "$root/dev/shm"
ip link set lo up

# A uid that is not root's has no capabilities; no_new_privs keeps it so.
own=(setpriv --no-new-privs chroot --userspec=10001:10001 "$root" env --ignore-environment "${variables[@]}")

echo "user: $("${own[@]}" id)"
echo "capabilities: $("${own[@]}" grep CapEff /proc/self/status | tr '\t' ' ')"
echo "pip in the image: $("${own[@]}" sh -c 'command -v pip || echo none')"
"${own[@]}" sh -c 'touch /opt/written' 2>/dev/null && { echo "the root is writable"; exit 1; }
echo "the root is read-only"
"${own[@]}" hallutracer --version
"${own[@]}" hallutracer bundle list
"${own[@]}" hallutracer score 'What is the capital of the Solomon Islands?'
"${own[@]}" HALLUTRACER_ALLOW_ANONYMOUS=true hallutracer doctor

echo "-- it refuses to listen beyond loopback without keys"
"${own[@]}" hallutracer serve && { echo "it served"; exit 1; }

echo "-- serve"
"${own[@]}" HALLUTRACER_ALLOW_ANONYMOUS=true HALLUTRACER_DRAIN_S=5 HALLUTRACER_DEADLINE_S=300 hallutracer serve >"$root/tmp/out" 2>"$root/tmp/err" &
server=$!
check() { "${own[@]}" "${health[@]}" 2>/dev/null; }
for _ in $(seq 240); do
    check && break
    kill -0 "$server" || { cat "$root/tmp/err"; exit 1; }
    sleep 1
done
check
echo "the image's health check: exit status 0"
curl --silent --show-error --fail "http://127.0.0.1:$port/score" --header 'content-type: application/json' --data \
    '{"prompt": ["What is the capital of Italy?", "What is the capital of the Solomon Islands?"], "generate": {"max_tokens": 12}}'
echo
curl --silent --fail "http://127.0.0.1:$port/metrics" | grep -E '^(hallutracer_ready|hallutracer_build_info|process_resident_memory_bytes)'
echo "-- SIGTERM"
kill -TERM "$server"
status=0
wait "$server" || status=$?
echo "exit status $status"
check && { echo "it still answers"; exit 1; }
exit "$status"
