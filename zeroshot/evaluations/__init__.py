"""The work of the commands: each opens a model and data, embeds, measures, and hands its results to `runner.finish`."""
