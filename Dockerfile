# The course in a container, as a user without rights. Untested: there was no docker engine; the RUN steps were run by hand.
#
#   docker build -t ddp-course .                              # torch's small build for CPUs
#   docker build -t ddp-course --build-arg TORCH=default .    # with CUDA; add --gpus all to the next line
#   docker run --rm -it --network host --ipc host ddp-course
#
# JupyterLab listens on loopback only, hence the host's network; ranks share memory, hence the host's /dev/shm.
ARG PYTHON=3.12

# What .devcontainer uses: there, the checkout is mounted, and the environment is made in it.
FROM python:${PYTHON}-slim AS base
RUN apt-get update && apt-get install -y --no-install-recommends git make && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home learner
USER learner

FROM base
ARG TORCH=cpu
WORKDIR /home/learner/course
COPY --chown=learner:learner . .
RUN make .venv/installed-course TORCH=${TORCH} UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1
ENV PATH=/home/learner/course/.venv/bin:$PATH
CMD ["ddp-course", "lab", "--no-browser"]
