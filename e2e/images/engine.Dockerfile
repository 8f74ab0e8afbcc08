# Engines and routers for the tests on a cluster of one's own: vLLM for CPU, NIXL and the router.
#
#   docker build --build-arg BASE=IMAGE --file e2e/images/engine.Dockerfile --tag engine requirements
#
# BASE is any image with Python 3.11, its venv module and headers, libnuma1 and g++ (torch compiles
# where an engine has several ranks). The result has 8 GB: vLLM for CPU runs on the package index's
# torch, which does not start without its CUDA libraries.
ARG BASE
FROM ${BASE}
COPY development.txt /opt/engine.txt
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python3 -m venv /opt/engine \
 && /opt/engine/bin/python -m pip install --quiet --no-cache-dir --no-deps --requirement /opt/engine.txt
ENV PATH=/opt/engine/bin:$PATH PYTHONUNBUFFERED=1
