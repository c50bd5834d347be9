#!/usr/bin/env bash
# The walk itself, as an operator would type it: a store on S3, signed versions, two replicas behind nginx, a refused reload
# and its alert, a canary, a promotion, a rollback, a dead replica and its alert, the audit log; and the same questions by the
# clients of Responses, Messages, tools and MCP.
#
#   deploy/walk/walk.sh [FOLDER]       in FOLDER, new or an earlier walk's (default: a new one); nothing outside it is written
#
# Needs on PATH: hallutracer (with the extras s3 and signing), nginx, prometheus, curl, openssl; moto_server, there or in
# ~/s3/bin; hallutracer-mcp, there or in ~/clients/bin, with openai and anthropic beside it.  Each step says what it does and what it saw; the first that saw something else ends the walk with status 1.
#   PORTS="8765 8766 8080 9090 9000"   two replicas, nginx, Prometheus, S3
set -euo pipefail
checkout="$(cd "$(dirname "$0")/../.." && pwd)"
export PATH="$PATH:$HOME/s3/bin:$HOME/clients/bin"
fail() { echo "FAILED: $*"; exit 1; }
work="${1:-$(mktemp -d)}"
mkdir -p "$work"
cd "$work"
work="$PWD"
[ -e .walk ] || [ -z "$(ls -A)" ] || fail "$work has something else in it than an earlier walk"
for program in hallutracer nginx prometheus curl openssl moto_server hallutracer-mcp; do
    command -v "$program" >/dev/null || fail "$program is missing (docs/install.md; apt-get install nginx prometheus; pip install 'moto[server]')"
done
find . -mindepth 1 -maxdepth 1 ! -name probes ! -name runs -exec rm -rf {} +
touch .walk
read -r one two front scraper s3 <<<"${PORTS:-8765 8766 8080 9090 9000}"
export HALLUTRACER_MODEL="$work/model" HALLUTRACER_THREADS=1 HALLUTRACER_STORE_CACHE="$work/copies"
export AWS_ACCESS_KEY_ID=walk AWS_SECRET_ACCESS_KEY=walk AWS_DEFAULT_REGION=us-east-1 AWS_ENDPOINT_URL="http://127.0.0.1:$s3"
store=s3://probes/walk
known="What is the capital of Italy?"
unknown="What is the capital of the Solomon Islands?"
declare -A running=()

say() { printf '\n== %s\n' "$*"; }
run() { printf '$ %s\n' "$*"; "$@"; }
# expect WHAT WANTED SAW
expect() { [ "$3" = "$2" ] || fail "$1: wanted $2, saw $3"; echo "ok: $1: $3"; }
# refused WORDS COMMAND...: it must end with status 1 and say WORDS
refused() {
    local words="$1" status=0
    shift
    printf '$ %s\n' "$*"
    "$@" >refused.txt 2>&1 || status=$?
    sed 's/^/    /' refused.txt
    [ "$status" = 1 ] || fail "exit status $status, not 1"
    grep -qF "$words" refused.txt || fail "it does not say: $words"
    echo "ok: refused"
}
# of EXPRESSION: a value out of the JSON on standard input, which the expression calls d
of() { python3 -c "import json, sys; d = json.load(sys.stdin); print($1)"; }
start() {
    local name="$1"
    shift
    "$@" >>"$name.log" 2>&1 &
    running[$name]=$!
}
# stop NAME SIGNAL: its exit status is then in $ended
stop() {
    ended=0
    kill "-$2" "${running[$1]}"
    wait "${running[$1]}" || ended=$?
    unset "running[$1]"
}
leave() {
    local status=$? name
    for name in "${!running[@]}"; do kill "${running[$name]}" 2>/dev/null || true; done
    wait
    [ "$status" = 0 ] || { echo "the processes' logs are in $work"; tail -n 5 ./*.log; }
}
trap leave EXIT
# until_true SECONDS COMMAND...
until_true() {
    local end=$((SECONDS + $1))
    shift
    until "$@" 2>/dev/null; do
        [ "$SECONDS" -lt "$end" ] || return 1
        sleep 0.5
    done
}
fetch() { curl --silent --show-error --fail-with-body --max-time 60 "$@"; }
quietly() { "$@" >/dev/null 2>&1; }
ask() { fetch -H "Authorization: Bearer $app" -H 'Content-Type: application/json' "http://127.0.0.1:$front/score" "$@"; }
metrics() { fetch -H "Authorization: Bearer $(cat prometheus.key)" "http://127.0.0.1:$1/metrics"; }
reload() {
    local port
    for port in "$one" "$two"; do
        fetch -X POST -H "Authorization: Bearer $deployer" "http://127.0.0.1:$port/v1/admin/reload" | of '"reloaded: " + ", ".join("%s is %s" % (b["id"], b["role"]) for b in d["data"])' || return 1
    done
}
# versions N [CURL OPTIONS]: N questions through nginx, each asked by itself, none naming a bundle; who judged how many
versions() {
    local number="$1"
    shift
    for ((n = 0; n < number; n++)); do
        ask -d "${bodies[n]}" "$@" | sed -n 's/.*"bundle":{"name":"\([^"]*\)","version":\([0-9]*\),.*/\1:\2/p'
        echo # the answer ends without a newline
    done | sort | uniq -c | awk '{printf "%s%s times %s", (NR > 1 ? ", " : ""), $1, $2}'
}
# prompts BUNDLE: what both replicas counted for it
prompts() {
    { metrics "$one"; metrics "$two"; } | awk -v bundle="bundle=\"$1\"" '/^hallutracer_prompts_total/ && index($0, bundle) {sum += $NF} END {print sum + 0}'
}
# firing ALERT: its instances that fire, from Prometheus' API
firing() { fetch "http://127.0.0.1:$scraper/api/v1/alerts" | of "sum(a['labels']['alertname'] == '$1' and a['state'] == 'firing' for a in d['data']['alerts'])"; }
fires() { [ "$(firing "$1")" != 0 ]; }
quiet() { [ "$(firing "$1")" = 0 ]; }
healthy() { [ "$(fetch "http://127.0.0.1:$scraper/api/v1/query?query=sum(up)" | of 'd["data"]["result"] and d["data"]["result"][0]["value"][1]')" = "$1" ]; }
fired() {
    until_true 120 fires "$1" || fail "$1 does not fire"
    echo "ok: $1 fires after $((SECONDS - since)) s:"
    fetch "http://127.0.0.1:$scraper/api/v1/alerts" | of "'\n'.join('    ' + a['annotations']['summary'] + ' [' + a['labels']['severity'] + ', ' + a['annotations']['runbook_url'] + ']' for a in d['data']['alerts'] if a['labels']['alertname'] == '$1')"
}
resolved() { until_true 120 quiet "$1" || fail "$1 still fires"; echo "ok: $1 is resolved, $((SECONDS - since)) s after the cure"; }

say "1. a bucket: moto's S3 server stands in for one"
start s3 moto_server -H 127.0.0.1 -p "$s3"
until_true 60 quietly curl --silent "$AWS_ENDPOINT_URL" || fail "no S3 server"
fetch -X PUT "$AWS_ENDPOINT_URL/probes" >/dev/null
echo "ok: $AWS_ENDPOINT_URL has the bucket probes"

say "2. a model whose chat template knows tools, and two versions of a bundle, trained here, on a few questions"
python="$(dirname "$(command -v hallutracer)")/python"
cp -r "$("$python" -c 'from service.demo import MODEL_DIR; print(MODEL_DIR)')" model
mv model/chat_template.jinja plain.jinja
# The demo model's own template, behind the tools; calls and results are turns of the same form.
{
    printf '%s' "{% if tools %}{{ '<|system|>' + (tools | tojson) }}{% endif %}"
    sed "s/{% if message\['role'\] == 'assistant' %}/{% if message['tool_calls'] %}{{ '<|assistant|> ' + (message['tool_calls'] | tojson) + '<\/s>' }}{% elif message['role'] == 'tool' %}{{ '<|user|>' + message['content'] }}{% elif message['role'] == 'assistant' %}/" plain.jinja
} >model/chat_template.jinja
echo "the demo model of $("$python" -c 'import service; print(service.__file__)')"
hallutracer demo questions --split train | awk 'NR % 18 == 0' >questions.jsonl
mapfile -t bodies < <(python3 -c 'import json; [print(json.dumps({"prompt": json.loads(line)["prompt"]})) for line in open("questions.jsonl")]')
echo "${#bodies[@]} questions"
train=(hallutracer train --data questions.jsonl --labels generate --max-new-tokens 12 --name my-probe --store ./probes --seeds 1 --no-evaluate)
if [ -e probes/my-probe/2/bundle.json ]; then
    echo "those of an earlier walk in this folder are used"
else
    run "${train[@]}" --c 0.03 2>>train.log
    run "${train[@]}" --c 0.1 2>>train.log
fi
run hallutracer bundle compare my-probe:1 my-probe:2 --store ./probes

say "3. a key pair; version 1 is signed and pushed, version 2 is pushed as it is"
run openssl ecparam -name prime256v1 -genkey -noout -out key.pem
run openssl pkey -in key.pem -pubout -out key.pub
run hallutracer bundle sign my-probe:1 --store ./probes --key-file key.pem
run hallutracer bundle push my-probe:1 "$store" --store ./probes
run hallutracer bundle push my-probe:2 "$store" --store ./probes
run hallutracer bundle alias my-probe production 1 --store "$store"
run hallutracer bundle alias my-probe canary 1 --store "$store"
run hallutracer bundle verify my-probe:1 --store "$store" --require-signature key.pub
refused "a signature is required here" hallutracer bundle verify my-probe:2 --files-only --store "$store" --require-signature key.pub

say "4. named keys, doctor, two replicas, nginx, Prometheus"
key() { hallutracer keys make "$@" 2>&1 >>keys.toml | tail -n 1; } # the secret; its digest goes into the file
app="$(key app)"
deployer="$(key deployer --scope admin)"
(umask 077; key prometheus --scope observe --expires never >prometheus.key)
run hallutracer keys list --keys keys.toml
export HALLUTRACER_POLICY=gate
HALLUTRACER_CANARY_KEY="$(python3 -c 'import secrets; print(secrets.token_urlsafe(32))')" # both replicas draw alike
export HALLUTRACER_CANARY_KEY
serve=(--store "$store" --require-signature key.pub --canary my-probe@canary --canary-share 0.3
    --shadow my-probe@canary --keys keys.toml --protect-metrics --audit-log audit.jsonl)
refused "a signature is required here" hallutracer doctor "${serve[@]}" --bundle my-probe:2 --port "$one"
serve=(--bundle my-probe "${serve[@]}")
run hallutracer doctor "${serve[@]}" --port "$one" || fail "doctor"
# ready NAME PORT: also where the process has ended, which is then seen
ready() { ! kill -0 "${running[$1]}" 2>/dev/null || quietly curl --silent --fail "http://127.0.0.1:$2/health/ready"; }
replica() {
    printf '$ hallutracer serve %s --port %s\n' "${serve[*]}" "$2"
    start "$1" hallutracer serve "${serve[@]}" --port "$2"
    until_true 240 ready "$1" "$2" || fail "$1 is not ready"
    kill -0 "${running[$1]}" 2>/dev/null || fail "$1 has ended: $(tail -n 1 "$1.log")"
    echo "ok: $1 is ready"
}
replica replica-1 "$one"
replica replica-2 "$two"

sed -e "s/127.0.0.1:8765 /127.0.0.1:$one /; s/127.0.0.1:8766 /127.0.0.1:$two /; s/127.0.0.1:8080;/127.0.0.1:$front;/" \
    -e "s#/tmp/hallutracer-nginx#$work/nginx#" "$checkout/deploy/nginx/nginx.conf" >nginx.conf
start nginx nginx -c "$work/nginx.conf" -g 'daemon off;'
until_true 60 quietly curl --silent "http://127.0.0.1:$front/health/ready" || fail "nginx"
cp -r "$checkout/deploy/prometheus" prometheus
sed -i -e 's/\(scrape_interval\|evaluation_interval\|scrape_timeout\): .*/\1: 2s/' -e "s/\"hallutracer:8765\"/\"127.0.0.1:$one\", \"127.0.0.1:$two\"/" \
    -e "s|# authorization:|authorization:|; s|#   credentials_file: .*|  credentials_file: $work/prometheus.key|" prometheus/prometheus.yml
sed -i -e 's/for: 1m$/for: 4s/' prometheus/rules/alerts.yml
echo "changed in the copy of Prometheus' files: addresses, the key, intervals of 2 s; alerts that wait for 1 min wait for 4 s"
(diff -r "$checkout/deploy/prometheus" prometheus || true) | grep '^>' | sort | uniq -c
start prometheus prometheus --config.file=prometheus/prometheus.yml --storage.tsdb.path=series --web.listen-address="127.0.0.1:$scraper"
until_true 60 healthy 2 || fail "Prometheus does not see two replicas"
echo "ok: Prometheus scrapes two replicas"

say "5. through nginx: an answer, one that is withheld, one without a key"
ask -d "{\"prompt\": [\"$known\", \"$unknown\"], \"generate\": {\"max_tokens\": 12}}" >asked.json
of '"\n".join("    risk %.2f  %-8s  %s" % (r["risk"], r["decision"], r.get("completion", r).get("text", r.get("message"))) for r in d["data"])' <asked.json
expect "a known and an obscure fact" "continue abstain" "$(of '" ".join(r["decision"] for r in d["data"])' <asked.json)"
expect "judged by" "my-probe:1" "$(of '"%s:%s" % (d["bundle"]["name"], d["bundle"]["version"])' <asked.json)"
status() { curl --silent --output /dev/null --write-out '%{http_code}' "$@"; }
expect "without a key" 401 "$(status -H 'Content-Type: application/json' -d '{"prompt": "x"}' "http://127.0.0.1:$front/score")"
expect "the route that reloads, through nginx" 404 "$(status -X POST -H "Authorization: Bearer $deployer" "http://127.0.0.1:$front/v1/admin/reload")"
expect "the same, with the app's key, on a replica" 403 "$(status -X POST -H "Authorization: Bearer $app" "http://127.0.0.1:$one/v1/admin/reload")"

say "6. the same two questions by the protocols' own clients, through nginx"
HALLUTRACER_API_KEY="$app" "$(dirname "$(command -v hallutracer-mcp)")/python" "$checkout/deploy/walk/clients.py" "http://127.0.0.1:$front" "$known" "$unknown"
fetch -H 'Accept: text/html' "http://127.0.0.1:$front/" | grep -F '<title>' || fail "the playground"

say "7. somebody moves production to the unsigned version: both replicas refuse it and go on, and an alert says so"
run hallutracer bundle alias my-probe production 2 --store "$store"
since=$SECONDS
for port in "$one" "$two"; do
    curl --silent -X POST -H "Authorization: Bearer $deployer" "http://127.0.0.1:$port/v1/admin/reload" | tee reload.json
    echo
    expect "refused by $port" True "$(of '"a signature is required here" in d["error"]["message"]' <reload.json)"
done
expect "who judges" "10 times my-probe:1" "$(versions 10)"
fired HalluTracerReloadFailed
echo "the cure, as its runbook has it: move the alias back, reload"
run hallutracer bundle alias my-probe production 1 --store "$store" --require-signature key.pub
since=$SECONDS
reload || fail "the reload"
resolved HalluTracerReloadFailed

say "8. a canary: version 2 is signed, judges 30 % of the requests, and is read beside the others"
run hallutracer bundle sign my-probe:2 --store "$store" --key-file key.pem
run hallutracer bundle alias my-probe canary 2 --store "$store" --require-signature key.pub
reload || fail "the reload"
before=$(prompts my-probe:2)
versions 200 | tee share.txt
echo
judged="$(grep -o '[0-9]* times my-probe:2' share.txt | cut -d' ' -f1)"
[ "$judged" -ge 30 ] && [ "$judged" -le 90 ] || fail "$judged of 200 by the canary, whose share is 30 %"
expect "of 200 by the canary, counted by both replicas' /metrics" "$judged" "$(($(prompts my-probe:2) - before))"
versions 20 -H 'x-session-id: one-conversation' | tee share.txt
echo
expect "versions in one session" 1 "$(grep -o times share.txt | wc -l)"

say "9. promotion asks a replica what the canary, as its shadow, would have decided"
export HALLUTRACER_SERVICE_KEY="$app" # not an option: those are in the list of processes
refused "is not promoted" hallutracer bundle promote my-probe@canary --store "$store" --require-signature key.pub --service "http://127.0.0.1:$one"
run hallutracer bundle promote my-probe@canary --store "$store" --require-signature key.pub --service "http://127.0.0.1:$one" \
    --least-prompts 50 --most-disagreement 0.5
reload || fail "the reload"
expect "who judges" "20 times my-probe:2" "$(versions 20)"

say "10. rollback"
run hallutracer bundle rollback my-probe --store "$store" --require-signature key.pub
run hallutracer bundle alias my-probe canary 1 --store "$store" --require-signature key.pub
reload || fail "the reload"
expect "who judges" "20 times my-probe:1" "$(versions 20)"

say "11. a replica is killed: nginx goes on with the other, an alert says so, and it is started again"
since=$SECONDS
stop replica-2 KILL
expect "who answers" "20 times my-probe:1" "$(versions 20)"
fired HalluTracerDown
replica replica-2 "$two"
since=$SECONDS
resolved HalluTracerDown
expect "both replicas' versions" "my-probe:1 my-probe:1" "$(for port in "$one" "$two"; do metrics "$port" | grep -c '^hallutracer_ready 1' >/dev/null; fetch -H "Authorization: Bearer $app" "http://127.0.0.1:$port/v1/bundles" | of 'next("%s:%s" % (b["name"], b["version"]) for b in d["data"] if b["default"])'; done | tr '\n' ' ' | sed 's/ $//')"

say "12. the end: SIGTERM, then the audit log of both replicas"
for name in replica-1 replica-2; do
    stop "$name" TERM
    expect "$name's exit status" 0 "$ended"
done
run hallutracer audit verify audit.jsonl
of '"\n".join(f"    {count:4}  {event}" for event, count in sorted(__import__("collections").Counter(line["event"] + (" " + line["outcome"] if "outcome" in line else "") for line in d).items()))' \
    < <(python3 -c 'import json, sys; print(json.dumps([json.loads(line) for line in open("audit.jsonl")]))')
grep -h '^{' audit.jsonl replica-1.log replica-2.log nginx.log >lines.jsonl # beside them a replica prints an example
grep -qF '"caller": "app"' lines.jsonl || fail "the replicas have no request log"
for secret in "$app" "$deployer" "$(cat prometheus.key)" "$known" "$unknown" "$(of 'd["prompt"]' <<<"${bodies[0]}")"; do
    ! grep -qF "$secret" lines.jsonl || fail "a secret or a prompt is in a log"
done
echo "ok: no prompt and no key in the audit log, the replicas' logs and nginx's"
say "done in $SECONDS s: every check passed"
