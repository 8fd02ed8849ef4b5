"""From keys to batches: tiny-batches to workers, batches in order, slots, checkpoints."""
