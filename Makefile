# Every target sets up what it needs: `make demo` and `make test` work on a fresh checkout.
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo lab test lint bench kernels rivals memory docs readme clean fuzz audit campaign

VENV := .venv
BENCH_VENV := .venv-bench
AUDIT_VENV := .venv-audit
PIP_FLAGS := --disable-pip-version-check -q
INSTALL = $(VENV)/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt
BENCH_INSTALL = $(BENCH_VENV)/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt
FUZZ_CASES := 1000
FUZZ_SECONDS := 30
FUZZ_SEED := 0
MANIFESTS := pyproject.toml lab/pyproject.toml constraints.txt
# A dependency group of pyproject.toml, in a way that any pip understands.
GROUP = $(VENV)/bin/python -c 'import sys, tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"][sys.argv[1]], sep="\n")'
RIVALS := torchidl==0.0.4 torchdeq==0.1.0
# What the rivals import. Their own requirements would bring another torch, so they come without them.
RIVALS_NEED := cvxpy tqdm matplotlib scikit-learn scipy
# The libraries for JAX, with all that they bring.
JAX_RIVALS := jax==0.10.2 jaxlib==0.10.2 jaxopt==0.8.5 optimistix==0.1.0 equinox==0.13.8 lineax==0.1.1 \
  jaxtyping==0.3.11 ml_dtypes==0.6.0 opt_einsum==3.4.0 wadler_lindig==0.1.8

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-6s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed-core ## one digit reader, six questions: under a minute, ends with a page to open
	$(VENV)/bin/wellposed demo $(DEMO_ARGS)

lab: $(VENV)/.installed-lab ## add the experiments: wellposed list, run, resume, status, report
	@echo "now: $(VENV)/bin/wellposed list"

test: $(VENV)/.installed-test ## run the tests and doctests (PYTEST_ARGS="-k solver" is passed on)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist worksteal -q $(PYTEST_ARGS)

lint: $(VENV)/.installed-lint ## check style, formatting and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(VENV)/.installed-docs $(VENV)/.installed-test ## build the documentation, a warning is an error, and run its code
	$(VENV)/bin/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist worksteal -q -m docs tests/test_docs.py tests/test_examples.py
	@echo "open docs/_build/html/index.html"

readme: $(VENV)/.installed-test ## write README.md, its charts and the tables of docs/speed.md from committed results
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m benchmarks.figures.readme

bench: $(BENCH_VENV)/.installed ## compare with torchidl and torchdeq, in an environment of its own
	$(BENCH_VENV)/bin/python -m benchmarks.solve.reference $(BENCH_ARGS)

kernels: $(BENCH_VENV)/.installed ## the compiled kernels against both at equal true error (KERNELS_ARGS=--quick)
	OMP_NUM_THREADS=1 $(BENCH_VENV)/bin/python -m benchmarks.kernels.layer $(KERNELS_ARGS)

rivals: $(BENCH_VENV)/.installed ## the same with jaxopt and optimistix: errors, gradients, steps, memory (RIVALS_ARGS=--quick)
	$(BENCH_VENV)/bin/python -m benchmarks.rivals.compare $(RIVALS_ARGS)

memory: $(BENCH_VENV)/.installed ## memory of a training step against the number of solver steps
	$(BENCH_VENV)/bin/python -m benchmarks.solve.memory $(MEMORY_ARGS)

campaign: $(VENV)/.installed-test ## kill, damage, soak and mutate the library by the thousand; takes hours
	OMP_NUM_THREADS=1 $(VENV)/bin/python tests/campaigns/faults.py
	OMP_NUM_THREADS=1 $(VENV)/bin/python tests/campaigns/soak.py --minutes 15
	$(VENV)/bin/python tests/campaigns/large_rows.py
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.campaigns.soundness --jobs 2
	$(VENV)/bin/python tests/campaigns/mutants.py run --count 500 --seed 0
	$(VENV)/bin/python tests/campaigns/mutants.py run --jit --count 200 --seed 0

fuzz: $(VENV)/.installed-test ## changed files and odd arguments, then atheris (FUZZ_CASES=1000 FUZZ_SECONDS=30 FUZZ_SEED=0)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -W ignore -m tests.fuzz.mutate --cases $(FUZZ_CASES) --seed $(FUZZ_SEED)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -W ignore -m tests.fuzz.differential --cases $(FUZZ_CASES) --seed $(FUZZ_SEED)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -W ignore -m tests.fuzz.entry_points --cases $(FUZZ_CASES) --seed $(FUZZ_SEED)
	$(INSTALL) atheris==3.0.0
	OMP_NUM_THREADS=1 $(VENV)/bin/python -W ignore -m tests.fuzz.guided --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)

audit: $(AUDIT_VENV)/bin/pip ## known weaknesses of the locked packages, by pip-audit; needs a connection
	$(AUDIT_VENV)/bin/python -m pip install $(PIP_FLAGS) pip-audit
	$(AUDIT_VENV)/bin/pip-audit --strict --disable-pip --no-deps -r constraints.txt

clean: ## remove what was built, not the environments
	rm -rf build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src lab tests docs benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(VENV)/.installed-core: $(MANIFESTS) | $(VENV)/bin/pip
	$(INSTALL) -e '.[fast]'
	@touch $@

$(VENV)/.installed-lab: $(MANIFESTS) | $(VENV)/bin/pip
	$(INSTALL) -e . -e ./lab
	@touch $@

$(VENV)/.installed-lint: $(MANIFESTS) | $(VENV)/bin/pip
	$(GROUP) lint > $@.txt
	$(INSTALL) -e . -r $@.txt
	@mv $@.txt $@

# Tests and documentation are of both projects, with all that is optional.
$(VENV)/.installed-%: $(MANIFESTS) | $(VENV)/bin/pip
	$(GROUP) $* > $@.txt
	$(INSTALL) -e '.[all]' -e ./lab -r $@.txt
	@mv $@.txt $@

$(BENCH_VENV)/.installed: $(MANIFESTS) Makefile | $(BENCH_VENV)/bin/pip
	$(BENCH_INSTALL) -e '.[fast]' $(RIVALS_NEED) $(JAX_RIVALS)
	$(BENCH_INSTALL) --no-deps $(RIVALS)
	$(BENCH_VENV)/bin/python -W ignore -c 'import jaxopt, optimistix, torchdeq, torchidl'
	@touch $@

# pip is the last thing venv writes, so a half-made environment is made again.
%/bin/pip:
	@for python in $(PYTHON) python3.11 python3.12 python3.13 python3 python; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "creating $* with $$("$$python" --version)"; \
	    exec "$$python" -m venv $*; \
	  fi; \
	done; \
	echo "wellposed needs Python 3.11 or later and found none; install one, or run: make PYTHON=/path/to/python3.11 ..." >&2; \
	exit 1
