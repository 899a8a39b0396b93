"""Run folders of the training stages: log, lock, checkpoints on disk, signals."""
