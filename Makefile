# Two commands do all the set-up: `make demo` and `make test`.
PROMPT ?= KING RICHARD:
.PHONY: demo test lint format clean

demo: ## Generate text from the bundled checkpoint with our kernels
	@tools/setup.sh
	@.venv/bin/python -m lily_mlx generate --ignore-chat-template --temp 0.7 --seed 3 --max-tokens 160 --prompt "$(PROMPT)"

test: ## Run the tests
	@tools/setup.sh test,plot
	.venv/bin/python -m pytest -n auto

lint: ## Check style and types
	@tools/setup.sh dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: ## Rewrite the sources in the project's style
	@tools/setup.sh dev
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

clean: ## Remove what the other targets made
	rm -rf .venv build dist *.egg-info
