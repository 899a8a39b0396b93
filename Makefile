# Everything here works on a machine with Python (3.11 or newer) and make alone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# The demo's objective: pcmepp, clip, siglip or prolip.
OBJECTIVE ?= pcmepp
RUN    := demo/$(if $(filter pcmepp,$(OBJECTIVE)),run,$(OBJECTIVE))
# Point models have no variances to filter and rank by. A large variance is a tolerance: it brings a caption closer.
POINT  := $(filter clip siglip,$(OBJECTIVE))
FILTER := --filter $(if $(POINT),all,topk,best-topk,class-deviation --select-on folds:5)
RANK   := --rankings $(if $(POINT),mean,csd,mean,tolerance --tolerance.i2t -1 --tolerance.t2i 0)
# The demo's two processes need a GPU each, or none.
GPUS   := $(shell nvidia-smi -L 2>/dev/null | grep -c ^GPU)

.PHONY: help install demo claims gpu-check test test-core test-slow lint format clean

help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(VENV)/.installed  ## create .venv with everything in it

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: install    ## the whole path on synthetic data in 5 to 9 minutes; run again to resume it
	$(BIN)/python -m tools.make_scenes demo/scenes --classes-images 4000
	OMP_NUM_THREADS=1 $(if $(filter 0 1,$(GPUS)),CUDA_VISIBLE_DEVICES=) $(BIN)/torchrun --standalone \
		--nproc-per-node 2 -m pretrain.run --config pretrain/configs/scenes.yaml --out $(RUN) --resume \
		--objective $(OBJECTIVE) --data.train demo/scenes/train --evaluate.classes demo/scenes/classes
	$(BIN)/python -m zeroshot.imagenet --model $(RUN) --data demo/scenes/classes $(FILTER) > $(RUN)/zeroshot.log
	$(BIN)/python -m zeroshot.imagenet --model $(RUN) --data demo/scenes/classes $(FILTER) \
		--templates demo/scenes/classes/prompts.json --out $(RUN)/captions > $(RUN)/captions.log
	$(BIN)/python -m zeroshot.retrieval --model $(RUN) --data demo/scenes/val $(RANK) > $(RUN)/retrieval.log
	$(BIN)/python -m tools.demo $(RUN)

claims: install  ## the paper's main claims in miniature, half an hour on two fast cores; run again to resume it
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.study tools/studies/claims.yaml --out claims --workers 2

gpu-check: install  ## everything that a GPU must prove, in nine minutes on one GPU
	GPU_CHECK_MINUTES=4 $(BIN)/python -m pytest -m gpu -rs tests/gpu; code=$$?; \
		$(BIN)/python -m tools.bench.gpu --minutes 5 && exit $$code

test: install    ## the tests, two files at a time, but for those that take longest (test-slow)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu" -n 2 --dist loadfile --no-loadscope-reorder

test-core: install  ## mathematics, models and metrics alone: three minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m core -n 2 --dist loadfile --no-loadscope-reorder

test-slow: install  ## larger models, kills, Slurm's waits: what test leaves out
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow and not gpu"

lint: install    ## ruff, without changing anything
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install  ## ruff, changing what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:           ## remove what make made
	rm -rf $(VENV) demo .pytest_cache .ruff_cache *.egg-info
