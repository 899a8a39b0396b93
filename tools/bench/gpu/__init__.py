"""All that a GPU must prove, in one command: `python -m tools.bench.gpu`."""
