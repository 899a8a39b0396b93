"""What every training stage does with its run folder: log, lock, checkpoints on disk, signals, agreement of ranks."""
