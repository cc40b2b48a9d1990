# make demo   set up, then profile, plan and train the digits task with two stage processes
# make test   set up, then lint, type checks and the tests
# make every-case  the tests with all their cases, of which `make test` runs a choice
# make quick  lint and the tests that take no processes, no browser and no time (two minutes)
# make check  lint, format and type checks alone
# make model-table  profile the models of docs/models.md anew (a quarter of an hour)
# make hf-families  profile, plan and train Hugging Face families by name for docs/families.md (ten minutes)
# make bench-exports  our cuts beside those that other engines make by default, simulated and in torch (some minutes)
# make bench-scale    plan a GPT-3 shape for up to 4,096 devices (some minutes)
# make accuracy  hold predictions against measured runs for docs/accuracy.md (a minute; SAILOR=folder has others' runs)
# make claims  study what the papers claim for docs/claims.md (goes on where it was stopped)
# make claims-quick   a small part of that, on 2 and 4 devices; some 7 minutes
# make bench-objective  whether planning by a study of a tenth finds the soonest plan, for docs/objective.md (hours)
# make bench-battery    hold everyday plans against a hill climb for docs/planner_battery.md (hours)
# make bench-freedom    hold questions against freer ones, whose plans may be no slower (half an hour)
# make bench-sequences  plan drawn clusters of several kinds of devices for docs/planner_sequences.md (long)
# make bench-planner  solve published workloads for docs/planner_benchmark.md and planner_two_stages.md (some minutes)
# make bench  race ours against other pipelines for docs/benchmarks.md (hours, on a quiet machine)
# make bench-quick    a small part of that, in under 3 minutes
# make bench-loaders  what loading costs a pipeline of two processes (some minutes, on a quiet machine)
# make bench-links    its part over slow wires (as root, on Linux)
# make pictures  draw plans of every system for docs/pictures_of_systems.md (two minutes)
# make fuzz   break 2,000 files and 500 command lines, and see that each is refused in one line
# make chaos  kill the workers of 50 runs at drawn moments; each must end with the right weights
# make lines  lines of the packages by folder, core and satellites apart; make lines SINCE=COMMIT beside a commit's
# make format put the code into the house's format

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO ?= demo

.PHONY: demo test every-case quick check lint types tests browser format model-table hf-families bench-planner bench-battery bench-freedom bench-sequences bench-scale bench-exports accuracy claims claims-quick bench-objective bench bench-quick bench-links bench-loaders deepspeed pictures notebook fuzz chaos lines clean

demo: $(READY)
	rm -rf $(DEMO)
	$(BIN)/tp-profile digits --batch-size 64 --together 2 -o $(DEMO)/profile.json
	$(BIN)/tp-plan solve -q $(DEMO)/profile.json --devices 2 --stages 2 --memory 32MiB \
	    --variant timeprest --micro-batches 4 -o $(DEMO)/plan.json
	$(BIN)/tp-plan show $(DEMO)/plan.json
	$(BIN)/tp-run $(DEMO)/plan.json --epochs 12 --run-dir $(DEMO)/run

# What needs one core goes on beside what needs another.
test:
	$(MAKE) -j 3 check $(VENV)/.collected browser
	$(MAKE) tests

check: lint types

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The package is mapped from the root folder; mypy finds it under its name through a link.
types: $(READY)
	@mkdir -p $(VENV)/typing && ln -sfn ../.. $(VENV)/typing/timeprest
	MYPYPATH=$(VENV)/typing MYPY_NUM_WORKERS=2 $(BIN)/mypy -p timeprest

# What needs neither processes nor a browser, and doesn't take long: for every change.
quick: lint
	$(BIN)/pytest -n 2 --dist worksteal -q -m "not processes and not browser and not slow"

# In a new environment one process compiles what tests load, and not each of several the same.
$(VENV)/.collected: $(READY)
	-@$(BIN)/pytest --collect-only -q > $@

tests: $(READY) browser
	$(BIN)/pytest -n 3 --dist worksteal

every-case: $(READY) browser
	$(BIN)/pytest -n 3 --dist worksteal --every-case

# For the tests of pages; they are skipped where there is none and it can't be installed.
browser:
	@.ci/browser

model-table: $(READY)
	$(BIN)/python docs/model_table.py

hf-families: $(READY)
	$(BIN)/python docs/families.py

bench-planner: $(READY)
	$(BIN)/python tests/benchmarks/planner/published.py

# BATTERY="--sample 30 --seed 1 --seconds 30 --climb 12" does a part of it.
bench-battery: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m timeprest.tests.benchmarks.planner.battery $(BATTERY)

# FREEDOM="replicas pins --count 10 --seconds 5" does a part of it.
bench-freedom: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m timeprest.tests.benchmarks.planner.freedom $(FREEDOM)

bench-sequences: $(READY)
	$(BIN)/python tests/benchmarks/planner/sequences.py

accuracy: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m timeprest.tests.benchmarks.accuracy --sailor $(SAILOR) $(if $(FIT),--fit $(FIT)) --page docs/accuracy.md

CLAIMS := OMP_NUM_THREADS=1 $(BIN)/python -m timeprest.tests.benchmarks.claims

claims: $(READY)
	$(CLAIMS)

claims-quick: $(READY)
	$(CLAIMS) --quick --devices 2,4 --work runs/claims-quick --studies runs/claims-quick --page runs/claims-quick/page.md

bench-objective: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m timeprest.tests.benchmarks.objective

bench-exports: $(READY)
	$(BIN)/python tests/benchmarks/exports.py
	$(BIN)/python tests/benchmarks/exports.py --run

bench-scale: $(READY)
	$(BIN)/python tests/benchmarks/planner/scale.py

SPEED := OMP_NUM_THREADS=1 $(BIN)/python -m timeprest.tests.benchmarks.speed
QUICK := runs/bench-quick

bench: $(READY) deepspeed
	$(SPEED) --fresh $(BENCH)
	$(SPEED).held
	@test "$$(id -u)" != 0 || $(MAKE) bench-links

bench-loaders: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/loaders.py

bench-links: $(READY)
	$(SPEED).slow_links

bench-quick: $(READY)
	$(SPEED) --fresh --models gpt,vgg11 --contestants timeprest,tdp-1f1b@4 --rounds 1 --timed 6 \
	    --profile-seconds 5 --no-search --patience 2 --at-most 140 --work $(QUICK) --results $(QUICK)/races.json \
	    --page $(QUICK)/page.md
	cat $(QUICK)/page.md

# A rival of the races. It goes beside the environment's packages, with no torch of its own; where
# it can't be had, the races do without it and say so.
deepspeed: $(READY)
	test -d $(VENV)/deepspeed/deepspeed || $(BIN)/pip install --quiet --no-deps \
	    --disable-pip-version-check --target $(VENV)/deepspeed deepspeed==0.19.8 einops hjson \
	    msgpack packaging py-cpuinfo pydantic pydantic-core annotated-types typing-inspection tqdm \
	    || echo "DeepSpeed can't be installed here"

pictures: $(READY)
	$(BIN)/python docs/pictures.py

notebook: $(READY)
	$(BIN)/python tests/helpers/output/notebooks.py docs/examples/first_steps.ipynb

fuzz: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/fuzz --files 2000 --lines 500

chaos: $(READY)
	CHAOS_RUNS=50 $(BIN)/pytest -n 2 tests/runtime/processes/test_restarts.py

lines: $(READY)
	$(BIN)/python tests/benchmarks/lines.py $(SINCE)

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(DEMO) build dist *.egg-info
