# The trainer and one engine, for NVIDIA GPUs; runs as a user without rights. See docs/gpu.md.
#
#   docker build --build-arg ENGINE=vllm --tag torchtitan-grpo .
#   docker run --gpus all --shm-size 16g --volume /data/models:/models:ro --volume /data/runs:/runs \
#       --env CONFIG_FILE=train_configs/qwen3_0.6b_gsm8k_vllm.toml --env EXTRAS=data torchtitan-grpo \
#       --model.hf_assets_path /models/Qwen3-0.6B --job.dump_folder /runs
#
# /dev/shm (--shm-size): NCCL between ranks of one machine, and of an engine on several GPUs one version of the weights.
#   ENGINE          vllm, sglang or none
#   BASE, DEVEL     the base image, and for sglang, which compiles kernels when it starts, one with nvcc; with its digest
#                   (IMAGE@sha256:…) every build has the same one. torch and the engines bring their own CUDA libraries,
#                   the host its driver: 580 or newer
#   TORCH_BACKEND   torch's build
ARG ENGINE=vllm
ARG BASE=nvidia/cuda:13.0.1-base-ubuntu24.04
ARG DEVEL=nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM ${BASE} AS vllm
FROM ${BASE} AS none
FROM ${DEVEL} AS sglang
FROM ${ENGINE}

ARG TORCH_BACKEND=cu130
ARG ENGINE
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# Compilers: torch.compile and Triton build their launchers with them, SGLang its kernels.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ gcc git libc6-dev libnuma1 python3-dev python3-venv tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home trainer

WORKDIR /opt/torchtitan
# Python compiles everything while the image is built: the user of the container may not write there.
ENV PYTHONDONTWRITEBYTECODE=1 TORCHTITAN_ENGINES=/opt/engines
COPY pyproject.toml README.md LICENSE ./
COPY torchtitan ./torchtitan
COPY train_configs ./train_configs
COPY scripts ./scripts
COPY benchmarks ./benchmarks
COPY examples ./examples
COPY tests ./tests
COPY run_grpo.sh ./
RUN LOCKED=1 TORCH_BACKEND="$TORCH_BACKEND" scripts/setup_env.sh data,test \
    && if [ "$ENGINE" != none ]; then scripts/install_engine.sh "$ENGINE"; fi \
    && mkdir outputs /runs \
    && chown trainer outputs /runs

USER 10001
VOLUME ["/runs"]
ENTRYPOINT ["tini", "--", "./run_grpo.sh"]
