# One image that serves and trains, on NVIDIA GPUs and on CPUs. The CUDA libraries come with PyTorch; the host brings the driver.

FROM python:3.11-slim-bookworm AS base
# Python comes without its byte code here, and whoever runs the image may not write it: every start would compile anew.
RUN python -m compileall -q -x 'site-packages|/tests?/|lib2to3' "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
ENV PATH=/opt/venv/bin:$PATH

FROM base AS builder
# For a package index of your own, or for PyTorch built for another CUDA version.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /build
COPY pyproject.toml .
# All that the project needs, and the record of its own version; its code comes later, so that a change of it installs nothing anew.
# Then 180 MB of archives for linkers go, of which there is none here.
RUN --mount=type=cache,target=/root/.cache/pip \
    mkdir models service && touch README.md && \
    python -m venv --without-pip /opt/venv && pip --python /opt/venv/bin/python install . && \
    find /opt/venv -name '*.a' -delete
WORKDIR /app
COPY examples examples
COPY models models
RUN python -m models pull efficientnet_lite0 --out default/efficientnet_lite0.safetensors
COPY service service
COPY deploy/healthcheck.py deploy/
# The default model in OpenVINO's form, in a cache that any user may add to where it is writable.
# Everything is readable to all, however the umask left it where it comes from.
RUN python -c 'from pathlib import Path; from service.conversion import ensure; \
               ensure(Path("default/efficientnet_lite0.safetensors"), Path("cache"))' && \
    python -m compileall -q models service && chmod -R a+rX . && chmod 1777 cache

FROM base
# HOME: any user id may run this, without a home of its own. PyTorch's compiler looks for its folder on import, and where nothing can be
# written, /tmp included, it must be there already.
ENV HOME=/tmp \
    TORCHINDUCTOR_CACHE_DIR=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    SPYGLASS_CACHE_DIR=/app/cache \
    SPYGLASS_CHECKPOINT=/app/default/efficientnet_lite0.safetensors
WORKDIR /app
COPY --from=builder /opt/venv /opt/venv
COPY --from=builder /app .
# A number: Kubernetes can't tell from a name that it is not root.
USER 10001:10001
EXPOSE 8000
# The start period is the server's own limit for its start; until then failures don't count, and success ends it at once.
HEALTHCHECK --start-period=600s --start-interval=1s --interval=10s --timeout=5s CMD ["python", "-S", "/app/deploy/healthcheck.py"]
ENTRYPOINT ["python", "-m", "service"]
