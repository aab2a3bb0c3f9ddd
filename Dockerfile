# primerl-node in a container: `--target cpu` (the default) or `--target cuda`. docs/operating.md, "In a container".
#
#   docker build -t primerl-node .
#   docker build -t primerl-node:cuda --target cuda .
#
# BASE is any Debian 12 or 13. TORCH_INDEX is where the CPU build of torch comes from; the CUDA build comes from PyPI.
ARG BASE=docker.io/library/debian:bookworm-slim

FROM ${BASE} AS runtime
# bubblewrap: the sandbox of environments, where the container may make user namespaces
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap ca-certificates python3 tini \
    && rm -rf /var/lib/apt/lists/*
# Any uid may run it: all that a node writes is below /data, the home of whoever that is.
RUN mkdir /data && chmod 1777 /data
ENV HOME=/data \
    LOGNAME=primerl \
    PATH=/opt/primerl/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    USER=primerl \
    XDG_RUNTIME_DIR=/tmp

FROM runtime AS build
# hadolint ignore=DL3008,DL3009
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv && python3 -m venv /opt/primerl
WORKDIR /src
COPY constraints.txt requirements.lock ./

FROM build AS packages
# All but torch, by hash. The two packages of pure Python that have no wheel are built here.
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --disable-pip-version-check --no-compile --no-deps --require-hashes -r requirements.lock

FROM packages AS build-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --disable-pip-version-check --no-compile --extra-index-url "$TORCH_INDEX" -c constraints.txt torch
COPY . .
RUN pip install --disable-pip-version-check --no-cache-dir --no-compile --no-deps .

FROM packages AS build-cuda
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --disable-pip-version-check --no-compile -c constraints.txt torch
COPY . .
ARG EXTRAS=vllm
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --disable-pip-version-check --no-compile -c constraints.txt ".[$EXTRAS]"

FROM runtime AS cuda
# Triton compiles the launchers of its kernels where they run.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev libpython3-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build-cuda /opt/primerl /opt/primerl
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /data
VOLUME /data
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=10s --start-period=5m CMD ["primerl-node", "status", "--json"]
ENTRYPOINT ["tini", "--", "primerl-node"]
CMD ["--help"]

FROM runtime AS cpu
COPY --from=build-cpu /opt/primerl /opt/primerl
USER 10001:10001
WORKDIR /data
VOLUME /data
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=10s --start-period=5m CMD ["primerl-node", "status", "--json"]
ENTRYPOINT ["tini", "--", "primerl-node"]
CMD ["--help"]
