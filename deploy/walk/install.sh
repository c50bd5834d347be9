#!/usr/bin/env bash
# The walk's installation: wheels built from this checkout, and nothing but these installed, as from an index: a virtual environment
# with a CPU build of torch and the pins.  In environments of their own: the client with the packages openai and anthropic, and
# moto's S3 server, which stands in for a bucket.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -x ~/venv/bin/pip ] || python3 -m venv ~/venv
pip() { "$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir --constraint constraints.txt "${@:2}"; }

[ -x ~/build/bin/pip ] || python3 -m venv ~/build
pip ~/build build setuptools
rm -rf ~/wheels
for project in . clients/python research; do ~/build/bin/python -m build --no-isolation --wheel --outdir ~/wheels "$project" >~/build/log 2>&1; done
(cd ~/wheels && ls -sh ./*.whl)

# On Linux PyPI's torch is the CUDA build, gigabytes more.
if [ -n "${TORCH_INDEX:-}" ] && ! ~/venv/bin/python -c 'import torch' 2>/dev/null; then
    pip ~/venv --no-deps --retries 0 --timeout 15 --index-url "$TORCH_INDEX" torch 2>/dev/null ||
        echo "$TORCH_INDEX did not give torch; taking it from pip's own index"
fi
pip ~/venv "$(echo ~/wheels/hallutracer-*.whl)[s3,signing]"
[ -x ~/clients/bin/pip ] || python3 -m venv ~/clients
pip ~/clients "$(echo ~/wheels/hallutracer_client-*.whl)[mcp]" openai anthropic
[ -x ~/s3/bin/pip ] || python3 -m venv ~/s3
pip ~/s3 'moto[s3]' flask flask-cors
hallutracer --version
~/venv/bin/python -c 'import torch; print("torch", torch.__version__)'
~/venv/bin/python -m pip list --disable-pip-version-check 2>/dev/null | tail -n +3 | wc -l | sed 's/$/ packages/'
du -sh ~/venv | cut -f1 | sed 's/$/ in ~\/venv/'
