# Ramify with what a run needs, on any base with apt. Without a GPU:
#   docker build -t ramify .
# With CUDA, of which the host brings the driver (docker run --gpus all):
#   docker build -t ramify --build-arg BASE=nvidia/cuda:13.0.2-base-ubuntu24.04 .
# The runtime `sandbox` needs user namespaces, which the default profiles of Docker forbid: docs/runtimes.md.
ARG BASE=python:3.12-slim

# hadolint ignore=DL3006
FROM ${BASE} AS base
# A base with a Python that can make environments, such as python:3.12-slim, gets no second one.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap \
    && { python3 -c 'import ensurepip' || apt-get install -y --no-install-recommends python3 python3-venv; } \
    && rm -rf /var/lib/apt/lists/*

FROM base AS build
# Settings of pip for the build, such as an index that has the CPU build of torch; the image does not contain them.
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
ARG EXTRAS=local,plot,vision
WORKDIR /src
COPY pyproject.toml requirements-dev.lock README.md LICENSE ./
COPY src src
RUN python3 -m venv /opt/ramify \
    && /opt/ramify/bin/pip install --no-cache-dir -c requirements-dev.lock ".[${EXTRAS}]"

FROM base
COPY --from=build /opt/ramify /opt/ramify
COPY examples /opt/ramify/examples
RUN install -d -m 0777 /work
ENV PATH=/opt/ramify/bin:$PATH HOME=/work
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["ramify"]
CMD ["--help"]
