SHELL := /bin/bash
.DEFAULT_GOAL := help
# Python ≥ 3.11 and make are all that is asked of the machine; dev/environment.py installs the rest
# into the user's cache folder. Evaluated only by the recipes that use it.
PYTHON ?= python3
PY = $(or $(shell $(PYTHON) dev/environment.py),$(error the environment could not be made; see above))
BIN = $(dir $(PY))
export PYTHONPATH := $(CURDIR)/operator/src:$(CURDIR)/connector/src:$(CURDIR)/e2e
# Without bytecode every engine start compiles thousands of modules again.
unexport PYTHONDONTWRITEBYTECODE
# This make's process: conftest.py lists at the end what all of its runs of pytest have skipped.
export PDCLUSTER_RUN := $(shell echo $$PPID)
# In a new checkout, each worker would compute hypothesis' tables of characters again: two seconds.
CACHE = $(or $(PDCLUSTER_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/pdcluster)
export HYPOTHESIS_STORAGE_DIRECTORY ?= $(CACHE)/hypothesis
REAL = nixl or engine or vllm or local or helm or cluster
PURE = not ($(REAL)) and not soak
# More workers than cores: a third of these tests wait for processes that they started.
WORKERS = 8
PURELY = $(PY) dev/forked_workers.py $(WORKERS) -m "$(PURE)"
# Tests whose number of drawn examples the profile `soak` of conftest.py multiplies.
DRAWN = operator/tests/plan/test_op_properties.py connector/tests/protocol connector/tests/plan/test_slices.py
# By file: a module's engines serve all of its tests. A tiny engine computes on one thread.
ENGINES = $(PY) -m pytest -n 2 --dist loadfile

help: ## show this
	@echo "pdcluster: make TARGET"
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-17s %s\n", $$1, $$2}'

env: ## install everything that is needed into the user's cache folder, print its Python
	@echo $(PY)

model: ## make the tiny random Llama that the example serves, print its folder
	@$(PY) -m models.tiny llama

demo: PROMPT ?= A prompt whose KV cache is computed by one engine and decoded by another: once upon a time there was a block of tokens, and
demo: ## one manifest to tokens on this machine: no Kubernetes, no GPU
	@model=$$($(PY) -m models.tiny llama) && \
	$(PY) -m pdcluster_operator up examples/tiny-cpu.yaml --model-dir "$$model" --once "$(PROMPT)"

check: ## format, lint, types, import layers, generated files, merge marks and the like
	$(BIN)ruff check .
	$(BIN)ruff format --check .
	$(BIN)mypy
	$(BIN)lint-imports
	$(PY) dev/generated.py --check
	$(PY) dev/file_hygiene.py

pure: ## the tests that need neither NIXL nor vLLM: they run on every Python that we promise
	$(PURELY)

engines: ## real NIXL, vLLM's scheduler, real engines
	$(ENGINES) -m "(nixl or engine or vllm) and not soak" --durations=10

test: check pure engines ## everything but the end-to-end tests: check, pure and engines

e2e: local-e2e cluster-e2e ## what a user does, end to end: on this machine, then on a real Kubernetes (as root)

# A pair of engines keeps two cores busy only while it loads.
local-e2e: ## without Kubernetes: tokens, layouts, kills, restarts
	$(PY) -m pytest e2e -n 2 --dist loadfile -m "local and not soak" --durations=10

# The tests without pods mostly wait: for the operator's periods, and for the end of a Lease.
cluster-e2e: $(if $(KUBECONFIG),,cluster-programs) ## on a real Kubernetes with real pods, and the chart with helm 3 and 4 (as root)
	$(PY) -m pytest operator charts -n 5 --dist worksteal -m "(cluster or helm) and not soak" --durations=10
	$(PY) -m pytest e2e/cluster e2e/chart e2e/tests -m "cluster and not soak" --durations=20

# A test without pods computes on one core, so two of them run side by side.
soak: $(if $(KUBECONFIG),,cluster-programs) ## what is slow and rare, in none of the others (as root)
	$(PY) -m pytest -n 2 --dist worksteal -m "soak and not ($(REAL))" --durations=10
	PDCLUSTER_EXAMPLES=soak $(PY) -m pytest -n 2 --dist worksteal -m "not soak" $(DRAWN)
	$(ENGINES) -m "soak and (nixl or engine or vllm)" --durations=10
	$(PY) -m pytest operator charts -n 5 --dist worksteal -m "soak and (cluster or helm)" --durations=10
	$(PY) -m pytest e2e -m "soak and (cluster or local)" --durations=10

fast: PURE += and not process
# No pure test needs the certificates of this machine: each HTTP client would read them for 20 ms.
fast: export SSL_CERT_FILE = /dev/null
fast: export PDCLUSTER_EXAMPLES ?= fast
fast: ## those of `make test` that start no launchers and no engines, with a quarter of the drawn examples
	$(PURELY) -q

repeat: RUNS ?= 20
repeat: COPIES ?= 4
repeat: ## the pure tests of `make test` RUNS times, COPIES at a time, to find tests that fail now and then; JITTER=1: stall them
	$(PY) dev/repeat.py --runs $(RUNS) --copies $(COPIES) $(if $(JITTER),--jitter $(JITTER)) -- -m "$(PURE)" $(TESTS)

cluster-programs: cluster-images ## build what a cluster needs with Go, and the images, once into the cache
	$(PY) -m cluster build

cluster-images: ## build the images that a cluster needs, once into the cache
	$(PY) -m images build

cluster-demo: ## from helm install to tokens on a real Kubernetes on this machine (as root)
	$(PY) -m cluster_demo

image: ## build the operator's image with docker, podman or buildah: REPOSITORY=… PUSH=1 (dev/image.py)
	@$(PYTHON) dev/image.py operator

router-image: ## build an image of the router's release, for spec.router.image: REPOSITORY=… PUSH=1
	@$(PYTHON) dev/image.py router

docs: ## build the site of docs/ into dist/site; REPOSITORY_URL=… links to the files that are on no page
	NO_MKDOCS_2_WARNING=1 $(BIN)mkdocs build --strict

release: ## make the wheel, the chart, the plugin, the SBOM and the notes below dist/, and publish nothing
	@$(PY) dev/release.py --uv "$$($(PYTHON) dev/environment.py --print-uv)" $(if $(TAG),--tag $(TAG)) $(if $(URL),--url $(URL))

# In a network of its own, because simulated launchers have port 5590 of very many addresses of
# 127/8. The API server asks for an address that is not loopback.
bench-operator: PDCLUSTERS ?= 100
bench-operator: BENCH_OPTIONS = $(if $(BAD_DAYS),--bad-days) $(if $(PEER),--peer) $(if $(TLS),--tls) \
	$(if $(OUTPUT),--output=$(OUTPUT)) $(if $(CHECKOUT),--checkout=$(CHECKOUT)) \
	$(if $(FLAME_GRAPH),--flame-graph=$(FLAME_GRAPH))
bench-operator: ## many PDClusters on one operator, with simulated pods (as root); docs/benchmarks.md has the options
	PYTHONPATH=$$PYTHONPATH:$(CURDIR)/operator/tests/adapters $(PY) -m bench_operator.plane $(if $(PEER),--peer)
	PYTHONPATH=$$PYTHONPATH:$(CURDIR)/operator/tests/adapters unshare --net sh -c \
		'ip link set lo up && ip address add 192.0.2.1/24 dev lo && \
		ip route add default via 192.0.2.1 dev lo && exec $(PY) -m bench_operator --pdclusters $(PDCLUSTERS) $(BENCH_OPTIONS)'

bench: export PYTHONPATH := $(PYTHONPATH):$(CURDIR)/connector/tests/transfer
bench: BENCH_OPTIONS = $(if $(PARTS),--parts=$(PARTS)) $(if $(ROUNDS),--rounds=$(ROUNDS)) \
	$(if $(OUTPUT),--output=$(OUTPUT)) $(if $(PICTURE),--picture=$(PICTURE)) \
	$(if $(CHECKOUT),--checkout=$(CHECKOUT)) $(if $(CALM),--calm)
bench: ## the connector beside vLLM's NixlConnector and raw NIXL, in one run; docs/benchmarks.md has the options
	@$(PY) -m bench_kv $(BENCH_OPTIONS)

# With torch, msgspec, aiohttp and nixl of this machine's own Python: they fit its GPU.
gpu: export PYTHONPATH := $(CURDIR)/connector/src:$(CURDIR)/e2e:$(CURDIR)/connector/tests/transfer
gpu: ## what a GPU shows about the KV path, one page to paste: OPTIONS=--help
	@$(PYTHON) -m gpu $(OPTIONS)

charts: ## render and lint the chart with helm 3 and helm 4 (built with Go at their first use)
	$(PY) -m pytest charts/tests

cluster-up: ## a real one-node Kubernetes on this machine (builds it with Go once: a quarter of an hour)
	@$(PY) -m cluster up

cluster-down: ## end it, leaving nothing behind
	@$(PY) -m cluster down

newest-vllm: ## see whether the newest vLLM on the package index is what we promise
	PDCLUSTER_ASK_INDEX=1 $(PY) -m pytest connector/tests/vllm/test_vllm_versions.py -k newest

format: ## rewrite files the way `make check` wants them
	$(BIN)ruff check --fix .
	$(BIN)ruff format .

generate: ## write the CRD, docs/{api,layouts,map,reasons,rules,troubleshooting}.md and pod_fields.txt again from the code
	$(PY) dev/generated.py

lock: ## resolve the pinned requirement files again
	dev/lock.sh

.PHONY: help env model demo check pure engines test e2e local-e2e cluster-e2e soak fast repeat \
	charts cluster-programs cluster-images bench bench-operator gpu image router-image cluster-demo cluster-up \
	docs release cluster-down newest-vllm format generate lock
