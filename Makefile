# make demo | serve | test | lint | protos | chart | kernels | bench | bench-gpu | bench-peers | bench-ranks |
# bench-server | bench-manager | bench-allocation | bench-pressure | bench-tenants | bench-clients | chaos |
# chaos-manager: each sets up what it needs in .venv first.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

# The folders kernels/ and protos/ carry names that other packages have: keep the root off sys.path.
export PYTHONSAFEPATH := 1
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: demo serve test lint format protos chart kernels bench bench-gpu bench-peers bench-ranks bench-server bench-manager bench-allocation bench-pressure bench-tenants bench-clients chaos chaos-manager clean

demo: .venv/.demo
	$(BIN)/kvorum demo $(ARGS)

serve: .venv/.demo
	$(BIN)/kvorum serve --model smollm2-135m $(ARGS)

test: .venv/.dev
	$(BIN)/pytest $(ARGS)

lint: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	PATH="$(CURDIR)/$(BIN):$$PATH" sh protos/lint.sh
	$(BIN)/python -P deploy/helm/chart.py check
	$(BIN)/hadolint deploy/docker/Dockerfile

format: .venv/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: .venv/.dev
	sh protos/generate.sh $(BIN)/python

chart: .venv/.dev
	$(BIN)/python -P deploy/helm/chart.py generate

kernels: .venv/.demo
	$(BIN)/python -P -m kvorum.kernels.cpu.build

bench: .venv/.demo
	$(BIN)/python -P bench/cpu.py $(ARGS)

bench-gpu: .venv/.demo
	$(BIN)/python -P bench/gpu.py $(ARGS)

bench-peers: .venv/.dev
	$(BIN)/python -P bench/peers/run.py $(ARGS)

bench-ranks: .venv/.demo
	$(BIN)/python -P bench/ranks.py $(ARGS)

bench-server: .venv/.demo
	$(BIN)/python -P bench/server.py $(ARGS)

bench-manager: .venv/.demo
	$(BIN)/python -P bench/manager_scale.py $(ARGS)

bench-allocation: .venv/.demo
	$(BIN)/python -P bench/allocation.py $(ARGS)

bench-pressure: .venv/.dev
	$(BIN)/python -P bench/pressure.py $(ARGS)

bench-tenants: .venv/.dev
	$(BIN)/python -P bench/tenants/run.py $(ARGS)

bench-clients: .venv/.dev
	$(BIN)/python -P bench/clients.py $(ARGS)
	$(BIN)/python -P bench/gateway.py $(ARGS)

chaos: .venv/.dev
	$(BIN)/python -P bench/chaos/run.py $(ARGS)

chaos-manager: .venv/.dev
	$(BIN)/python -P bench/manager_chaos.py $(ARGS)

clean:
	rm -rf .venv build src/*.egg-info

# uv installs the pinned set in seconds where pip takes minutes; it reads no pip configuration, so a folder of wheels
# that pip is told to look at is handed on.
define install
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
	links=$$($(BIN)/python -m pip config get global.find-links 2>/dev/null || true); \
	$(BIN)/uv pip install --quiet --python $(BIN)/python $${links:+--find-links "$$links"} \
		--constraints constraints.txt --overrides overrides.txt --editable '.[$(1)]'
	$(BIN)/python -P -m kvorum.kernels.cpu.build
	touch $@
endef

.venv/.demo: pyproject.toml constraints.txt overrides.txt
	$(call install,demo)

.venv/.dev: pyproject.toml constraints.txt overrides.txt
	$(call install,demo$(comma)dev)
	touch .venv/.demo

comma := ,
