#!/usr/bin/env bash
# The walk's installation, as docs/install.md has it: a virtual environment, a CPU build of torch, the pins.  And, in an environment
# of its own, moto's S3 server, which stands in for a bucket.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -x ~/venv/bin/pip ] || python3 -m venv ~/venv
pip() { "$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir --constraint constraints.txt "${@:2}"; }

# On Linux PyPI's torch is the CUDA build, gigabytes more.
if [ -n "${TORCH_INDEX:-}" ] && ! ~/venv/bin/python -c 'import torch' 2>/dev/null; then
    pip ~/venv --no-deps --retries 0 --timeout 15 --index-url "$TORCH_INDEX" torch 2>/dev/null ||
        echo "$TORCH_INDEX did not give torch; taking it from pip's own index"
fi
pip ~/venv '.[s3,signing]'
[ -x ~/s3/bin/pip ] || python3 -m venv ~/s3
pip ~/s3 'moto[s3]' flask flask-cors
hallutracer --version
~/venv/bin/python -c 'import torch; print("torch", torch.__version__)'
~/venv/bin/python -m pip list --disable-pip-version-check 2>/dev/null | tail -n +3 | wc -l | sed 's/$/ packages/'
du -sh ~/venv | cut -f1 | sed 's/$/ in ~\/venv/'
