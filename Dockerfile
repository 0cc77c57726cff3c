# syntax=docker/dockerfile:1
# Triton with its Python backend, and this project in a virtual environment: `triton-diffusion serve MODEL`.
ARG TRITON_VERSION=26.11

FROM nvcr.io/nvidia/tritonserver:${TRITON_VERSION}-py3 AS triton

# The project as a wheel, and its dependencies as a list of their own: that list changes rarely, so the layer that is
# made of it, of several gigabytes, is kept from one build to the next.
FROM triton AS wheel
WORKDIR /source
COPY pyproject.toml README.md ./
COPY backend_src backend_src
COPY client client
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
    && python3 -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; extras = project["optional-dependencies"]; print("\n".join(sum((extras[name] for name in ("server", "tracing", "vision")), project["dependencies"])))' > /wheels/requirements.txt

FROM triton
ENV PATH=/opt/venv/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    # All that is written while the server runs, beside /tmp and /dev/shm, is a cache.
    HF_HOME=/cache/huggingface \
    TORCHINDUCTOR_CACHE_DIR=/cache/torchinductor \
    TRITON_CACHE_DIR=/cache/triton \
    XDG_CACHE_HOME=/cache

# The system's pip installs into the environment, which therefore needs none. The base image has no torch; PyPI's brings
# its CUDA libraries along.
RUN --mount=type=bind,from=wheel,source=/wheels/requirements.txt,target=/build/requirements.txt \
    --mount=type=bind,source=deploy/constraints.txt,target=/build/constraints.txt \
    python3 -m venv --without-pip /opt/venv \
    && python3 -m pip --python /opt/venv/bin/python install --no-cache-dir \
        --requirement /build/requirements.txt --constraint /build/constraints.txt \
    && install --directory --owner=1000 --group=1000 /cache

RUN --mount=type=bind,from=wheel,source=/wheels,target=/build/wheels \
    python3 -m pip --python /opt/venv/bin/python install --no-cache-dir --no-deps --no-index /build/wheels/*.whl

# triton-server of the base image; a number, so that Kubernetes can see that it is not root.
USER 1000:1000
WORKDIR /models
EXPOSE 8000 8001 8002

# SIGTERM makes the server refuse what is new and finish what runs, at most --exit-timeout seconds, and 10 more.
STOPSIGNAL SIGTERM

# One real picture of one step. Downloading and loading a checkpoint takes minutes: nothing counts in the first 30.
HEALTHCHECK --interval=30s --timeout=70s --start-period=30m --retries=3 \
    CMD ["triton-diffusion", "health", "--timeout", "60"]

# NVIDIA's script finds libraries for older drivers and then becomes the command that follows, so that signals arrive.
ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh", "triton-diffusion", "serve"]
CMD ["--help"]
