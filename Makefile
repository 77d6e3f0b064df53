# Targets:
#   make demo     set everything up, then train six jobs of three tenants and show it live
#   make tinker   a recipe of tinker-cookbook, unmodified, against a service that it starts (ARGS=--loop: a loop of one's own)
#   make tinker-cookbook   more recipes: three modes of `math_rl`, `sl_basic`, `guess_number`
#   make tinker-sdks   a tour of the Tinker protocol with each version of the SDK that is promised
#   make test     set everything up, then run every test, the fast ones first (ARGS="-k bus" chooses); its parts, by themselves:
#   make test-fast, make test-exact, make test-slow, make test-vllm    those of deterministic mode are the exact ones
#   make test-gpu   what must hold on CUDA as on a CPU, on a machine with a CUDA device; no part of `make test`
#   make up       run the service on 127.0.0.1:8000 until Ctrl-C (ARGS="--rollout 2 --port 9000")
#   make vllm     install vLLM too, for CUDA where there is a driver, else for the CPU: then MARLAAS_ENGINE=vllm works
#   make check    format, lint, types, architecture
#   make hook     run `make check` before each commit from now on (.git/hooks/pre-commit)
#   make chaos    a thousand faults on real processes, and nothing lost or doubled (ARGS=--quick: a minute; ARGS="--seed 7": those of a seed)
#   make bench    the benchmarks (PATTERN=bus runs those whose name contains it, ARGS=--quick: short runs)
#   make bench-peers    the same jobs on MARLaaS, TRL and SkyRL, installed in .peers (ARGS=--quick: the short run)
#   make bench-isolation    is sharing harmless? each of eight jobs alone and among 32; a report in .isolation (ARGS=--quick: the short run)
#   make bench-paper    N jobs under each scheduling policy, as in the MARLaaS paper (ARGS=--quick: the short run)
#   make cluster  the service on this machine's Docker engine (SCALE="--scale rollout=3 --scale env=4 --scale trainer=2")
#   make cluster-test   jobs against that cluster, while it is scaled and a worker is killed
#   make cluster-down   stop it (ARGS=-v: and forget what Redis and the store hold)
#   make model    make the base model `tiny` again
#   make clean    remove the virtual environment, caches and what demo and up keep
#
# PYTHON=python3.12 chooses the interpreter. PIP_ARGS and TORCH_ARGS are passed to pip, e.g. an --index-url of CPU builds. Without PIP_ARGS, and
# without an index in pip's settings, all but torch is installed by uv.

.DEFAULT_GOAL := help
.PHONY: help demo tinker tinker-cookbook tinker-sdks test test-fast test-exact test-slow test-vllm test-gpu up vllm check hook chaos bench bench-peers bench-isolation bench-paper model clean cluster cluster-test cluster-down docker
SHELL := /bin/bash

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
TORCH := torch==2.13.0
COOKBOOK := tinker-cookbook==0.6.1
SDKS := 0.38.0,0.30.4,0.25.0,0.24.1
BIN := .venv/bin
INSTALL = $(BIN)/python -m deploy.install $(PIP_ARGS) --
COMPOSE ?= $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)
# The store's image: one that this machine has, for machines that cannot pull it, else the version that docker-compose.yml names.
cluster cluster-test cluster-down: export STORE_IMAGE ?= $(shell docker images --format '{{.Repository}}:{{.Tag}}' versity/versitygw 2>/dev/null | head -n1)
CLUSTER = $(COMPOSE) --env-file .env.cluster
RUN := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYDANTIC_DISABLE_PLUGINS=__all__ TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(BIN)/python

help:
	@sed -n 's/^#   //p' Makefile

demo: .venv/.ready
	@$(RUN) -m examples.demo

tinker: .venv/.ready .tinker/.ready
	@$(RUN) -m examples.tinker_demo $(ARGS)

tinker-cookbook: .venv/.ready-dev .tinker/.ready
	@$(RUN) -m pytest -v tests/system/cookbook_recipes.py $(ARGS)

tinker-sdks: .venv/.ready-dev
	@MARLAAS_TEST_SDKS=$(SDKS) $(RUN) -m pytest -v -m slow -k tour tests/system/test_tinker.py $(ARGS)

up: .venv/.ready
	@$(BIN)/marlaas up $(ARGS)

test:
	@for kind in fast exact slow vllm; do $(MAKE) --no-print-directory test-$$kind || exit 1; done

test-fast: .venv/.ready-dev
	@$(RUN) -m pytest -m "not slow and not vllm and not gpu" -n 4 $(ARGS)

test-exact: .venv/.ready-dev
	@$(RUN) -m pytest --exact -n 2 $(ARGS) || [ $$? -eq 5 ]  # 5: there are none

test-slow: .venv/.ready-dev
	@$(RUN) -m pytest -m "slow and not vllm and not gpu" -n 2 $(ARGS) || [ $$? -eq 5 ]

test-vllm: .venv/.ready-dev
	@$(RUN) -m pytest -m "vllm and not slow" $(ARGS) || [ $$? -eq 5 ]  # one vLLM for most of them; skipped without it

test-gpu: .venv/.ready-dev
	@$(RUN) -m pytest -m gpu $(ARGS)

vllm: .venv/.ready
	@$(BIN)/python -m deploy.install_vllm $(PIP_ARGS)

check: .venv/.ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	NODE_OPTIONS=--max-semi-space-size=64 $(BIN)/pyright  # a tenth of its time is for collecting what lives short
	$(RUN) -m pytest -q tests/test_architecture.py

hook:
	@file="$$(git rev-parse --git-path hooks)/pre-commit"; mark="# written by: make hook"; \
	if [ -e "$$file" ] && ! grep -qxF "$$mark" "$$file"; then echo "error: $$file is there already" >&2; exit 1; fi; \
	mkdir -p "$$(dirname "$$file")" && printf '#!/bin/sh\n%s\nexec make check\n' "$$mark" > "$$file" && chmod +x "$$file" && echo "$$file"

chaos: .venv/.ready-dev
	@$(RUN) -m chaos $(ARGS)

bench: .venv/.ready-dev
	@for file in benchmarks/[!_]*$(PATTERN)*.py; do \
		name=$$(basename $$file .py); echo "== $$name"; $(RUN) -m benchmarks.$$name $(ARGS) || exit 1; done

bench-peers: .venv/.ready-dev .peers/trl/.ready .peers/skyrl/.ready
	@$(RUN) -m benchmarks.peers $(ARGS)

bench-isolation: .venv/.ready-dev
	@$(RUN) -m benchmarks.isolation $(ARGS)

bench-paper: .venv/.ready-dev
	@$(RUN) -m benchmarks.paper $(ARGS)

cluster: docker
	@$(PYTHON) -m deploy.make_secrets
	$(CLUSTER) build --build-arg PIP_ARGS="$(PIP_ARGS)" --build-arg TORCH_ARGS="$(TORCH_ARGS)"
	$(CLUSTER) up -d $(SCALE)
	@echo "the API is at http://$$($(CLUSTER) port manager 8000), keys are in .cluster/keys; stop with: make cluster-down"

cluster-test: cluster .venv/.ready-dev
	@COMPOSE="$(COMPOSE)" $(BIN)/python -m tests.system.cluster_test

cluster-down: docker
	$(CLUSTER) down $(ARGS)

docker:
	@docker info >/dev/null 2>&1 || { echo "error: no Docker engine answers here (docker info fails): install or start one," \
		"and make sure that this user may use it" >&2; exit 1; }
	@$(COMPOSE) version >/dev/null 2>&1 || { echo "error: neither \`docker compose\` nor docker-compose is installed" >&2; exit 1; }

model: .venv/.ready-dev
	$(BIN)/python models/make_tiny.py

clean:
	rm -rf .venv .peers .tinker .isolation .paper .marlaas .pytest_cache .ruff_cache .hypothesis build *.egg-info */*.egg-info report.png
	find . -name __pycache__ -prune -exec rm -rf {} +

# The environment in three stamps, so that a change of pyproject.toml does not install torch again.

.venv/.torch:
	@test -n "$(PYTHON)" || { echo "error: MARLaaS needs Python 3.11 or newer with the modules venv and ensurepip" \
		"(on Debian and Ubuntu: apt install python3-venv); name one with: make PYTHON=..." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: $(PYTHON) is older than Python 3.11" >&2; exit 1; }
	@echo "[1/2] a virtual environment in .venv, and $(TORCH) (a minute or two, once)"
	@"$(PYTHON)" -m venv .venv
	@start=$$SECONDS; $(BIN)/python -m pip --disable-pip-version-check -qq install $(PIP_ARGS) $(TORCH_ARGS) $(TORCH) && echo "      done in $$((SECONDS - start)) s"
	@touch $@

.venv/.ready: .venv/.torch pyproject.toml
	@echo "[2/2] the other packages (half a minute, once)"
	@start=$$SECONDS; $(INSTALL) -e . && echo "      done in $$((SECONDS - start)) s"
	@touch $@

.venv/.ready-dev: .venv/.torch pyproject.toml
	@echo "[2/2] the other packages, with what tests and checks need (half a minute, once)"
	@start=$$SECONDS; $(INSTALL) -e '.[dev]' && echo "      done in $$((SECONDS - start)) s"
	@touch .venv/.ready $@

# tml-renderers, which the cookbook names, has no wheel for Python 3.11, and its recipes here do without.

.tinker/.ready: examples/tinker.txt
	@echo "[+] the tinker SDK and its cookbook in .tinker (some minutes, once)"
	@"$(PYTHON)" -m venv .tinker
	@start=$$SECONDS; install=".tinker/bin/python -m pip --disable-pip-version-check -qq install --prefer-binary $(PIP_ARGS)"; \
		$$install $(TORCH_ARGS) $(TORCH) && $$install -r $< && $$install --no-deps $(COOKBOOK) && \
		.tinker/bin/python -m pip -qq download $(PIP_ARGS) --no-deps --no-binary :all: -d .tinker $(COOKBOOK) && echo "      done in $$((SECONDS - start)) s"
	@touch $@

# What MARLaaS is compared with, a virtual environment each. SkyRL declares a `typing.TypedDict`, which pydantic takes from
# Python 3.12 on alone: the .pth file, read when that Python starts, gives it the one of typing_extensions.

.peers/%/.ready: benchmarks/peers/%.txt
	@echo "[+] $* in .peers/$* (some minutes, once)"
	@"$(PYTHON)" -m venv .peers/$*
	@start=$$SECONDS; install=".peers/$*/bin/python -m pip --disable-pip-version-check -qq install --prefer-binary"; \
		$$install $(TORCH_ARGS) $(TORCH) && $$install $(PIP_ARGS) -r $< && echo "      done in $$((SECONDS - start)) s"
	@if [ $* = skyrl ]; then echo 'import typing, typing_extensions; typing.TypedDict = typing_extensions.TypedDict' > \
		"$$(.peers/$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/typed_dict.pth"; fi
	@touch $@
