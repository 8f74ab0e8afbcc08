#!/bin/sh
# Resolve the pinned requirement files. Plain pins, without index addresses.
set -eu
cd "$(dirname "$0")/.."
uv=$(python3 dev/environment.py --print-uv)
options="--python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-header --no-annotate --quiet"
# shellcheck disable=SC2086
"$uv" pip compile pyproject.toml --all-extras --overrides requirements/overrides.txt $options -o requirements/development.txt "$@"
# shellcheck disable=SC2086
"$uv" pip compile pyproject.toml --extra operator $options -o requirements/operator.txt "$@"
