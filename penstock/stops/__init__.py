"""What happens to a sample on its way, one file each. All share one contract, in ``stop``."""
