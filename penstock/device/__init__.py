"""The accelerator: the contract, its bodies, delivery of batches, and its share of the work."""
