"""The stages of a pipeline, one file each. All share one contract, in ``stop``."""
