# An image of vllm-router at the release that our tests run, for spec.router.image; `make router-image`
# builds it. By hand:
#
#   docker build --build-arg BASE=python:3.11-slim-bookworm --file operator/router.Dockerfile --tag vllm-router .
#
# BASE is any image with Python 3.11 or newer and its venv module. Packages come from pip's default
# index; a site with its own passes pip's settings as a secret, which no layer keeps:
# --secret id=pip,src=pip.conf
ARG BASE

FROM ${BASE} AS build
RUN python3 -m venv /opt/router
COPY requirements/development.txt /source/pinned.txt
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/router/bin/python -m pip install --quiet --no-cache-dir --only-binary :all: \
      --constraint /source/pinned.txt vllm-router \
 && /opt/router/bin/python -m pip uninstall --quiet --yes setuptools pip

FROM ${BASE}
COPY --from=build /opt/router /opt/router
ENV PATH=/opt/router/bin:$PATH PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT ["vllm-router"]
