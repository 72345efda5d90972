# The image of deploy/kuberay.yaml. It has CUDA, like PyPI's torch on Linux; the driver is the host's:
#   docker build -t declutr .
# Without CUDA, a few GiB smaller; ADDRESS is the index of torch's CPU builds (see pytorch.org, "Start locally"):
#   docker build -t declutr:cpu --build-arg TORCH="torch --index-url ADDRESS" .
FROM python:3.11-slim-bookworm

# wget: KubeRay's health checks use it. A compiler and Python's headers: torch.compile and Triton build launchers.
RUN apt-get update \
    && apt-get install -y --no-install-recommends wget gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 declutr
USER declutr
WORKDIR /home/declutr/declutr
ENV PATH=/home/declutr/venv/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    RAY_USAGE_STATS_ENABLED=0

# The same as `make setup`. Dependencies come first, because they change less often than the code.
ARG TORCH=torch
COPY --chown=declutr constraints.txt requirements-run.lock ./
RUN python -m venv /home/declutr/venv \
    && python -m pip install --no-cache-dir --quiet --disable-pip-version-check -c constraints.txt $TORCH \
    && python -m pip install --no-cache-dir --quiet --disable-pip-version-check --require-hashes -r requirements-run.lock
COPY --chown=declutr pyproject.toml README.md LICENSE NOTICE ./
COPY --chown=declutr src src
COPY --chown=declutr configs configs
COPY --chown=declutr pipeline pipeline
COPY --chown=declutr trainer trainer
COPY --chown=declutr benchmarks benchmarks
RUN python -m pip install --no-cache-dir --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .

# The image opens no port and starts no service; KubeRay sets the command.
CMD ["declutr", "--help"]
